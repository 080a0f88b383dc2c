"""Losses with one importance ratio per sequence: GSPO and GMPO (geo_mean)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import agg_loss
from verl.algorithms.masked import clean
from verl.algorithms.policy_loss.common import (
    aggregate,
    clip_range,
    inputs_of,
    per_sequence_mode,
)
from verl.algorithms.registry import register_policy_loss
from verl.algorithms.token_metrics import token_metrics
from verl.metrics import Metrics

_SEQUENCE_LOG_RATIO_MAX = 10.0


@register_policy_loss("gspo")
def gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """GSPO-token, arXiv:2507.18071: clipped surrogate with s = exp(mean log-ratio of the sequence).

    s is the value, and the gradient of each token's log-prob times s is the gradient. Always aggregated as
    seq-mean-token-mean. The log of s is clamped from above at 10.
    """
    low, high = clip_range(config)
    mode = per_sequence_mode("gspo", loss_agg_mode)
    x = inputs_of(old_log_prob, log_prob, advantages, response_mask)
    unclamped = x.log_prob - x.old_log_prob
    lengths = x.mask.sum(dim=-1, keepdim=True).clamp(min=1)
    sequence = unclamped.detach().sum(dim=-1, keepdim=True) / lengths
    log_ratio = (x.log_prob - x.log_prob.detach() + sequence).clamp(max=_SEQUENCE_LOG_RATIO_MAX)
    ratio = log_ratio.exp()
    plain = -x.advantages * ratio
    clipped = -x.advantages * ratio.clamp(1 - low, 1 + high)
    metrics = token_metrics(x.mask, {"actor/pg_clipfrac": clipped > plain, "actor/ppo_kl": -x.log_ratio})
    return aggregate(torch.maximum(plain, clipped), x, mode, config, rollout_is_weights), metrics


@register_policy_loss("geo_mean")
def geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """GMPO, arXiv:2507.20673: -A times the geometric mean of the token ratios, each clipped in log space.

    The bounds are -``clip_ratio_low`` and +``clip_ratio_high`` on the LOG-ratio (the paper uses 0.4), on the side that
    the advantage pushes to. A is the sequence's mean advantage; the loss is the mean over sequences. Rollout weights
    enter as their geometric mean.
    """
    low, high = clip_range(config)
    per_sequence_mode("geo_mean", loss_agg_mode)
    x = inputs_of(old_log_prob, log_prob, advantages, response_mask)
    bounded = x.log_ratio.clamp(-low, high)
    pessimistic = torch.where(
        x.advantages > 0,
        torch.minimum(x.log_ratio, bounded),
        torch.where(x.advantages < 0, torch.maximum(x.log_ratio, bounded), torch.zeros_like(bounded)),
    )
    lengths = x.mask.sum(dim=-1).clamp(min=1)
    ratio = (pessimistic.sum(dim=-1) / lengths).exp()
    per_sequence = -(x.advantages.sum(dim=-1) / lengths) * ratio
    if rollout_is_weights is not None:
        log_weights = clean(rollout_is_weights.detach(), x.mask).clamp(min=1e-10).log()
        per_sequence = per_sequence * (clean(log_weights, x.mask).sum(dim=-1) / lengths).exp()
    outside = x.log_ratio != bounded
    metrics = token_metrics(
        x.mask,
        {
            "actor/pg_clipfrac": outside & (x.advantages > 0),
            "actor/ppo_kl": -x.log_ratio,
            "actor/pg_clipfrac_lower": outside & (x.advantages < 0),
        },
    )
    has_tokens = x.mask.any(dim=-1, keepdim=True)
    return agg_loss(per_sequence.unsqueeze(-1), has_tokens, "seq-mean-token-sum"), metrics
