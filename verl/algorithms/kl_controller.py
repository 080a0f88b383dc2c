"""The coefficient of the KL penalty in the reward: fixed, or adapted towards a target KL (arXiv:1909.08593)."""

from __future__ import annotations

import math
from typing import Any

from verl.algorithms.settings import setting
from verl.errors import ConfigError
from verl.notices import notice


class FixedKLController:
    """A coefficient that never changes."""

    def __init__(self, kl_coef: float):
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon), n_steps in sequences."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        super().__init__(init_kl_coef)
        if not target_kl > 0 or not horizon > 0:
            raise ConfigError(
                "algorithm.kl_ctrl: type=adaptive needs target_kl > 0 and horizon > 0, "
                f"got target_kl={target_kl}, horizon={horizon}"
            )
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt to the KL observed on ``n_steps`` sequences; a non-finite KL leaves the coefficient (with a notice)."""
        if not math.isfinite(current_kl):
            notice(f"adaptive KL coefficient left at {self.value}: the observed KL is {current_kl}", key="kl_ctrl/nan")
            return
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon


def get_kl_controller(kl_ctrl: Any) -> FixedKLController:
    """The controller that ``algorithm.kl_ctrl`` describes (``type``, ``kl_coef``, ``horizon``, ``target_kl``)."""
    kind = setting(kl_ctrl, "type", "fixed")
    coefficient = setting(kl_ctrl, "kl_coef", 0.001)
    if kind == "fixed":
        return FixedKLController(coefficient)
    if kind == "adaptive":
        return AdaptiveKLController(
            coefficient, setting(kl_ctrl, "target_kl", 0.1), setting(kl_ctrl, "horizon", 10_000)
        )
    raise ConfigError(f"algorithm.kl_ctrl.type={kind!r} is unknown; use fixed or adaptive")
