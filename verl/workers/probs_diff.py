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
    count = int(mask.sum())
    if not count:
        return metrics
    a, b = rollout_log_probs[mask].double(), log_probs[mask].double()
    difference = (a.exp() - b.exp()).abs()
    metrics.add("training/rollout_probs_diff_mean", float(difference.mean()), weight=count)
    metrics.add("training/rollout_probs_diff_max", float(difference.max()), reduce="max")
    metrics.add("training/rollout_log_probs_diff_mean", float((a - b).abs().mean()), weight=count)
    return metrics
