"""Training on one device with plain torch (and data parallelism by summing gradients through a ``Comm``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from verl.comm import Comm, SoloComm
from verl.errors import CheckpointError, TrainingError
from verl.metrics import Metrics
from verl.notices import notice
from verl.train_engine.base import LossOf, Micro, StepReport, TrainEngine
from verl.train_engine.master import MasterWeights
from verl.train_engine.memory import MemoryShortageError, RandomState, is_out_of_memory, memory_numbers
from verl.train_engine.scaling import LossScaler
from verl.train_engine.schedule import lr_factor

OPTIMIZERS = ("adamw", "sgd")
LEARNED = ("update", "forward")
"""Phases whose token budgets memory may lower."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer, schedule and guards of one role. Steps of the schedule are training steps.

    ``offload``: masters, gradient sums and moments lie in host memory, and the optimizer runs on the CPU.
    """

    lr: float
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    kind: str = "adamw"
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    grad_clip: float = 1.0
    max_nonfinite_steps: int = 5
    offload: bool = False


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
        self.weights = MasterWeights(module, offload=settings.offload)
        self.scaler = LossScaler(any(p.dtype == torch.float16 for p in self.weights.live.values()))
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        s = self.settings
        parameters = list(self.weights.masters.values())
        if s.kind == "sgd":
            return torch.optim.SGD(parameters, lr=s.lr, weight_decay=s.weight_decay)
        fused = parameters[0].device.type in ("cpu", "cuda")
        return torch.optim.AdamW(
            parameters, lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay, fused=fused or None
        )

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
                if torch.isfinite(norm) or not self.scaler.lower():
                    break
                self.weights.discard_gradients()
                random.restore()
            lr = self.lr
            if torch.isfinite(norm):
                self._apply(lr)
                self.scaler.step_succeeded()
            else:
                self.scaler.scale = scale  # no scale helped: it is not to blame
                self._skip()
            return StepReport(float(norm), lr, not bool(torch.isfinite(norm)), metrics)
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
    def _clip(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Scale the gradients in place to at most ``grad_clip``; returns the norm before that."""
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        limit = self.settings.grad_clip
        if limit > 0 and torch.isfinite(norm) and norm > limit:
            torch._foreach_mul_(gradients, float(limit / norm))
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
                "Set optim.offload=true or optim.optimizer=SGD, train adapters only (model.lora_rank=16), or take a "
                "smaller model."
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
            for slot, value in self.optimizer.state.get(master, {}).items():
                state[f"optimizer/{slot}/{name}"] = value if torch.is_tensor(value) else torch.tensor(value)
        state["loss_scale"] = self.scaler.state()
        counters = [self.version, self.scheduled_steps, self.skipped_in_a_row, self.skipped_total]
        counters += [self.learned_tokens[phase] for phase in LEARNED]
        state["counters"] = torch.tensor(counters, dtype=torch.int64)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, p in self.module.named_parameters():
            saved = state.get(f"live/{name}")
            if saved is None:
                raise CheckpointError(f"The checkpoint has no weight '{name}'; was the run started with another model?")
            if p.shape != saved.shape:
                raise CheckpointError(
                    f"The weight '{name}' has the shape {tuple(saved.shape)} in the checkpoint and {tuple(p.shape)} in "
                    "the model; was the run started with another model?"
                )
            p.copy_(saved)
        slots = {key.split("/")[1] for key in state if key.startswith("optimizer/")}
        for name, master in self.weights.named():
            if master is not self.weights.live[name]:
                # a run in fp32 wrote no master apart from its live weights
                master.copy_(state.get(f"master/{name}", state[f"live/{name}"]))
            for slot in slots:
                value = state.get(f"optimizer/{slot}/{name}")
                if value is not None:
                    self._restore_slot(master, slot, value)
        counters = state["counters"].tolist()
        self.version, self.scheduled_steps, self.skipped_in_a_row, self.skipped_total = counters[:4]
        # states from before there were these had the four counters only
        self.learned_tokens.update(zip(LEARNED, counters[4:], strict=False))
        if "loss_scale" in state:
            self.scaler.load(state["loss_scale"])
        self.version += 1  # a load is a write

    def _restore_slot(self, master: torch.Tensor, slot: str, value: torch.Tensor) -> None:
        """Moments follow their weight's device and type; the step counter stays the small fp32 tensor that it is."""
        moment = value.shape == master.shape and slot != "step"
        self.optimizer.state[master][slot] = value.to(master.device, master.dtype if moment else value.dtype, copy=True)
