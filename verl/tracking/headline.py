"""The few numbers of a step that a person watches, picked out of all its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

REWARD = ("critic/score/mean", "critic/rewards/mean", "reward/mean")
LOSS = ("train/loss", "actor/loss", "actor/pg_loss", "critic/vf_loss")
LENGTH = ("response_length/mean",)
THROUGHPUT = ("perf/throughput",)
STEP_SECONDS = ("timing_s/step", "perf/time_per_step")
KL = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")
PHASE_PREFIX = "timing_s/"
_NOT_PHASES = ("step",)  # the whole; the others are its parts


def first(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    """The first of several metrics that is there."""
    return next((metrics[name] for name in names if name in metrics), None)


def validation(metrics: Mapping[str, float]) -> dict[str, float]:
    """``{"source accuracy": value}`` of the main validation numbers ``val-core/{source}/{acc|reward}/mean@N``.

    A source name may itself contain slashes (``openai/gsm8k``). ``mean@N`` is the accuracy of an average sample;
    best@N and maj@N are not shown here.
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        parts = name.split("/")
        if parts[0] == "val-core" and len(parts) >= 4 and parts[-1].startswith("mean@"):
            kind = "accuracy" if parts[-2] == "acc" else parts[-2]
            found[f"{'/'.join(parts[1:-2])} {kind}"] = value
    return found


def phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase of the step."""
    return {
        name[len(PHASE_PREFIX) :]: value
        for name, value in metrics.items()
        if name.startswith(PHASE_PREFIX) and name[len(PHASE_PREFIX) :] not in _NOT_PHASES
    }


def numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """``(label, text)`` of reward (or loss), length, speed and step time, those that the step has."""
    found: list[tuple[str, str]] = []
    reward, loss = first(metrics, REWARD), first(metrics, LOSS)
    if reward is not None:
        found.append(("reward", f"{reward:.3f}"))
    elif loss is not None:
        found.append(("loss", f"{loss:.4f}"))
    length, speed, seconds = (first(metrics, names) for names in (LENGTH, THROUGHPUT, STEP_SECONDS))
    if length is not None:
        found.append(("length", f"{length:.1f}"))
    if speed is not None:
        found.append(("tokens/s", f"{speed:,.0f}"))
    if seconds is not None:
        found.append(("step", duration(seconds)))
    return found


def duration(seconds: float) -> str:
    """``0.82s``, ``12.3s``, ``4:05``, ``1:02:03``."""
    if seconds < 10:
        return f"{seconds:.2f}s"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def step_line(metrics: Mapping[str, float], step: int, total_steps: int | None, left: float | None = None) -> str:
    """One plain line for people: ``step 12/60  reward 0.531  length 14.2  ...  (gen 0.82s, ...)  left 2:31``."""
    parts = [f"step {step}/{total_steps}" if total_steps else f"step {step}"]
    parts += [f"{label} {text}" for label, text in numbers(metrics)]
    parts += [f"{label} {value:.3f}" for label, value in validation(metrics).items()]
    times = phases(metrics)
    if times:
        longest = sorted(times.items(), key=lambda item: -item[1])[:4]
        parts.append("(" + ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in longest) + ")")
    if left is not None:
        parts.append(f"left {duration(left)}")
    return "  ".join(parts)


class Clock:
    """How long the rest will take, from the pace of the last ten steps (the first, with its warm-up, left out)."""

    def __init__(self, total_steps: int | None):
        self.total_steps = total_steps
        self._marks: list[tuple[int, float]] = []

    def mark(self, step: int, now: float) -> None:
        """Step ``step`` was finished at ``now`` (seconds)."""
        if self._marks and step <= self._marks[-1][0]:
            return
        self._marks = [*self._marks[-10:], (step, now)]

    def left(self) -> float | None:
        """Seconds until the last step, or None as long as nothing is known."""
        if self.total_steps is None or len(self._marks) < 2:
            return None
        (first_step, start), (last_step, end) = self._marks[0], self._marks[-1]
        return (end - start) / (last_step - first_step) * max(0, self.total_steps - last_step)
