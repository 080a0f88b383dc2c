"""Estimators of the KL divergence of the policy from the reference, per token, and the KL loss.

With x = log p(token) - log p_ref(token), tokens drawn from the policy (http://joschu.net/blog/kl-approx.html):
k1 = x (unbiased), abs = |x|, k2 = x^2 / 2, k3 = exp(-x) + x - 1 (unbiased, never negative).
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregation import GlobalCounts, agg_loss
from verl.algorithms.masked import LOG_RATIO_LIMIT, as_mask, clean, masked_sum
from verl.errors import ConfigError
from verl.metrics import Metrics

K3_LIMIT = 10.0

_CANONICAL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str, response_mask: Tensor | None = None) -> Tensor:
    """Per-token KL estimate (B, R); 0 at masked positions if a mask is given.

    ``kl_penalty``: kl or k1, abs, mse or k2, low_var_kl or k3; a trailing "+" (say k3+) keeps the estimator's value
    and takes the gradient of k2, which is the unbiased one of the KL (straight-through). k3 clamps the log-ratio to
    +-20 and its result to +-10. Raises ConfigError for other names ("full" needs whole distributions).
    """
    estimator = _CANONICAL.get(kl_penalty.removesuffix("+"))
    if estimator is None:
        raise ConfigError(f"KL estimator {kl_penalty!r} is unknown; use one of {', '.join(_CANONICAL)}, or add '+'")
    mask = torch.ones_like(logprob, dtype=torch.bool) if response_mask is None else as_mask(response_mask)
    difference = clean(logprob, mask) - clean(ref_logprob, mask)
    value = _estimate(difference, estimator)
    if kl_penalty.endswith("+") and estimator != "k2":
        surrogate = _estimate(difference, "k2")
        value = surrogate - surrogate.detach() + value.detach()
    return value


def _estimate(difference: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    reverse = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(reverse) - reverse).clamp(-K3_LIMIT, K3_LIMIT)


def kl_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    kl_loss_type: str = "low_var_kl",
    counts: GlobalCounts | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The KL term of the actor's loss (before its coefficient) and ``actor/kl_loss`` (mean per token)."""
    per_token = kl_penalty(log_prob, ref_log_prob.detach(), kl_loss_type, response_mask)
    metrics = Metrics()
    metrics.add_total("actor/kl_loss", masked_sum(per_token.detach(), response_mask), as_mask(response_mask).sum())
    loss = agg_loss(per_token, response_mask, loss_agg_mode, counts=counts, loss_scale_factor=loss_scale_factor)
    return loss, metrics
