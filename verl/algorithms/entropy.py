"""Entropy of the policy's next-token distribution, and the entropy term of the actor's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregation import GlobalCounts, agg_loss
from verl.algorithms.masked import as_mask, masked_sum, upcast
from verl.metrics import Metrics


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats (...,) of softmax(logits (..., V)); logits of -inf (forbidden tokens) add nothing."""
    logits = upcast(logits)
    logits = logits.clamp(min=torch.finfo(logits.dtype).min)
    log_normaliser = torch.logsumexp(logits, dim=-1)
    return log_normaliser - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


def entropy_loss(
    entropy: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    counts: GlobalCounts | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Aggregated entropy (to be subtracted with ``entropy_coeff``) and ``actor/entropy`` (mean per token)."""
    metrics = Metrics()
    metrics.add_total("actor/entropy", masked_sum(entropy.detach(), response_mask), as_mask(response_mask).sum())
    loss = agg_loss(entropy, response_mask, loss_agg_mode, counts=counts, loss_scale_factor=loss_scale_factor)
    return loss, metrics
