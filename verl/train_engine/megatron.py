"""Training with Megatron-Core: matrices are cut over ranks (tensor parallelism), layers lie on several (pipeline
parallelism), ranks share tokens (context parallelism), and copies share the rows.

The optimizer step (clipping, skipping, loss scaling, schedule) is that of :class:`TorchEngine`, over this rank's parts.
Gradients of micro-batches are added up in float32 and summed over the copies once a step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.comm import TorchDistComm
from verl.errors import ConfigError
from verl.metrics import Metrics
from verl.models.value import ValueModel
from verl.train_engine.base import LossOf, Micro
from verl.train_engine.fsdp import ELEMENTWISE
from verl.train_engine.master import MasterWeights
from verl.train_engine.megatron_layout import scatter
from verl.train_engine.megatron_module import MegatronModule
from verl.train_engine.megatron_weights import OwnedWeights
from verl.train_engine.memory import RandomState
from verl.train_engine.optimizers import OptimizerSettings, make_optimizer, restore_state, state_tensors
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.saved import StatePiece, gather_pieces, rows_in, weight_in
from verl.train_engine.scaling import LossScaler
from verl.train_engine.spread import rows_per_rank
from verl.train_engine.torch_engine import TorchEngine


class _Kind(NamedTuple):
    """How the gradient of a parameter comes together.

    Attributes:
        alike: all ranks of a cut matrix hold the whole parameter.
        partial: of it, each of them has the gradient of its share of the tokens, or of its experts.
        head: all stages hold it, and only the last one computes with it.
        shared: it lies on the first and on the last stage.
        counted: in the norm, by this rank.
    """

    alike: bool
    partial: bool
    head: bool
    shared: bool
    counted: bool


class MegatronEngine(TorchEngine):
    """See :class:`~verl.train_engine.base.TrainEngine`.

    Attributes:
        module: the Hugging Face model, which names the weights; they lie in ``lockstep``.
        lockstep: the Megatron model, whose passes the ranks of a copy make together.
    """

    lockstep: MegatronModule
    comm: TorchDistComm

    def __init__(
        self,
        module: PreTrainedModel | ValueModel,
        settings: OptimizerSettings,
        comm: TorchDistComm,
        parallel: ParallelSettings,
    ):
        if settings.kind not in ELEMENTWISE:
            raise ConfigError(
                f"optim.optimizer={settings.kind} does not treat every weight by itself, so it cannot work on parts of "
                f"matrices: use {' or '.join(ELEMENTWISE)}, or {parallel.key}=torch."
            )
        self.lockstep = MegatronModule(module, comm, parallel)
        self._distributed = parallel.distributed_optimizer and self.lockstep.grid.same.world_size > 1
        super().__init__(module, settings, comm)
        self.scaler = LossScaler(self.lockstep.live_dtype == torch.float16)
        self.kinds = [self._kind_of(name) for name in self.weights.live]

    def _make_weights(self) -> MasterWeights:
        parts, offload = self.lockstep.parallel.parts, self.settings.offload
        if self._distributed:
            return OwnedWeights(parts, self.lockstep.grid.same, offload=offload)
        return MasterWeights(parts, offload=offload)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        # where there are more copies than parameters some ranks own none
        return make_optimizer(self.weights.masters.values() or [nn.Parameter(torch.zeros(0))], self.settings)

    def _kind_of(self, parameter: str) -> _Kind:
        layout, grid = self.lockstep.parallel.layout, self.lockstep.grid
        cut = any(place.parameter == parameter and place.cut is not None for _, place in layout.held())
        tied = any(place.parameter == parameter for place in layout.tied.values())
        head = parameter.startswith("head.")
        norm = "layernorm" in parameter
        owned = parameter in self.weights.masters if self._distributed else True
        first = cut or grid.tensor.rank == 0
        last_stage = grid.pipeline.rank == grid.pipeline.world_size - 1
        return _Kind(
            alike=not cut,
            partial=(norm and self.lockstep.parallel.scattered) or parameter.endswith(".mlp.router"),
            head=head,
            shared=tied or (bool(layout.tied) and parameter.endswith("word_embeddings.weight")),
            counted=owned and first and not tied and (not head or last_stage),
        )

    def _sum_gradients(
        self, micro_batches: Sequence[Micro], loss_of: LossOf, random: RandomState
    ) -> tuple[Metrics, list[torch.Tensor]]:
        """Each rank passes over the micro-batches of all ranks of its copy; metrics are those of its own."""
        metrics = Metrics()
        passes = self.lockstep.together(micro_batches)
        losses = [functools.partial(loss_of, micro) for micro, _ in passes]
        for (_, number), found in zip(passes, self.lockstep.train(losses, self.scaler.scale), strict=True):
            if number is not None:
                metrics.merge(found)
        gradients = self.weights.gradients()
        self._join(gradients)
        if self.scaler.enabled:
            torch._foreach_mul_(gradients, 1 / self.scaler.scale)
        return metrics, gradients

    def _join(self, gradients: list[torch.Tensor]) -> None:
        """Sum the gradients over all ranks that computed a share of them."""
        grid = self.lockstep.grid
        grid.same.all_reduce_sum(gradients)
        of = list(zip(gradients, self.kinds, strict=True))
        if grid.pipeline.world_size > 1:
            # the other stages have computed nothing with the head, and brought zeros
            grid.pipeline.all_reduce_sum([g for g, kind in of if kind.head])
        if grid.ends is not None:
            grid.ends.all_reduce_sum([g for g, kind in of if kind.shared])
        # all ranks of a copy compute these alike, but for kernels whose sums have no fixed order: they must not drift
        grid.tensor.all_reduce_sum([g for g, kind in of if kind.alike])
        if whole := [g for g, kind in of if kind.alike and not kind.partial]:
            torch._foreach_mul_(whole, 1 / grid.tensor.world_size)

    @torch.no_grad()
    def _clip(self, gradients: list[torch.Tensor]) -> float:
        """Every rank gets the same bits of the norm; what several ranks hold is counted by one of them."""
        counted = [g for g, kind in zip(gradients, self.kinds, strict=True) if kind.counted]
        squares = [torch.linalg.vector_norm(g).double().square() for g in counted]
        total = (torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)).reshape(1)
        total = total.to(self.lockstep.device)
        self.lockstep.grid.split.all_reduce_sum([total])
        if self._distributed:
            self.lockstep.grid.same.all_reduce_sum([total])
        norm = float(total[0].sqrt())
        limit = self.settings.grad_clip
        if limit > 0 and norm > limit and norm != float("inf"):
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    # state: under the names of the Hugging Face model, so that any number of ranks and any engine reads it

    @torch.no_grad()
    def state_pieces(self) -> dict[str, StatePiece]:
        """This rank's rows of every tensor of the state; all ranks call this together. Copies give nothing twice."""
        layout, grid = self.lockstep.parallel.layout, self.lockstep.grid
        pieces: dict[str, StatePiece] = {}
        for name, place in layout.places.items():
            first_of_all = place.stage is not None or grid.pipeline.rank == 0
            if not layout.here(place) or not first_of_all:
                continue
            tensors = {f"live/{name}": self.weights.live[place.parameter]} if grid.same.rank == 0 else {}
            if self._keeps(place.parameter):
                tensors |= self._kept_of(name, place.parameter)
            for key, tensor in tensors.items():
                if key.startswith("optimizer/step/"):
                    if grid.tensor.rank == 0:
                        pieces[key] = StatePiece.whole(tensor)
                else:
                    pieces[key] = self._rows_of(name, tensor.detach())
        if self.comm.rank == 0:
            pieces |= {key: StatePiece.whole(value) for key, value in self._small_state().items()}
        return pieces

    def _keeps(self, parameter: str) -> bool:
        """Whether this rank writes the master and the moments of a parameter."""
        return parameter in self.weights.masters and (self._distributed or self.lockstep.grid.same.rank == 0)

    def _kept_of(self, name: str, parameter: str) -> dict[str, torch.Tensor]:
        live, master = self.weights.live[parameter], self.weights.masters[parameter]
        slots = state_tensors(self.optimizer, master).items()
        found = {f"optimizer/{slot}/{name}": value for slot, value in slots}
        return found if master is live else {f"master/{name}": master, **found}

    def _rows_of(self, name: str, tensor: torch.Tensor) -> StatePiece:
        """What this rank writes of a weight (or moment): of a matrix that is cut by columns, rows of the whole."""
        layout = self.lockstep.parallel.layout
        shape = layout.shapes[name]
        place = layout.places[name]
        if place.cut == 0:
            _, start, rows = layout.block(name)
            return StatePiece(place.part(tensor).reshape(rows, *shape[1:]), shape, start)
        step = rows_per_rank(shape[0], layout.size)
        start = min(layout.rank * step, shape[0])
        if place.cut == 1:
            whole = torch.empty(shape, dtype=tensor.dtype, device=self.lockstep.device)
            layout.gather_stage(name, tensor, whole)
            return StatePiece(whole[start : start + step].clone(), shape, start)
        return StatePiece(tensor[start : start + step], shape, start)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole state, on every rank: all of them must call this, and have room for it."""
        return gather_pieces(self.comm, self.state_pieces())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Each rank reads its parts; the state may come from any number of ranks and from any engine."""
        slots = self._slots_in(state)
        layout = self.lockstep.parallel.layout
        moments: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.weights.masters}
        for name, place in layout.held():
            live = self.weights.live[place.parameter]
            master = self.weights.masters.get(place.parameter)
            value = self._part_in(state, weight_in(state, name, layout.shapes[name], trained=True), name)
            scatter(place, value, live)
            if master is None:
                continue
            if master is not live:
                scatter(place, value, master)
            saved = moments[place.parameter]
            for slot in slots:
                key = f"optimizer/{slot}/{name}"
                if key not in state:
                    continue
                if slot == "step":
                    saved[slot] = state[key]
                    continue
                part = self._part_in(state, key, name)
                scatter(place, part, saved.setdefault(slot, torch.zeros_like(master, dtype=part.dtype)))
        for name, master in self.weights.named():
            restore_state(self.optimizer, self.settings.kind, master, moments[name])
        self._load_small_state(state)

    def _part_in(self, state: Mapping[str, torch.Tensor], key: str, name: str) -> torch.Tensor:
        dim, start, number = self.lockstep.parallel.layout.block(name)
        return rows_in(state, key, start, start + number) if dim == 0 else state[key].narrow(dim, start, number)
