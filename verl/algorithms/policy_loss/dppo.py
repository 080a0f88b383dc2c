"""DPPO: a trust region on the probability of the sampled token instead of on its ratio (arXiv:2602.04879)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.policy_loss.common import Inputs, aggregate, clip_range, dual_clip, inputs_of
from verl.algorithms.registry import register_policy_loss
from verl.algorithms.token_metrics import token_metrics
from verl.metrics import Metrics

RATIO_BOUND = 20.0
_EPS = 1e-8


def _masked_reinforce(
    x: Inputs, keep: Tensor, loss_agg_mode: str, config: Any, weights: Tensor | None
) -> tuple[Tensor, Metrics]:
    """-A sg(min(r, c)) log p over the tokens inside the trust region; the others count in the denominator only."""
    bound = dual_clip(config, RATIO_BOUND)
    ratio = x.ratio.detach()
    per_token = -x.advantages * ratio.clamp(max=bound) * x.log_prob * keep
    metrics = token_metrics(
        x.mask,
        {
            "actor/pg_clipfrac": ~keep,
            "actor/ppo_kl": -x.log_ratio,
            "actor/pg_clipfrac_lower": keep & (ratio > bound),
        },
    )
    return aggregate(per_token, x, loss_agg_mode, config, weights), metrics


@register_policy_loss("dppo_tv")
def dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Binary total variation: a token drops out when p - p_old passes ``clip_ratio`` in the advantage's direction.

    The clip keys are divergence thresholds here (``clip_ratio_high`` for A > 0, ``clip_ratio_low`` for the others);
    ``clip_ratio_c`` truncates the importance ratio.
    """
    low, high = clip_range(config)
    x = inputs_of(old_log_prob, log_prob, advantages, response_mask)
    shift = x.log_prob.detach().exp() - x.old_log_prob.exp()
    keep = torch.where(x.advantages > 0, shift <= high, shift >= -low)
    return _masked_reinforce(x, keep, loss_agg_mode, config, rollout_is_weights)


@register_policy_loss("dppo_kl")
def dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Binary KL: as `dppo_tv`, with KL(Bernoulli(p_old) || Bernoulli(p)) as the divergence."""
    low, high = clip_range(config)
    x = inputs_of(old_log_prob, log_prob, advantages, response_mask)
    log_prob_now = x.log_prob.detach()
    # Rounding may leave a log-prob a little above 0; a probability above 1 would make the logarithm NaN.
    new, old = log_prob_now.exp().clamp(max=1.0), x.old_log_prob.exp().clamp(max=1.0)
    rest = (1 - old) * torch.log((1 - old + _EPS) / (1 - new + _EPS))
    divergence = old * (x.old_log_prob - log_prob_now) + rest
    keep = torch.where(x.advantages > 0, (divergence <= high) | (new <= old), (divergence <= low) | (new >= old))
    return _masked_reinforce(x, keep, loss_agg_mode, config, rollout_is_weights)
