"""One conversion of a TRL config at work, and the kinds of rules that a key can have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.convert.result import Converted

POLICY = "actor_rollout_ref"
OPTIM = f"{POLICY}.actor.optim"

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3, "learning_rate": 1e-6,
    "lr_scheduler_type": "linear", "num_iterations": 1, "max_completion_length": 512, "scale_rewards": "group",
    "loss_type": "dapo", "epsilon": 0.2, "beta": 0.0,
}  # fmt: skip
KIND_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 8},
    "rloo": {"num_generations": 2, "beta": 0.05},
    "online_dpo": {"num_generations": 2, "learning_rate": 5e-7, "beta": 0.1},
    "sft": {"learning_rate": 2e-5},
    "rm": {"learning_rate": 1e-4},
    "dpo": {"beta": 0.1},
    "kto": {"beta": 0.1},
}
"""What TRL does where nothing is said."""


@dataclass(frozen=True)
class No:
    """No key of ours: ``why``; ``harmless`` are the values of theirs that ask for nothing."""

    why: str
    harmless: tuple[Any, ...] = (None, False)


@dataclass(frozen=True)
class Unneeded:
    """A key that changes no result here."""


Rule = str | No | Unneeded | Callable[["Conversion", Any], None]


class Conversion:
    """One conversion at work: their values over their defaults, and the result."""

    def __init__(self, given: Mapping[str, Any], kind: str, name: str, processes: int):
        self.given, self.kind, self.processes = dict(given), kind, processes
        self.result = Converted(f"{name} (TRL)")

    def value(self, key: str) -> Any:
        """What was given, else TRL's default."""
        return self.given.get(key, {**DEFAULTS, **KIND_DEFAULTS.get(self.kind, {})}.get(key))

    def put(self, key: str, value: Any, comment: str | None = None) -> None:
        self.result.put(key, value, comment)

    def default(self, theirs: str, ours: str, value: Any) -> None:
        """Their default, where nothing was given and ours is another."""
        if theirs not in self.given:
            self.put(ours, value, "TRL's default")
