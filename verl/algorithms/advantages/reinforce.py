"""REINFORCE with a batch-wide baseline (REINFORCE++, with or without group means) or a greedy one (ReMax)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages.outcome import Outcomes
from verl.algorithms.masked import as_mask, masked_whiten
from verl.algorithms.registry import register_adv_est
from verl.algorithms.rewards_shaping import settle_rewards, usable_rows
from verl.algorithms.settings import setting


def reward_to_go(rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum (B, R) of the rewards from each trainable token on; masked tokens are no steps."""
    mask = as_mask(response_mask)
    if gamma == 1.0:
        return rewards.flip(-1).cumsum(-1).flip(-1).masked_fill(~mask, 0.0)
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running.masked_fill(~mask[:, t], 0.0)
    return returns


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    gamma: float | None = None,
    score_valid: Tensor | None = None,
    rewards_at_masked: str = "move_to_last",
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++, arXiv:2501.03262: discounted reward to go, whitened over all trainable tokens of the batch."""
    gamma = float(setting(config, "gamma", 1.0)) if gamma is None else gamma
    mask = as_mask(response_mask)
    rewards = settle_rewards(token_level_rewards, mask, rewards_at_masked, score_valid)
    returns = reward_to_go(rewards, mask, gamma)
    usable = mask & usable_rows(mask, score_valid).unsqueeze(-1)
    return masked_whiten(returns, usable), returns


@register_adv_est("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: Sequence[Any] | np.ndarray,
    score_valid: Tensor | None = None,
    rewards_at_masked: str = "move_to_last",
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++-baseline, arXiv:2501.03262: outcome minus its group's mean, whitened over all tokens of the batch."""
    outcomes = Outcomes.of(token_level_rewards, response_mask, index, score_valid, rewards_at_masked)
    centred = outcomes.spread(outcomes.centred())
    whitened = masked_whiten(centred, outcomes.trainable)
    return whitened, whitened


@register_adv_est("remax")
def remax(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    reward_baselines: Tensor,
    score_valid: Tensor | None = None,
    rewards_at_masked: str = "move_to_last",
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """ReMax, arXiv:2310.10505: reward to go minus the reward (B,) of the greedy response to the same prompt.

    A row whose baseline is not finite (its reward failed) gets advantage 0.
    """
    mask = as_mask(response_mask)
    baselines = reward_baselines.detach().to(mask.device)
    has_baseline = baselines.isfinite()
    score_valid = has_baseline if score_valid is None else has_baseline & score_valid.to(mask.device, torch.bool)
    rewards = settle_rewards(token_level_rewards, mask, rewards_at_masked, score_valid)
    usable = mask & usable_rows(mask, score_valid).unsqueeze(-1)
    returns = reward_to_go(rewards, mask)
    return (returns - baselines.to(returns.dtype).unsqueeze(-1)).masked_fill(~usable, 0.0), returns
