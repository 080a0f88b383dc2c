"""A model that Megatron-Core computes over ranks, as passes, rollout and export see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from verl.comm import TorchDistComm
from verl.errors import ConfigError, TrainingError
from verl.metrics import Metrics
from verl.models.backbone import hidden_states, probe_batch, probe_tolerance
from verl.models.tensor_parallel import compute_by
from verl.models.value import ValueModel
from verl.train_engine.fsdp_module import decoder_layers, units_of
from verl.train_engine.megatron_model import MegatronModel, backbone_of, check_model, require_megatron
from verl.train_engine.memory import is_out_of_memory, memory_numbers
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.spread import Item, Result, SpreadModule


class MegatronModule(SpreadModule):
    """Spread ``module``, whole and equal on all ranks of ``comm``, by Megatron's tensor parallelism.

    Each ``tensor_size`` neighbouring ranks hold one copy of the weights; with more ranks there are several copies, and
    data parallelism between them. The weights of ``module`` itself are given up: it keeps their names, shapes and
    types, and one NaN for each. (The head of a value model is small, and stays.)

    Args:
        frozen: the weights are never trained.

    Attributes:
        parallel: the Megatron model.
        data: how the ranks with the same part of the weights talk.
        tensor: how the ranks of one copy talk.
    """

    def __init__(
        self,
        module: PreTrainedModel | ValueModel,
        comm: TorchDistComm,
        settings: ParallelSettings,
        *,
        frozen: bool = False,
    ):
        require_megatron()
        size = settings.tensor_size
        if comm.world_size % size:
            raise ConfigError(
                f"megatron.tensor_model_parallel_size={size} does not divide the {comm.world_size} ranks of the role; "
                "use a divisor."
            )
        check_model(module, size, settings.key)
        self.module, self.comm = module, comm
        first = next(module.parameters())
        self.device, self.live_dtype = first.device, first.dtype
        groups = _groups(comm, size, self.device.type)
        self.tensor, self.data = TorchDistComm(groups["tp"]), TorchDistComm(groups.pop("data"))
        self.units = units_of(module, decoder_layers(module))
        model = backbone_of(module)
        expected = _probe(model)
        self.parallel = MegatronModel(module, groups)
        self.shapes = dict(self.parallel.layout.shapes)
        self.parallel.parts.requires_grad_(not frozen)
        self.parallel.parts.train(not frozen)
        compute_by(model, self.parallel)
        _compare(model, expected)
        kept = {id(p) for p in self.parallel.parts.parameters()}
        _give_up([p for p in module.parameters() if id(p) not in kept])

    def part_of(self, name: str) -> torch.Tensor:
        """The Megatron parameter in which this rank's part of a weight lies."""
        return self.parallel.parts.get_parameter(self.parallel.layout.places[name].parameter)

    def together(self, items: Sequence[Item]) -> list[tuple[Item, int | None]]:
        found: list[tuple[Item, int | None]] = []
        for rank, theirs in enumerate(self.tensor.all_gather_object(list(items))):
            mine = rank == self.tensor.rank
            found += [(item, number if mine else None) for number, item in enumerate(theirs)]
        return found

    def infer(self, compute: Callable[[], Result]) -> Result | None:
        with torch.no_grad():
            return self._attempt(compute)

    def infer_nothing(self) -> None:
        """Ranks of one copy always have equally many passes, and copies wait for each other after the passes only."""

    def backward(
        self, loss_of: Callable[[], tuple[torch.Tensor, Metrics]], scale: float = 1.0, *, last: bool = True
    ) -> Metrics | None:
        def compute() -> Metrics:
            loss, metrics = loss_of()
            if loss.requires_grad:
                (loss * scale if scale != 1.0 else loss).backward()
            return metrics

        return self._attempt(compute)

    def _attempt(self, compute: Callable[[], Result]) -> Result:
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"Out of memory ({memory_numbers(self.device)}). With strategy=megatron the other ranks cannot be "
                "told, so smaller micro-batches are not tried by themselves: lower ppo_max_token_len_per_gpu or "
                "ppo_micro_batch_size_per_gpu, or enlarge megatron.tensor_model_parallel_size."
            ) from error

    def slot_rows(self, name: str) -> int:
        return self.parallel.layout.slot_rows(name)

    @torch.no_grad()
    def fill(self, name: str, slot: torch.Tensor) -> dist.Work | None:
        return self.parallel.layout.gather(name, self.part_of(name), slot)


def _groups(comm: TorchDistComm, size: int, device: str) -> dict[str, dist.ProcessGroup]:
    """Process groups of this rank by Megatron's names, and ``data``; all ranks call this together."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.tensor(dist.get_process_group_ranks(comm.group)).view(-1, 1, 1, size)
    mesh = DeviceMesh(device, ranks, mesh_dim_names=("data", "pp", "cp", "tp"))
    return {name: mesh.get_group(name) for name in ("tp", "pp", "cp", "data")}


@torch.no_grad()
def _probe(module: PreTrainedModel) -> torch.Tensor:
    return hidden_states(module, probe_batch(next(module.parameters()).device, module.config.vocab_size))


def _compare(module: PreTrainedModel, expected: torch.Tensor) -> None:
    got = _probe(module)
    error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    if not error < probe_tolerance(expected.dtype):
        raise TrainingError(
            f"Megatron computes other hidden states than {type(module).__name__} (relative difference {error:.1e}), so "
            "strategy=megatron cannot train this model; use strategy=fsdp."
        )


def _give_up(weights: list[nn.Parameter]) -> None:
    """Free the weights; a NaN tells whoever reads them all the same."""
    for p in weights:
        p.data = p.data.new_full((1,), float("nan")).expand(p.shape)
