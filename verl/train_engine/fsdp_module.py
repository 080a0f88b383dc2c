"""A model whose weights are spread over ranks with FSDP2, and passes over it that all ranks make together.

FSDP gathers a module's weights when the module is called. Our forward passes do not call the model: they call its
backbone and then use the output layer's weight in a fused log-prob. So the whole computation of a loss runs inside the
``forward`` of a root module that owns everything outside the decoder layers (embedding, last norm, output or value
head). FSDP gathers these when the root is entered, once even if input and output embedding are tied, and frees them
when the backward pass is over; each decoder layer is a unit of its own.

The shards are float32 and are the master weights; they are gathered in the type that computes.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from verl.comm import TorchDistComm
from verl.errors import ConfigError, TrainingError
from verl.metrics import Metrics
from verl.models.backbone import hidden_states
from verl.models.cuts import Region, whole_region
from verl.models.packing import PackedBatch, Segment
from verl.models.pending import PendingWeights, pending_of, weights_are_here
from verl.models.sequence_parallel import split_sequences
from verl.train_engine.exchange import Exchange
from verl.train_engine.fsdp_log import CollectiveLog, LoggedAllGather, LoggedReduceScatter
from verl.train_engine.memory import is_out_of_memory, memory_numbers, release_memory
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.spread import Item, Result, SpreadModule, rows_per_rank

TRAIN, INFER = "train", "infer"


def torch_at_least(major: int, minor: int) -> bool:
    """By the version of torch in use."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (major, minor)


class _Root(nn.Module):
    """What FSDP takes for the model: everything that is computed with its weights happens in here."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


class ShardedModule(SpreadModule):
    """Spread ``module`` over the ranks of ``comm``; it must be whole and equal on all of them, or still without
    weights (:mod:`verl.models.pending`): then each rank reads its own rows.

    Args:
        frozen: the weights are never trained, and stay in the type that computes.

    Attributes:
        live_dtype: the type in which weights are gathered and compute.
        shards: the DTensor parameters by name.
        units: the names of each decoder layer in turn, and last those of the root.
        replicas: copies of the weights that there are (hybrid sharding).
    """

    def __init__(self, module: nn.Module, comm: TorchDistComm, settings: ParallelSettings, *, frozen: bool = False):
        self.module = module
        self.comm = comm
        first = next(module.parameters())
        pending = pending_of(module)
        self.device, self.live_dtype = first.device if pending is None else pending.device, first.dtype
        self.mesh = make_mesh(comm, self.device.type, settings.fsdp_size)
        self.replicas = self.mesh.size(0) if self.mesh.ndim == 2 else 1
        self.group: dist.ProcessGroup = self.mesh.get_group(self.mesh.ndim - 1)
        self.group_rank, self.group_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        layers = decoder_layers(module)
        self.units = units_of(module, layers)
        self._passes = 0  # through the decoder layers, in the pass at hand
        self._log = CollectiveLog()
        self.root = self._shard(module, layers, settings)
        if pending is not None:
            self._read(pending, settings)
        self._sharers = self._split_sequences(settings.sequence_size)
        self.shards = dict(module.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in self.shards.items()}
        self.recoverable = self._watch(layers)
        self._first_passes(frozen)

    def _shard(self, module: nn.Module, layers: list[nn.Module], settings: ParallelSettings) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        wide = torch.promote_types(self.live_dtype, torch.float32)
        narrow = self.live_dtype != wide
        options = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.live_dtype if narrow else None,
                reduce_dtype=wide if narrow else None,
                cast_forward_inputs=False,
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
            if settings.offload
            else OffloadPolicy(),
        }
        root = _Root(module)
        for unit in (*layers, root):
            # one unit at a time, so that no more than one is whole in float32
            for p in unit.parameters():
                if p.requires_grad and type(p) is nn.Parameter:
                    p.data = p.data.to(wide)
            again = {} if unit is root else {"reshard_after_forward": settings.reshard_after_forward}
            fully_shard(unit, **options, **again)
        if torch_at_least(2, 9):
            for unit in (*layers, root):
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
        if settings.forward_prefetch:
            for layer, following in itertools.pairwise(layers):
                layer.set_modules_to_forward_prefetch([following])
        return root

    @torch.no_grad()
    def _read(self, pending: PendingWeights, settings: ParallelSettings) -> None:
        """Make room for the rows of this rank, read them, and make the model ready: all ranks together."""
        buffers = [(m, name, b) for m in self.module.modules() for name, b in m._buffers.items() if b is not None]
        self.root.to_empty(device="cpu" if settings.offload else self.device)
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer.to(self.device)
        self.shards = dict(self.module.named_parameters())
        for name, local, _, start in self.named_shards():
            # through the type that computes, which is all that is known of the weights where they are loaded whole
            local.copy_(pending.rows(name, start, start + len(local)).to(self.live_dtype))
        self.root(pending.settle)
        self.root.reshard()
        weights_are_here(self.module)

    def _split_sequences(self, size: int) -> TorchDistComm | None:
        """Let each ``size`` neighbouring ranks share the tokens of their batches; how they talk (None: nobody shares).

        Raises:
            ConfigError: the ranks do not divide into groups of that size.
        """
        from torch.distributed.device_mesh import DeviceMesh

        world = self.comm.world_size
        if size == 1:
            return None
        if world % size:
            raise ConfigError(f"ulysses_sequence_parallel_size={size} does not divide the {world} ranks of the role.")
        ranks = torch.tensor(dist.get_process_group_ranks(self.comm.group)).view(world // size, size)
        mesh = DeviceMesh(self.device.type, ranks, mesh_dim_names=("data", "sequence"))
        split_sequences(self._backbone, mesh.get_group("sequence"))
        return TorchDistComm(mesh.get_group("sequence"))

    @property
    def _backbone(self) -> PreTrainedModel:
        return self.module if isinstance(self.module, PreTrainedModel) else self.module.model

    def together(self, items: Sequence[Item]) -> list[tuple[Item, int | None]]:
        own: list[tuple[Item, int | None]] = [(item, number) for number, item in enumerate(items)]
        if self._sharers is None:
            return own
        everybody = self._sharers.all_gather_object(list(items))
        found: list[tuple[Item, int | None]] = []
        for rank, theirs in enumerate(everybody):
            found += own if rank == self._sharers.rank else [(item, None) for item in theirs]
        return found

    @property
    def gradient_factor(self) -> float:
        """What turns the reduced gradients into sums over ranks: older versions of FSDP can only average."""
        return 1.0 if torch_at_least(2, 9) else float(self.comm.world_size)

    def _watch(self, layers: list[nn.Module]) -> bool:
        """Count the passes through the layers, and log collectives. Whether a pass can be given up in the middle."""
        from torch.distributed.fsdp import FSDPModule

        layers[0].register_forward_pre_hook(self._entered)
        # older versions of FSDP have no way back from a pass that was not finished; the all-reduce of hybrid sharding
        # and the exchanges of sequence parallelism are not logged
        if "reset_iter_state" not in vars(FSDPModule) or self.replicas > 1 or self._sharers is not None:
            return False
        for unit in (*layers, self.root):
            unit.set_custom_all_gather(LoggedAllGather(self._log))
            unit.set_custom_reduce_scatter(LoggedReduceScatter(self._log))
        return True

    def _entered(self, module: nn.Module, inputs: object) -> None:
        self._passes += 1

    def _first_passes(self, frozen: bool) -> None:
        """Passes over nothing: FSDP sets itself up, and the log learns what a pass does."""
        self.infer_nothing()
        self._log.keep(INFER)
        if not frozen:
            self.backward_nothing()
            self._log.keep(TRAIN)
            self.discard_gradients()

    def named_shards(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...], int]]:
        """(name, rows of this rank, shape of the whole, first row) of every parameter."""
        for name, p in self.shards.items():
            step = rows_per_rank(p.shape[0], self.group_size)
            yield name, p.to_local().detach(), tuple(p.shape), min(self.group_rank * step, p.shape[0])

    def slot_rows(self, name: str) -> int:
        return rows_per_rank(self.shapes[name][0], self.group_size) * self.group_size

    def fill(self, name: str, slot: torch.Tensor) -> dist.Work | None:
        """A rank casts its shard into its place in the slot, and an all-gather in place fills the rest."""
        local = self.shards[name].to_local().detach()
        step = len(slot) // self.group_size
        own = slot.narrow(0, step * self.group_rank, step)
        own[: len(local)].copy_(local, non_blocking=True)
        if self.group_size == 1:
            return None
        return dist.all_gather_into_tensor(slot, own, group=self.group, async_op=True)

    def fill_part(self, name: str, slot: torch.Tensor, wanted: Callable[[int], Region]) -> Exchange:
        """A rank sends to each other one those of its rows (or columns of them) that this one wants, and no more."""
        shape = self.shapes[name]
        whole, step, first = whole_region(shape), rows_per_rank(shape[0], self.group_size), self._first_of_group

        def held(rank: int) -> Region:
            start = min(rank * step, shape[0])
            return whole._replace(row=start, rows=min(step, shape[0] - start))

        local = self.shards[name].to_local().detach()
        return Exchange(self.group, held, lambda rank: wanted(first + rank), local.view(-1, whole.columns), slot)

    @property
    def _first_of_group(self) -> int:
        """The rank of ``comm`` that is rank 0 among those that share a copy of the weights."""
        return self.comm.rank - self.group_rank

    def discard_gradients(self) -> None:
        for p in self.shards.values():
            p.grad = None

    # passes, which every rank makes in the same order; None: memory ran out here, and the others do not know yet

    def infer(self, compute: Callable[[], Result]) -> Result | None:
        """``compute()`` without gradients, with the weights gathered as they are needed."""
        with torch.no_grad():
            return self._attempt(INFER, lambda: self._forward(compute))

    def infer_nothing(self) -> None:
        self.infer(lambda: None)

    def backward(
        self, loss_of: Callable[[], tuple[torch.Tensor, Metrics]], scale: float = 1.0, *, last: bool = True
    ) -> Metrics | None:
        """Add the gradients of ``scale`` times the loss, summed over ranks, to those of the shards.

        Args:
            last: no further micro-batch follows in this step.
        """
        if self.replicas > 1:
            self.root.set_requires_all_reduce(last)

        def compute() -> Metrics:
            loss, metrics = self._forward(loss_of, train=True)
            (loss * scale if scale != 1.0 else loss).backward()
            return metrics

        return self._attempt(TRAIN, compute)

    def backward_nothing(self, *, last: bool = True) -> None:
        self.backward(lambda: (torch.zeros((), device=self.device), Metrics()), last=last)

    def _forward(self, compute: Callable[[], Result], *, train: bool = False) -> Result:
        """Call ``compute`` in the root; where it did not use the model, so that others would wait, a pass is added."""
        self._passes = 0

        def inside() -> Result:
            result = compute()
            if self._passes == 0:
                nothing = self._pass_over_nothing()
                if train:
                    return (result[0] + nothing, *result[1:])  # type: ignore[index,return-value]
            if self._passes > 1:
                raise TrainingError(
                    "This loss goes through the model more than once a micro-batch, which sharded training cannot do: "
                    f"use {self.strategy_hint}."
                )
            return result

        return self.root(inside)

    strategy_hint = "actor_rollout_ref.actor.strategy=torch"

    def _pass_over_nothing(self) -> torch.Tensor:
        """0, computed from every weight that a real pass uses; its gradients are zeros."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        none = torch.zeros(0, dtype=torch.long, device=self.device)
        hidden = hidden_states(self._backbone, PackedBatch(ids, ids, [Segment(0, 1)], none, none, none, none, (0, 0)))
        if not torch.is_grad_enabled():
            return hidden.new_zeros(())
        # not a product with 0, which would keep a NaN
        total = hidden.masked_fill(torch.ones_like(hidden, dtype=torch.bool), 0).sum()
        outside = set(self.units[-1])
        for name, p in self.module.named_parameters():
            if name in outside and p.requires_grad and p.numel():
                one = p.reshape(-1)[:1]
                total = total + one.masked_fill(torch.ones_like(one, dtype=torch.bool), 0).sum().to(total.dtype)
        return total

    def _attempt(self, kind: str, compute: Callable[[], Result]) -> Result | None:
        self._log.begin()
        try:
            result = compute()
            self.root.reshard()  # without a backward pass the root would stay gathered, and grow stale
            return result
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if not self.recoverable:
                raise TrainingError(
                    f"Out of memory ({memory_numbers(self.device)}). Sharded training can go on with smaller "
                    "micro-batches only with a newer torch and without hybrid sharding (fsdp_config.fsdp_size=-1); "
                    "lower ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu."
                ) from error
        # outside the except block, whose frames hold tensors
        gc.collect()
        release_memory()
        self.root.reset_iter_state()
        self.root.reshard()
        self._log.make_the_rest(kind)
        return None


def make_mesh(comm: TorchDistComm, device: str, fsdp_size: int):
    """One dimension of all ranks, or (copies, ranks of a copy).

    Raises:
        ConfigError: the ranks do not divide into copies of ``fsdp_size``.
    """
    from torch.distributed.device_mesh import DeviceMesh

    world = comm.world_size
    size = world if fsdp_size < 0 else fsdp_size
    if size == world:
        return DeviceMesh.from_group(comm.group, device, mesh_dim_names=("shard",))
    if size < 1 or world % size:
        raise ConfigError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world} ranks of the role; use -1 or a divisor."
        )
    ranks = torch.tensor(dist.get_process_group_ranks(comm.group)).view(world // size, size)
    return DeviceMesh(device, ranks, mesh_dim_names=("replicate", "shard"))


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The outermost layers that transformers itself would checkpoint, in order.

    Raises:
        TrainingError: the model has none.
    """
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for part in module.modules():
        if isinstance(part, GradientCheckpointingLayer) and part not in inside:
            layers.append(part)
            inside.update(part.modules())
    if not layers:
        raise TrainingError(
            f"{type(module).__name__} has no decoder layers that are known here, so it cannot be sharded; "
            "use actor_rollout_ref.actor.strategy=torch."
        )
    return layers


def units_of(module: nn.Module, layers: list[nn.Module]) -> list[list[str]]:
    """Names of the parameters of each layer, and last those of none."""
    owner = {id(p): number for number, layer in enumerate(layers) for p in layer.parameters()}
    units: list[list[str]] = [[] for _ in range(len(layers) + 1)]
    for name, p in module.named_parameters():
        units[owner.get(id(p), len(layers))].append(name)
    return units
