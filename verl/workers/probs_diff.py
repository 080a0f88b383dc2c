"""How far the sampling engine's log-probs are from the trainer's on the same tokens."""

from __future__ import annotations

import torch

from verl.algorithms.masked import as_mask
from verl.metrics import Metrics


def probs_difference(rollout_log_probs: torch.Tensor, log_probs: torch.Tensor, response_mask: torch.Tensor) -> Metrics:
    """|p_rollout - p_train| and |log p_rollout - log p_train| over the trained tokens, verl's metric names.

    Both grids are (B, R). Nothing is reported where there is no trained token.
    """
    mask = as_mask(response_mask)
    metrics = Metrics()
    if not mask.numel():
        return metrics
    count = mask.sum()
    a, b = (x.detach().masked_fill(~mask, 0.0).double() for x in (rollout_log_probs, log_probs))
    difference = (a.exp() - b.exp()).abs()
    metrics.add_total("training/rollout_probs_diff_mean", difference.sum(), count)
    metrics.add("training/rollout_probs_diff_max", difference.max(), reduce="max", weight=count)
    metrics.add_total("training/rollout_log_probs_diff_mean", (a - b).abs().sum(), count)
    return metrics
