"""Generalised advantage estimation (arXiv:1506.02438)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.masked import as_mask, clean, masked_whiten
from verl.algorithms.registry import register_adv_est
from verl.algorithms.rewards_shaping import settle_rewards, usable_rows
from verl.algorithms.settings import setting


def gae_unwhitened(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Raw (advantages, returns), (B, R) each, 0 at masked positions.

    Only trainable tokens are steps: across an observation (masked tokens between two turns) the next step is the next
    trainable token, with ONE decay. The value after the last one is 0. ``returns`` = advantages + values.
    """
    mask = as_mask(response_mask)
    rewards, values = clean(rewards, mask), clean(values.detach(), mask)
    following_value = torch.zeros_like(rewards[:, 0]) if rewards.shape[1] else rewards.sum(dim=1)
    following_advantage = following_value
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following_value - values[:, t]
        advantage = delta + gamma * lam * following_advantage
        step = mask[:, t]
        advantages[:, t] = advantage.masked_fill(~step, 0.0)
        following_advantage = torch.where(step, advantage, following_advantage)
        following_value = torch.where(step, values[:, t], following_value)
    return advantages, advantages + values


@register_adv_est("gae")
def gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    values: Tensor,
    gamma: float | None = None,
    lam: float | None = None,
    score_valid: Tensor | None = None,
    rewards_at_masked: str = "move_to_last",
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """GAE, whitened over all trainable tokens of the batch (unbiased variance, eps 1e-8).

    ``gamma`` and ``lam`` default to those of ``config``, else 1. Rows whose reward failed get advantage 0, stay out of
    the whitening, and have their values as returns (nothing to learn for the value model).
    """
    gamma = float(setting(config, "gamma", 1.0)) if gamma is None else gamma
    lam = float(setting(config, "lam", 1.0)) if lam is None else lam
    mask = as_mask(response_mask)
    rewards = settle_rewards(token_level_rewards, mask, rewards_at_masked, score_valid)
    advantages, returns = gae_unwhitened(rewards, values, mask, gamma, lam)
    usable = mask & usable_rows(mask, score_valid).unsqueeze(-1)
    return masked_whiten(advantages, usable), torch.where(usable, returns, clean(values.detach(), mask))
