"""Plain consoles: verl's one line of all metrics a step, and the ``[INFO]`` lines of the two quick-start documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.tracking.headline import KL, LOSS, REWARD, STEP_SECONDS, first, step_line
from verl.tracking.loggers.base import Console
from verl.tracking.samples import plain_samples

_PHASE_TEXTS = {
    "gen": "Generating sequences",
    "adv": "Computing advantages",
    "update_critic": "Updating critic",
    "update_actor": "Updating actor",
}


def format_number(value: float) -> str:
    """Six significant digits; whole numbers stay whole (``1234567``, not ``1.23457e+06``)."""
    value = float(value)
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:.0f}"
    return f"{value:.6g}"


def format_step(metrics: Mapping[str, float], step: int) -> str:
    """verl's console line: ``step:N - key:value - key:value``."""
    return " - ".join([f"step:{step}", *(f"{name}:{format_number(value)}" for name, value in metrics.items())])


class LineConsole(Console):
    """``step:N - key:value - ...``: every metric of a step on one line, for log files and scripts."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.line(format_step(metrics, step))

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for text in plain_samples(rows):
            self.line(f"step:{step} - {text}")


class VerlStepsConsole(Console):
    """``[INFO] Generating sequences... (timing/gen: 0.82s)``: a line a phase, then the step's main numbers."""

    def start(self) -> None:
        self.line(f"[INFO] Starting {self.info.algorithm} training...")

    def phase_finished(self, phase: str, seconds: float, samples: int | None = None) -> None:
        if phase in _PHASE_TEXTS:
            self.line(f"[INFO] {_PHASE_TEXTS[phase]}... (timing/{phase}: {seconds:.2f}s)")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.line(f"[INFO] {step_line(metrics, step, self.info.total_steps)}")

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for text in plain_samples(rows):
            self.line(f"[INFO] {text}")

    def finish(self) -> None:
        self.line("[INFO] Training completed.")


class RLTrainerConsole(Console):
    """The lines of ``RLTrainer.train_step()``: rollout, update, KL | reward | loss, and the step's seconds."""

    _UPDATE_PHASES = ("update_critic", "update_actor")
    _updating = False

    def phase_started(self, phase: str, samples: int | None = None) -> None:
        if phase in self._UPDATE_PHASES and not self._updating:
            self._updating = True
            self.line(f"[INFO] {self.info.algorithm} update started...")

    def phase_finished(self, phase: str, seconds: float, samples: int | None = None) -> None:
        if phase == "gen":
            what = "" if samples is None else f"{samples} samples generated in "
            self.line(f"[INFO] Rollout completed: {what}{seconds:.1f}s")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._updating = False
        numbers = (
            ("KL divergence", first(metrics, ("kl_divergence", *KL))),
            ("Reward mean", first(metrics, ("reward_mean", *REWARD))),
            ("Policy loss", first(metrics, ("policy_loss", "actor/pg_loss", *LOSS))),
        )
        known = [f"{label}: {value:.3g}" for label, value in numbers if value is not None]
        if known:
            self.line(f"[INFO] {' | '.join(known)}")
        seconds = first(metrics, STEP_SECONDS)
        if seconds is not None:
            self.line(f"[INFO] Step {step} finished in {seconds:.1f}s")

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for text in plain_samples(rows):
            self.line(f"[INFO] {text}")
