"""A model that Megatron-Core computes over ranks, as passes, rollout and export see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from verl.comm import TorchDistComm
from verl.errors import TrainingError
from verl.metrics import Metrics
from verl.models.backbone import hidden_states, probe_batch, probe_tolerance
from verl.models.sequence_parallel import share_tokens
from verl.models.tensor_parallel import compute_by
from verl.models.value import ValueModel
from verl.train_engine.fsdp_module import decoder_layers, units_of
from verl.train_engine.megatron_grid import Grid
from verl.train_engine.megatron_model import MegatronModel, backbone_of, check_model, require_megatron
from verl.train_engine.memory import is_out_of_memory, memory_numbers
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.spread import Item, Result, SpreadModule


class MegatronModule(SpreadModule):
    """Spread ``module``, whole and equal on all ranks of ``comm``, as ``settings`` say.

    Neighbouring ranks hold one copy of the weights; with more ranks there are several copies, and data parallelism
    between them. The weights of ``module`` itself are given up: it keeps their names, shapes and types, and one NaN for
    each. (The head of a value model is small, and stays.)

    Args:
        frozen: the weights are never trained.

    Attributes:
        parallel: the Megatron model.
        grid: which ranks do what together.
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
        self.grid = Grid(comm, settings)
        check_model(module, settings)
        self.module, self.comm = module, comm
        first = next(module.parameters())
        self.device, self.live_dtype = first.device, first.dtype
        self.units = units_of(module, decoder_layers(module))
        model = backbone_of(module)
        expected = _probe(model)
        self.parallel = MegatronModel(module, self.grid, settings)
        self.shapes = dict(self.parallel.layout.shapes)
        self.parallel.parts.requires_grad_(not frozen)
        self.parallel.parts.train(not frozen)
        compute_by(model, self.parallel)
        if self.parallel.sequence is not None:
            share_tokens(model, self.parallel.sequence)
        [got] = self.settle([self.infer(lambda: {"probe": _probe(model)})])
        _compare(model, got["probe"], expected)
        kept = {id(p) for p in self.parallel.parts.parameters()}
        _give_up([p for p in module.parameters() if id(p) not in kept])

    def together(self, items: Sequence[Item]) -> list[tuple[Item, int | None]]:
        found: list[tuple[Item, int | None]] = []
        for rank, theirs in enumerate(self.grid.copy.all_gather_object(list(items))):
            mine = rank == self.grid.copy.rank
            found += [(item, number if mine else None) for number, item in enumerate(theirs)]
        return found

    def infer(self, compute: Callable[[], Result]) -> Result | None:
        with megatron_on(self.device):
            found = self._attempt(lambda: self.parallel.pipeline.infer(compute))
        return cast(Result, {}) if found is None else found  # what other stages know comes with settle

    def settle(self, results: list[Result]) -> list[Result]:
        pipeline = self.grid.pipeline
        if pipeline.world_size == 1:
            return results
        known = [{key: tensor.cpu() for key, tensor in cast(Mapping, one).items()} for one in results]
        return pipeline.all_gather_object(known if self.parallel.pipeline.at_the_end else None)[-1]

    def infer_nothing(self) -> None:
        """Ranks of one copy always have equally many passes, and copies wait for each other after the passes only."""

    def backward(
        self, loss_of: Callable[[], tuple[torch.Tensor, Metrics]], scale: float = 1.0, *, last: bool = True
    ) -> Metrics | None:
        return self.train([loss_of], scale)[0]

    def train(self, losses: Sequence[Callable[[], tuple[torch.Tensor, Metrics]]], scale: float = 1.0) -> list[Metrics]:
        """Add the gradients of ``scale`` times each loss; all ranks of a copy call this together.

        Returns:
            The metrics that came with each.
        """
        pipeline = self.grid.pipeline
        with megatron_on(self.device):
            found = self.parallel.pipeline.train(losses, scale, self._attempt)
        if pipeline.world_size == 1:
            return found
        return pipeline.all_gather_object(found if self.parallel.pipeline.at_the_end else None)[-1]

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
        layout = self.parallel.layout
        place = layout.places[name]
        held = self.parallel.parts.get_parameter(place.parameter) if layout.here(place) else None
        return layout.gather(name, held, slot)


@contextlib.contextmanager
def megatron_on(device: torch.device) -> Iterator[None]:
    """Megatron makes its buffers on ``torch.cuda.current_device()``: within, on a host, that is the host."""
    if device.type == "cuda":
        yield
        return
    current, torch.cuda.current_device = torch.cuda.current_device, lambda: device  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.current_device = current


@torch.no_grad()
def _probe(module: PreTrainedModel) -> torch.Tensor:
    return hidden_states(module, probe_batch(next(module.parameters()).device, module.config.vocab_size))


def _compare(module: PreTrainedModel, got: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((got.to(expected.device) - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    if not error < probe_tolerance(expected.dtype):
        raise TrainingError(
            f"Megatron computes other hidden states than {type(module).__name__} (relative difference {error:.1e}), so "
            "strategy=megatron cannot train this model; use strategy=fsdp."
        )


def _give_up(weights: list[nn.Parameter]) -> None:
    """Free the weights; a NaN tells whoever reads them all the same."""
    for p in weights:
        p.data = p.data.new_full((1,), float("nan")).expand(p.shape)
