"""Training with Megatron-Core: matrices are cut over ranks (tensor parallelism), and copies share the rows.

The optimizer step (clipping, skipping, loss scaling, schedule) is that of :class:`TorchEngine`, over this rank's parts.
Gradients of micro-batches are added up in float32 and summed over the copies once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from verl.comm import TorchDistComm
from verl.errors import ConfigError
from verl.metrics import Metrics
from verl.models.value import ValueModel
from verl.train_engine.base import LossOf, Micro
from verl.train_engine.fsdp import ELEMENTWISE
from verl.train_engine.master import MasterWeights
from verl.train_engine.megatron_module import MegatronModule
from verl.train_engine.memory import RandomState
from verl.train_engine.optimizers import OptimizerSettings, restore_state, state_tensors
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.saved import StatePiece, gather_pieces, rows_in, weight_in
from verl.train_engine.scaling import LossScaler
from verl.train_engine.spread import rows_per_rank
from verl.train_engine.torch_engine import TorchEngine


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
        super().__init__(module, settings, comm)
        self.scaler = LossScaler(self.lockstep.live_dtype == torch.float16)
        layout = self.lockstep.parallel.layout
        cut = {place.parameter for place in layout.places.values() if place.cut is not None}
        self._is_cut = [name in cut for name in self.weights.masters]

    def _make_weights(self) -> MasterWeights:
        return MasterWeights(self.lockstep.parallel.parts, offload=self.settings.offload)

    def _sum_gradients(
        self, micro_batches: Sequence[Micro], loss_of: LossOf, random: RandomState
    ) -> tuple[Metrics, list[torch.Tensor]]:
        """Each rank passes over the micro-batches of all ranks of its copy; metrics are those of its own."""
        metrics = Metrics()
        for micro, number in self.lockstep.together(micro_batches):
            found = self.lockstep.backward(lambda micro=micro: loss_of(micro), self.scaler.scale)
            if number is not None:
                metrics.merge(found)
        gradients = self.weights.gradients()
        self.lockstep.data.all_reduce_sum(gradients)
        # all ranks of a copy compute these alike, but for kernels whose sums have no fixed order: they must not drift
        everywhere = [g for g, cut in zip(gradients, self._is_cut, strict=True) if not cut]
        self.lockstep.tensor.all_reduce_sum(everywhere)
        torch._foreach_mul_(everywhere, 1 / self.lockstep.tensor.world_size)
        if self.scaler.enabled:
            torch._foreach_mul_(gradients, 1 / self.scaler.scale)
        return metrics, gradients

    @torch.no_grad()
    def _clip(self, gradients: list[torch.Tensor]) -> float:
        """Every rank gets the same bits of the norm; what all ranks of a copy hold is counted by one of them."""
        first = self.lockstep.tensor.rank == 0
        counted = [g for g, cut in zip(gradients, self._is_cut, strict=True) if cut or first]
        total = torch.stack([torch.linalg.vector_norm(g).double().square() for g in counted]).sum().reshape(1)
        total = total.to(self.lockstep.device)
        self.lockstep.tensor.all_reduce_sum([total])
        norm = float(total[0].sqrt())
        limit = self.settings.grad_clip
        if limit > 0 and norm > limit and norm != float("inf"):
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    # state: under the names of the Hugging Face model, so that any number of ranks and any engine reads it

    @torch.no_grad()
    def state_pieces(self) -> dict[str, StatePiece]:
        """This rank's rows of every tensor of the state; all ranks call this together. Copies give nothing twice."""
        writes = self.lockstep.data.rank == 0
        pieces: dict[str, StatePiece] = {}
        for name, place in self.lockstep.parallel.layout.places.items():
            live, master = self.weights.live[place.parameter], self.weights.masters[place.parameter]
            tensors = {f"live/{name}": live}
            if master is not live:
                tensors[f"master/{name}"] = master
            for slot, value in state_tensors(self.optimizer, master).items():
                if slot != "step":
                    tensors[f"optimizer/{slot}/{name}"] = value
                elif self.comm.rank == 0:
                    pieces[f"optimizer/{slot}/{name}"] = StatePiece.whole(value)
            if writes:
                pieces |= {key: self._rows_of(name, tensor.detach()) for key, tensor in tensors.items()}
        if self.comm.rank == 0:
            pieces |= {key: StatePiece.whole(value) for key, value in self._small_state().items()}
        return pieces

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
            layout.gather(name, tensor, whole)
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
        for name, place in layout.places.items():
            live, master = self.weights.live[place.parameter], self.weights.masters[place.parameter]
            value = self._part_in(state, weight_in(state, name, layout.shapes[name], trained=True), name)
            layout.scatter(name, value, master)
            if master is not live:
                layout.scatter(name, value, live)
            saved = moments[place.parameter]
            for slot in slots:
                key = f"optimizer/{slot}/{name}"
                if key not in state:
                    continue
                if slot == "step":
                    saved[slot] = state[key]
                    continue
                part = self._part_in(state, key, name)
                layout.scatter(name, part, saved.setdefault(slot, torch.zeros_like(master, dtype=part.dtype)))
        for name, master in self.weights.named():
            restore_state(self.optimizer, self.settings.kind, master, moments[name])
        self._load_small_state(state)

    def _part_in(self, state: Mapping[str, torch.Tensor], key: str, name: str) -> torch.Tensor:
        dim, start, number = self.lockstep.parallel.layout.block(name)
        return rows_in(state, key, start, start + number) if dim == 0 else state[key].narrow(dim, start, number)
