"""Training on one device with plain torch (and data parallelism by summing gradients through a ``Comm``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from verl.comm import Comm, SoloComm
from verl.errors import TrainingError
from verl.metrics import Metrics
from verl.notices import notice
from verl.train_engine.base import LossOf, Micro, StepReport, TrainEngine
from verl.train_engine.master import MasterWeights, is_wide
from verl.train_engine.memory import MemoryShortageError, RandomState, is_out_of_memory, memory_numbers
from verl.train_engine.optimizers import OptimizerSettings, is_of, make_optimizer, restore_state, state_tensors
from verl.train_engine.saved import StatePiece, weight_in
from verl.train_engine.scaling import LossScaler
from verl.train_engine.schedule import lr_factor

LEARNED = ("update", "forward")
"""Phases whose token budgets memory may lower."""


class TorchEngine(TrainEngine):
    """See :class:`TrainEngine`. All ranks hold all weights and take the same step from the summed gradient.

    Attributes:
        learned_tokens: the largest micro-batches, in tokens, that were found to fit after memory ran out (0: it never
            did), by phase. Saved with the state.
    """

    def __init__(self, module: nn.Module, settings: OptimizerSettings, comm: Comm | None = None):
        self.module = module
        self.settings = settings
        self.comm = comm or SoloComm()
        self.version = 0
        self.scheduled_steps = 0
        self.skipped_in_a_row = 0
        self.skipped_total = 0
        self.learned_tokens = dict.fromkeys(LEARNED, 0)
        self.weights = self._make_weights()
        self.scaler = LossScaler(any(p.dtype == torch.float16 for p in self.weights.live.values()))
        self.optimizer = self._make_optimizer()

    def _make_weights(self) -> MasterWeights:
        return MasterWeights(self.module, offload=self.settings.offload)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.weights.masters.values(), self.settings)

    @property
    def lr(self) -> float:
        s = self.settings
        return s.lr * lr_factor(
            self.scheduled_steps,
            kind=s.schedule,
            warmup_steps=s.warmup_steps,
            total_steps=s.total_steps,
            min_ratio=s.min_lr_ratio,
            num_cycles=s.num_cycles,
        )

    def train_step(self, micro_batches: Sequence[Micro], loss_of: LossOf) -> StepReport:
        random = RandomState.capture()
        scale = self.scaler.scale
        try:
            while True:
                metrics, gradients = self._sum_gradients(micro_batches, loss_of, random)
                norm = self._clip(gradients)
                if math.isfinite(norm) or not self.scaler.lower():
                    break
                self.weights.discard_gradients()
                random.restore()
            lr = self.lr
            if math.isfinite(norm):
                self._apply(lr)
                self.scaler.step_succeeded()
            else:
                self.scaler.scale = scale  # no scale helped: it is not to blame
                self._skip()
            return StepReport(norm, lr, not math.isfinite(norm), metrics)
        finally:
            self.weights.discard_gradients()

    def _sum_gradients(
        self, micro_batches: Sequence[Micro], loss_of: LossOf, random: RandomState
    ) -> tuple[Metrics, list[torch.Tensor]]:
        """The metrics of this rank and the gradients of all ranks.

        Raises:
            MemoryShortageError: on every rank if one ran out of memory; gradients are gone, generators are set back.
        """
        metrics = Metrics()
        short = None
        for number, micro in enumerate(micro_batches):
            try:
                loss, micro_metrics = loss_of(micro)
                if loss.requires_grad:
                    (loss * self.scaler.scale if self.scaler.enabled else loss).backward()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                short = number
                break
            metrics.merge(micro_metrics)
        loss = micro = None  # a traceback through here must not keep the graph
        if any(number is not None for number in self.comm.all_gather_object(short)):
            self.weights.discard_gradients()
            random.restore()
            raise MemoryShortageError(short)
        gradients = self.weights.gradients()
        self.comm.all_reduce_sum(gradients)
        if self.scaler.enabled:
            torch._foreach_mul_(gradients, 1 / self.scaler.scale)
        return metrics, gradients

    @torch.no_grad()
    def _clip(self, gradients: list[torch.Tensor]) -> float:
        """Scale the gradients in place to at most ``grad_clip``; returns the norm before that.

        Reading the norm is where the host waits for the device, once in a step.
        """
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        limit = self.settings.grad_clip
        if limit > 0 and math.isfinite(norm) and norm > limit:
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    def _apply(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        try:
            self.optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            device = next(iter(self.weights.masters.values())).device
            raise TrainingError(
                f"Out of memory in the optimizer step ({memory_numbers(device)}): the optimizer's state does not fit. "
                "Set optim.optimizer=AdamW8bit or optim.offload=true, train adapters only (model.lora_rank=16), or "
                "take a smaller model."
            ) from error
        self.weights.publish()
        self.version += 1
        self.skipped_in_a_row = 0

    def _skip(self) -> None:
        self.skipped_in_a_row += 1
        self.skipped_total += 1
        notice(
            "A gradient was not finite; that optimizer step was skipped (counted in actor/skipped_steps).",
            key="nonfinite",
        )
        if self.skipped_in_a_row >= self.settings.max_nonfinite_steps:
            raise TrainingError(
                f"{self.skipped_in_a_row} gradients in a row were not finite. Lower the learning rate "
                f"(now {self.lr:g}) or look at the rewards and log-probs of the dumped batch."
            )

    def schedule_step(self) -> None:
        self.scheduled_steps += 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """``live/NAME``, ``master/NAME`` (if apart), ``optimizer/SLOT/NAME``, ``loss_scale`` and ``counters``."""
        state = {f"live/{name}": p.detach() for name, p in self.module.named_parameters()}
        for name, master in self.weights.named():
            if master is not self.weights.live[name]:
                state[f"master/{name}"] = master.detach()
            for slot, value in state_tensors(self.optimizer, master).items():
                state[f"optimizer/{slot}/{name}"] = value
        return state | self._small_state()

    def state_pieces(self) -> dict[str, StatePiece]:
        """What this rank writes of :meth:`state_dict`: all of it, once."""
        whole = self.state_dict() if self.comm.rank == 0 else {}
        return {name: StatePiece.whole(tensor) for name, tensor in whole.items()}

    def _small_state(self) -> dict[str, torch.Tensor]:
        counters = [self.version, self.scheduled_steps, self.skipped_in_a_row, self.skipped_total]
        counters += [self.learned_tokens[phase] for phase in LEARNED]
        return {"loss_scale": self.scaler.state(), "counters": torch.tensor(counters, dtype=torch.int64)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Any engine's state: a sharded run in bf16 wrote only masters, one in fp32 only live weights."""
        for name, p in self.module.named_parameters():
            exact = is_wide(p.dtype) or f"live/{name}" not in state
            p.copy_(state[weight_in(state, name, tuple(p.shape), trained=exact)])
        slots = self._slots_in(state)
        for name, master in self.weights.named():
            if master is not self.weights.live[name]:
                master.copy_(state[weight_in(state, name, tuple(master.shape), trained=True)])
            saved = {slot: state[key] for slot in slots if (key := f"optimizer/{slot}/{name}") in state}
            restore_state(self.optimizer, self.settings.kind, master, saved)
        self._load_small_state(state)

    def _load_small_state(self, state: Mapping[str, torch.Tensor]) -> None:
        counters = state["counters"].tolist()
        self.version, self.scheduled_steps, self.skipped_in_a_row, self.skipped_total = counters[:4]
        # states from before there were these had the four counters only
        self.learned_tokens.update(zip(LEARNED, counters[4:], strict=False))
        if "loss_scale" in state:
            self.scaler.load(state["loss_scale"])
        self.version += 1  # a load is a write

    def _slots_in(self, state: Mapping[str, torch.Tensor]) -> set[str]:
        """The optimizer's slots in a saved state; none, with a notice, if they are another optimizer's."""
        slots = {key.split("/")[1] for key in state if key.startswith("optimizer/")}
        if is_of(self.settings.kind, slots):
            return slots
        notice(
            f"The checkpoint was written with another optimizer than {self.settings.kind} (its state has "
            f"{', '.join(sorted(slots))}): weights and schedule go on, the moments start afresh."
        )
        return set()
