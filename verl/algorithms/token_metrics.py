"""Metrics that are means over valid tokens."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verl.algorithms.masked import as_mask, clean
from verl.metrics import Metrics


def token_metrics(response_mask: Tensor, values: Mapping[str, Tensor]) -> Metrics:
    """Means of (B, R) tensors over the valid tokens, weighted by their number; nothing is read from the device."""
    mask = as_mask(response_mask)
    tokens = mask.sum()
    metrics = Metrics()
    for name, value in values.items():
        metrics.add_total(name, clean(value.detach(), mask).sum(), tokens)
    return metrics
