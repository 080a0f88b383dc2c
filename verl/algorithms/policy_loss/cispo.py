"""CISPO: clip the importance weight, never the gradient (MiniMax-M1, arXiv:2506.13585)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.algorithms.policy_loss.common import aggregate, clip_range, inputs_of
from verl.algorithms.registry import register_policy_loss
from verl.algorithms.token_metrics import token_metrics
from verl.metrics import Metrics


@register_policy_loss("cispo")
def cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """-sg(clip(r, 1 - low, 1 + high)) A log p."""
    low, high = clip_range(config)
    x = inputs_of(old_log_prob, log_prob, advantages, response_mask)
    ratio = x.ratio.detach()
    weight = ratio.clamp(1 - low, 1 + high)
    metrics = token_metrics(x.mask, {"actor/pg_clipfrac": ratio != weight, "actor/ppo_kl": -x.log_ratio})
    return aggregate(-weight * x.advantages * x.log_prob, x, loss_agg_mode, config, rollout_is_weights), metrics
