"""Sharded training: weights, gradients and moments are spread over ranks with FSDP2.

Gradients of a micro-batch are reduce-scattered at once and added up in the float32 shards. Adding them up before they
are reduced would save traffic, but needs 4 bytes for every weight of the whole model on every rank, which is what
sharding is there to avoid. (With hybrid sharding the all-reduce between copies waits for the last micro-batch: its sums
are shards already.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.comm import TorchDistComm
from verl.errors import ConfigError
from verl.metrics import Metrics
from verl.models.value import ValueModel
from verl.train_engine.base import LossOf, Micro
from verl.train_engine.fsdp_module import ShardedModule
from verl.train_engine.memory import MemoryShortageError, RandomState
from verl.train_engine.optimizers import OptimizerSettings, restore_state, state_tensors
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.saved import StatePiece, gather_pieces, rows_in, shape_in, weight_in
from verl.train_engine.scaling import LossScaler
from verl.train_engine.torch_engine import TorchEngine

ELEMENTWISE = ("adamw", "sgd")
"""Optimizers that treat every weight by itself, so that a shard moves as it would in the whole."""


def why_not_sharded(module: nn.Module, settings: OptimizerSettings | None) -> str | None:
    """The reason for which a model (and its optimizer) cannot work on shards; None if it can."""
    if settings is not None and settings.kind not in ELEMENTWISE:
        return f"optim.optimizer={settings.kind} does not treat every weight by itself ({', '.join(ELEMENTWISE)} do)"
    if not isinstance(module, (PreTrainedModel, ValueModel)):
        return f"{type(module).__name__} is a class of your own, of which nothing is known here"
    if not all(p.is_floating_point() for p in module.parameters()):
        return "quantized weights (model.quantization) cannot be cut into shards"
    return None


class ShardedWeights:
    """The trained shards as plain tensors: what the optimizer works on. See :class:`verl.train_engine.master`.

    ``masters[name]`` shares its storage with the FSDP parameter.
    """

    def __init__(self, sharded: ShardedModule):
        self.sharded = sharded
        self.live = {name: p for name, p in sharded.shards.items() if p.requires_grad}
        self.masters = {name: nn.Parameter(p.to_local().detach()) for name, p in self.live.items()}

    def gradients(self) -> list[torch.Tensor]:
        """The gradient sums of the shards, over all micro-batches and ranks."""
        factor = self.sharded.gradient_factor
        for name, p in self.live.items():
            master = self.masters[name]
            master.grad = torch.zeros_like(master) if p.grad is None else p.grad.to_local().detach()
            if factor != 1.0:
                master.grad.mul_(factor)
        return [m.grad for m in self.masters.values()]

    def discard_gradients(self) -> None:
        self.sharded.discard_gradients()
        for master in self.masters.values():
            master.grad = None

    def publish(self) -> None:
        """The shards are the weights: nothing to write."""

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.masters.items()


class FSDPEngine(TorchEngine):
    """See :class:`~verl.train_engine.base.TrainEngine`.

    Attributes:
        lockstep: the sharded model, whose passes all ranks make together.
    """

    weights: ShardedWeights
    lockstep: ShardedModule
    comm: TorchDistComm

    def __init__(self, module: nn.Module, settings: OptimizerSettings, comm: TorchDistComm, parallel: ParallelSettings):
        reason = why_not_sharded(module, settings)
        if reason is not None:
            raise ConfigError(f"{parallel.key}=fsdp is not possible: {reason}; use {parallel.key}=torch.")
        # shards are masters, so what moves the optimizer's state to the host moves them as well
        parallel = replace(parallel, offload=parallel.offload or settings.offload)
        self.lockstep = ShardedModule(module, comm, parallel)
        super().__init__(module, settings, comm)
        self.scaler = LossScaler(self.lockstep.live_dtype == torch.float16)

    def _make_weights(self) -> ShardedWeights:
        return ShardedWeights(self.lockstep)

    def _sum_gradients(
        self, micro_batches: Sequence[Micro], loss_of: LossOf, random: RandomState
    ) -> tuple[Metrics, list[torch.Tensor]]:
        """All ranks make as many passes as the one with the most micro-batches; the others' have no token."""
        metrics = Metrics()
        short = None
        passes = self.lockstep.together(micro_batches)
        count = max(self.comm.all_gather_object(len(passes)))
        for turn in range(count):
            last = turn == count - 1
            if turn >= len(passes) or short is not None:
                self.lockstep.backward_nothing(last=last)
                continue
            micro, number = passes[turn]
            found = self.lockstep.backward(lambda micro=micro: loss_of(micro), self.scaler.scale, last=last)
            if found is None:
                short = number
            elif number is not None:
                metrics.merge(found)
        if any(number is not None for number in self.comm.all_gather_object(short)):
            self.weights.discard_gradients()
            random.restore()
            raise MemoryShortageError(short)
        gradients = self.weights.gradients()
        if self.scaler.enabled:
            torch._foreach_mul_(gradients, 1 / self.scaler.scale)
        return metrics, gradients

    @torch.no_grad()
    def _clip(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Every rank gets the same bits of the norm, and so comes to the same decision."""
        squares = torch.stack([torch.linalg.vector_norm(g).double().square() for g in gradients]).sum()
        total = squares.to(self.lockstep.device).reshape(1)
        self.comm.all_reduce_sum([total])
        norm = (total[0] / self.lockstep.replicas).sqrt()
        limit = self.settings.grad_clip
        if limit > 0 and torch.isfinite(norm) and norm > limit:
            torch._foreach_mul_(gradients, float(limit / norm))
        return norm

    # state

    def state_pieces(self) -> dict[str, StatePiece]:
        """This rank's part of :meth:`state_dict`. Copies (of hybrid sharding) give nothing twice."""
        pieces: dict[str, StatePiece] = {}
        if self.comm.rank < self.lockstep.group_size:
            for name, local, shape, start in self.lockstep.named_shards():
                apart = name in self.weights.live and self.lockstep.live_dtype != local.dtype
                pieces[f"{'master' if apart else 'live'}/{name}"] = StatePiece(local, shape, start)
                if name in self.weights.masters:
                    pieces |= self._slots_of(name, shape, start)
        if self.comm.rank == 0:
            pieces |= {key: StatePiece.whole(value) for key, value in self._small_state().items()}
        return pieces

    def _slots_of(self, name: str, shape: tuple[int, ...], start: int) -> dict[str, StatePiece]:
        master = self.weights.masters[name]
        found = {}
        for slot, value in state_tensors(self.optimizer, master).items():
            if slot != "step":
                found[f"optimizer/{slot}/{name}"] = StatePiece(value, shape, start)
            elif self.comm.rank == 0:
                found[f"optimizer/{slot}/{name}"] = StatePiece.whole(value)
        return found

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole state, on every rank: all of them must call this, and have room for it."""
        return gather_pieces(self.comm, self.state_pieces())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Each rank reads its rows; the state may come from any number of ranks, or from one device."""
        slots = self._slots_in(state)
        for name, local, shape, start in self.lockstep.named_shards():
            key = weight_in(state, name, shape, trained=name in self.weights.masters)
            local.copy_(rows_in(state, key, start, start + len(local)))
            master = self.weights.masters.get(name)
            if master is None:
                continue
            saved = {}
            for slot in slots:
                key = f"optimizer/{slot}/{name}"
                if key in state:
                    whole = shape_in(state, key) != shape
                    saved[slot] = state[key] if whole else rows_in(state, key, start, start + len(local))
            restore_state(self.optimizer, self.settings.kind, master, saved)
        self._load_small_state(state)
