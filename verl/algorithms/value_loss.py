"""The clipped squared-error loss of the value model (PPO, arXiv:1707.06347 and its reference implementation)."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregation import GlobalCounts, agg_loss
from verl.algorithms.masked import clean
from verl.algorithms.token_metrics import token_metrics
from verl.metrics import Metrics


def value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    counts: GlobalCounts | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Metrics]:
    """0.5 * aggregate(max((v - R)^2, (clip(v, old - c, old + c) - R)^2)), all tensors (B, R).

    Metrics: ``critic/vf_clipfrac`` (share of tokens where the clipped term is the larger), ``critic/vpred_mean``.
    """
    new, target, old = (clean(tensor, response_mask) for tensor in (vpreds, returns.detach(), values.detach()))
    clipped = torch.minimum(torch.maximum(new, old - cliprange_value), old + cliprange_value)
    plain_error, clipped_error = (new - target).square(), (clipped - target).square()
    per_token = 0.5 * torch.maximum(plain_error, clipped_error)
    metrics = token_metrics(
        response_mask,
        {"critic/vf_clipfrac": (clipped_error > plain_error), "critic/vpred_mean": new},
    )
    loss = agg_loss(per_token, response_mask, loss_agg_mode, counts=counts, loss_scale_factor=loss_scale_factor)
    return loss, metrics
