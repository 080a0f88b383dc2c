"""Clip-Cov and KL-Cov: keep entropy by holding back the tokens of highest covariance (arXiv:2505.22617).

A token's covariance is (A - mean A)(log p - mean log p), with means over all tokens of a mini-batch; so which tokens
are held back must be decided once over the whole mini-batch (``prepare``), not per micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.policy_loss.common import aggregate, clip_range, inputs_of
from verl.algorithms.registry import register_policy_loss
from verl.algorithms.settings import setting
from verl.algorithms.token_metrics import token_metrics
from verl.errors import ConfigError
from verl.metrics import Metrics


def _ratio_setting(config: Any, name: str) -> float:
    ratio = float(setting(config, f"policy_loss.{name}", 2e-4))
    if not 0 < ratio <= 1:
        raise ConfigError(f"actor.policy_loss.{name}={ratio} must lie in (0, 1]: it is a share of the tokens")
    return ratio


def _covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Covariance (n,) of the valid tokens in row order, in float64 on the CPU so that every cut sees the same."""
    adv = advantages.detach()[mask].cpu().double()
    logp = log_prob.detach()[mask].cpu().double()
    return (adv - adv.mean()) * (logp - logp.mean())


def _mark(mask: Tensor, chosen: Tensor) -> Tensor:
    """(B, R) bool: True at the valid tokens (in row order) whose numbers are ``chosen``."""
    flags = torch.zeros(int(mask.sum()), dtype=torch.bool)
    flags[chosen] = True
    selection = torch.zeros_like(mask)
    selection[mask] = flags.to(mask.device)
    return selection


def prepare_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any = None,
    generator_seed: int = 0,
) -> Tensor:
    """(B, R) bool: the tokens that get no gradient.

    A random share ``clip_cov_ratio`` of all tokens (at least one), out of those with a covariance between
    ``clip_cov_lb`` and ``clip_cov_ub`` that PPO's clip leaves alone.
    """
    share = _ratio_setting(config, "clip_cov_ratio")
    lowest = float(setting(config, "policy_loss.clip_cov_lb", 1.0))
    highest = float(setting(config, "policy_loss.clip_cov_ub", 5.0))
    low, high = clip_range(config)
    x = inputs_of(old_log_prob, log_prob.detach(), advantages, response_mask)
    count = int(x.mask.sum())
    if count == 0:
        return torch.zeros_like(x.mask)
    ratio = x.ratio
    clipped = (-x.advantages * ratio.clamp(1 - low, 1 + high)) > (-x.advantages * ratio)
    covariance = _covariance(x.log_prob, x.advantages, x.mask)
    eligible = (covariance > lowest) & (covariance < highest) & ~clipped[x.mask].cpu()
    candidates = eligible.nonzero().flatten()
    generator = torch.Generator().manual_seed(generator_seed)
    order = torch.randperm(len(candidates), generator=generator)
    return _mark(x.mask, candidates[order[: max(int(share * count), 1)]])


def prepare_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any = None,
    generator_seed: int = 0,
) -> Tensor:
    """(B, R) bool: the share ``kl_cov_ratio`` of tokens (at least one) with the highest covariance."""
    share = _ratio_setting(config, "kl_cov_ratio")
    x = inputs_of(old_log_prob, log_prob.detach(), advantages, response_mask)
    count = int(x.mask.sum())
    if count == 0:
        return torch.zeros_like(x.mask)
    # A stable sort: ties are broken by row order, on every device.
    order = torch.sort(_covariance(x.log_prob, x.advantages, x.mask), descending=True, stable=True).indices
    return _mark(x.mask, order[: max(int(share * count), 1)])


@register_policy_loss("clip_cov", prepare=prepare_clip_cov)
def clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    selection: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate without the tokens of ``selection`` (B, R), computed locally if it is not given."""
    low, high = clip_range(config)
    if selection is None:
        selection = prepare_clip_cov(old_log_prob, log_prob, advantages, response_mask, config)
    x = inputs_of(old_log_prob, log_prob, advantages, response_mask)
    ratio = x.ratio
    upper = torch.maximum(-x.advantages * ratio, -x.advantages * ratio.clamp(1 - low, 1 + high))
    metrics = token_metrics(x.mask, {"actor/pg_clipfrac": selection, "actor/ppo_kl": -x.log_ratio})
    per_token = upper.masked_fill(selection, 0.0)
    return aggregate(per_token, x, loss_agg_mode, config, rollout_is_weights), metrics


@register_policy_loss("kl_cov", prepare=prepare_kl_cov)
def kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    selection: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """-A r, plus ``ppo_kl_coef`` |log r| on the tokens of ``selection`` (B, R), computed locally if not given."""
    coefficient = float(setting(config, "policy_loss.ppo_kl_coef", 0.1))
    if selection is None:
        selection = prepare_kl_cov(old_log_prob, log_prob, advantages, response_mask, config)
    x = inputs_of(old_log_prob, log_prob, advantages, response_mask)
    penalty = (coefficient * x.log_ratio.abs()).masked_fill(~selection, 0.0)
    metrics = token_metrics(
        x.mask, {"actor/ppo_kl": -x.log_ratio, "actor/ppo_kl_abs": x.log_ratio.abs(), "actor/kl_cov_frac": selection}
    )
    return aggregate(penalty - x.advantages * x.ratio, x, loss_agg_mode, config, rollout_is_weights), metrics
