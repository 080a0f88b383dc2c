"""The settings of preference losses, named as TRL names them, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from verl.algorithms.preference.registry import get_preference_loss
from verl.errors import ConfigError


@dataclass(frozen=True)
class PreferenceSettings:
    """What a preference loss is computed with. Raises ConfigError listing every problem.

    Attributes:
        loss_type: a name of `preference_loss_names`.
        beta: strength of the pull to the reference (of the odds-ratio term in orpo); > 0.
        label_smoothing: assumed probability that a label is wrong.
        rpo_alpha: weight of an added SFT term, -log pi(chosen) per token (RPO, arXiv:2404.19733); None: none.
        cpo_alpha: the same weight inside cpo.
        ld_alpha: weight of a response's log-probs beyond the length of the shorter one (LD-DPO, arXiv:2409.06411).
        use_weighting: multiply each pair's loss by its WPO weight (arXiv:2406.11827).
        length_normalize: use log-probs per token in place of sums, whatever the loss.
        simpo_gamma, discopop_tau: of these losses alone.
        desirable_weight, undesirable_weight: of the two classes of unpaired losses.
    """

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float | None = None
    cpo_alpha: float = 1.0
    ld_alpha: float | None = None
    use_weighting: bool = False
    length_normalize: bool = False
    simpo_gamma: float = 0.5
    discopop_tau: float = 0.05
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError(problems)

    @property
    def average(self) -> bool:
        """Whether the loss is given log-probs per token."""
        return self.length_normalize or get_preference_loss(self.loss_type).average

    def _problems(self) -> list[str]:
        loss = get_preference_loss(self.loss_type)
        problems = []
        if not (math.isfinite(self.beta) and self.beta > 0):
            problems.append(f"beta={self.beta}: must be greater than 0 (at 0 nothing is learned); 0.1 is usual")
        for name in ("cpo_alpha", "simpo_gamma", "desirable_weight", "undesirable_weight"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                problems.append(f"{name}={getattr(self, name)}: must be at least 0")
        if self.discopop_tau <= 0:
            problems.append(f"discopop_tau={self.discopop_tau}: must be greater than 0")
        if self.rpo_alpha is not None and self.rpo_alpha < 0:
            problems.append(f"rpo_alpha={self.rpo_alpha}: must be at least 0, or null for no SFT term")
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            problems.append(f"ld_alpha={self.ld_alpha}: must be between 0 and 1, or null")
        if self.ld_alpha is not None and loss.frame == "pair" and self.average:
            problems.append(f"ld_alpha weighs summed log-probs, but loss_type={self.loss_type} averages: drop ld_alpha")
        problems += self._smoothing_problems()
        problems += self._unused_problems()
        return problems

    def _smoothing_problems(self) -> list[str]:
        smoothing = self.label_smoothing
        if not 0 <= smoothing < 0.5:
            return [f"label_smoothing={smoothing}: must be at least 0 and less than 0.5"]
        if self.loss_type == "exo_pair" and smoothing == 0:
            return ["label_smoothing=0: exo_pair takes its logarithm, set it to a small number such as 0.001"]
        return []

    def _unused_problems(self) -> list[str]:
        """Settings that were changed and would do nothing."""
        loss = get_preference_loss(self.loss_type)
        used = loss.uses | {"loss_type", "beta"}
        if loss.frame == "pair":
            used |= {"rpo_alpha", "ld_alpha", "use_weighting", "length_normalize"}
        return [
            f"{item.name}={getattr(self, item.name)} has no effect with loss_type={self.loss_type}: leave it out"
            for item in fields(self)
            if item.name not in used and getattr(self, item.name) != item.default
        ]
