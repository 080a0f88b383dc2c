"""Estimators that compare the outcomes of one prompt's responses: GRPO, RLOO, OPO, GPG and GRPO for pass@k.

All return the same tensor twice: the (B, R) advantages, and as "returns" the same (there is no value model).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from verl.algorithms.advantages.outcome import Outcomes
from verl.algorithms.masked import as_mask
from verl.algorithms.registry import register_adv_est
from verl.algorithms.settings import setting


def _by_std(norm_adv_by_std_in_grpo: bool | None, config: Any) -> bool:
    if norm_adv_by_std_in_grpo is not None:
        return norm_adv_by_std_in_grpo
    return bool(setting(config, "norm_adv_by_std_in_grpo", True))


@register_adv_est("grpo_vectorized")
@register_adv_est("grpo")
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: Sequence[Any] | np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    score_valid: Tensor | None = None,
    rewards_at_masked: str = "move_to_last",
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """(r - mean) / (std + eps) with the group's unbiased std (arXiv:2402.03300).

    Without the division (``norm_adv_by_std_in_grpo=false``) it is Dr. GRPO's (arXiv:2503.20783).
    """
    outcomes = Outcomes.of(token_level_rewards, response_mask, index, score_valid, rewards_at_masked)
    advantages = outcomes.centred()
    if _by_std(norm_adv_by_std_in_grpo, config):
        advantages = advantages / (outcomes.per_row(outcomes.groups.stds(outcomes.scores)) + epsilon)
    result = outcomes.spread(advantages)
    return result, result


@register_adv_est("rloo_vectorized")
@register_adv_est("rloo")
def rloo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: Sequence[Any] | np.ndarray,
    score_valid: Tensor | None = None,
    rewards_at_masked: str = "move_to_last",
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Outcome minus the mean of the OTHER responses: n / (n - 1) * (r - mean) (arXiv:2402.14740)."""
    outcomes = Outcomes.of(token_level_rewards, response_mask, index, score_valid, rewards_at_masked)
    counts = outcomes.groups.counts()
    result = outcomes.spread(outcomes.centred() * outcomes.per_row(counts / np.maximum(counts - 1, 1)))
    return result, result


@register_adv_est("opo")
def opo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: Sequence[Any] | np.ndarray,
    score_valid: Tensor | None = None,
    rewards_at_masked: str = "move_to_last",
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Outcome minus the group's length-weighted mean, the variance-optimal baseline of OPO (arXiv:2505.23585)."""
    outcomes = Outcomes.of(token_level_rewards, response_mask, index, score_valid, rewards_at_masked)
    lengths = as_mask(response_mask).sum(dim=-1).cpu().numpy().astype(np.float64)
    total = outcomes.groups.sums(lengths)
    baseline = outcomes.groups.sums(lengths * outcomes.scores) / np.maximum(total, 1)
    result = outcomes.spread(outcomes.centred(baseline))
    return result, result


@register_adv_est("gpg")
def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: Sequence[Any] | np.ndarray,
    f_norm: float = 1.0,
    score_valid: Tensor | None = None,
    rewards_at_masked: str = "move_to_last",
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """alpha (r - mean) / f_norm, alpha = usable rows of the whole batch / those with an outcome other than 0.

    GPG, arXiv:2504.02546.
    """
    outcomes = Outcomes.of(token_level_rewards, response_mask, index, score_valid, rewards_at_masked)
    usable = outcomes.groups.usable
    alpha = usable.sum() / max(np.count_nonzero(outcomes.scores[usable]), 1)
    result = outcomes.spread(alpha * outcomes.centred() / f_norm)
    return result, result


@register_adv_est("grpo_passk")
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: Sequence[Any] | np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    score_valid: Tensor | None = None,
    rewards_at_masked: str = "move_to_last",
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Only the group's best response learns, by its lead over the second best (arXiv:2503.19595, pass@k with k = n).

    A tie for the best gives 0. Divided by the group's std as in `grpo`.
    """
    outcomes = Outcomes.of(token_level_rewards, response_mask, index, score_valid, rewards_at_masked)
    groups, scores = outcomes.groups, outcomes.scores
    best = groups.usable & (scores == outcomes.per_row(groups.highest(scores)))
    others = np.where(best | ~groups.usable, -np.inf, scores)
    second = outcomes.per_row(groups.highest(others))
    alone = outcomes.per_row(groups.sums(best.astype(np.float64))) == 1
    leads = best & alone & np.isfinite(second)
    advantages = np.where(leads, scores - np.where(leads, second, 0.0), 0.0)
    if _by_std(norm_adv_by_std_in_grpo, config):
        advantages = advantages / (outcomes.per_row(groups.stds(scores)) + epsilon)
    result = outcomes.spread(advantages)
    return result, result
