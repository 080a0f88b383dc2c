"""Metrics that are means over valid tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.masked import as_mask, clean
from verl.metrics import Metrics


def token_metrics(response_mask: Tensor, values: Mapping[str, Tensor]) -> Metrics:
    """Means of (B, R) tensors over the valid tokens, weighted by their number; one transfer from the device."""
    mask = as_mask(response_mask)
    sums = [clean(value.detach(), mask).sum().float() for value in values.values()]
    *sums, tokens = torch.stack([*sums, mask.sum().float()]).tolist()
    metrics = Metrics()
    if tokens:
        for name, total in zip(values, sums, strict=True):
            metrics.add(name, total / tokens, weight=tokens)
    return metrics
