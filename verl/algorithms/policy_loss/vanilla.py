"""PPO's clipped surrogate with separate bounds (DAPO's clip-higher) and the dual clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.policy_loss.common import aggregate, clip_range, dual_clip, inputs_of
from verl.algorithms.registry import register_policy_loss
from verl.algorithms.token_metrics import token_metrics
from verl.metrics import Metrics


@register_policy_loss("vanilla")
def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); for A < 0 at most -A c with c = ``clip_ratio_c``.

    PPO arXiv:1707.06347, dual clip arXiv:1912.09729, clip-higher (DAPO) arXiv:2503.14476.
    """
    low, high = clip_range(config)
    bound = dual_clip(config)
    x = inputs_of(old_log_prob, log_prob, advantages, response_mask)
    ratio = x.ratio
    plain = -x.advantages * ratio
    clipped = -x.advantages * ratio.clamp(1 - low, 1 + high)
    upper = torch.maximum(plain, clipped)
    worst = -x.advantages * bound
    bad = x.advantages < 0
    per_token = torch.where(bad, torch.minimum(upper, worst), upper)
    metrics = token_metrics(
        x.mask,
        {
            "actor/pg_clipfrac": clipped > plain,
            "actor/ppo_kl": -x.log_ratio,
            "actor/pg_clipfrac_lower": bad & (upper > worst),
        },
    )
    return aggregate(per_token, x, loss_agg_mode, config, rollout_is_weights), metrics
