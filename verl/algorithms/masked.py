"""Sums, means, variances and whitening over the valid positions of a tensor.

Garbage at masked positions is replaced before any arithmetic (a product with the mask would keep NaN alive, in the
value or in the gradient).
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""``exp`` of a log-ratio is taken of values clamped to plus or minus this (e^20 is about 4.9e8)."""


def as_mask(mask: Tensor) -> Tensor:
    """A mask of any dtype as bool: True where it is greater than 0."""
    return mask if mask.dtype == torch.bool else mask > 0


def upcast(values: Tensor) -> Tensor:
    """``values`` in the dtype that losses are computed in: float64 stays, anything else becomes float32."""
    return values if values.dtype == torch.float64 else values.float()


def clean(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` upcast, and 0 at masked positions; no gradient flows to those."""
    return upcast(values).masked_fill(~as_mask(mask), 0.0)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum over valid positions (0 where there are none)."""
    kept = clean(values, mask)
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean over valid positions; 0, with zero gradient, where there are none."""
    valid = as_mask(mask).expand(values.shape)
    count = valid.sum() if axis is None else valid.sum(dim=axis)
    return masked_sum(values, valid, axis) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over valid positions, divided by n - 1 if ``unbiased``; 0 when fewer than two are valid."""
    valid = as_mask(mask).expand(values.shape)
    squares = masked_sum((clean(values, valid) - masked_mean(values, valid)) ** 2, valid)
    count = valid.sum()
    return squares / (count - int(unbiased)).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values scaled to variance 1 (unbiased, eps 1e-8) and, if ``shift_mean``, to mean 0; 0 at masked positions.

    With no spread (one valid value, none, or all equal) the deviation is exactly 0, not rounding noise times 1e4.
    """
    valid = as_mask(mask).expand(values.shape)
    kept = clean(values, valid)
    mean = masked_mean(kept, valid)
    deviation = (kept - mean) * torch.rsqrt(masked_var(kept, valid) + 1e-8)
    highest = kept.masked_fill(~valid, -torch.inf).max() if kept.numel() else kept.sum()
    lowest = kept.masked_fill(~valid, torch.inf).min() if kept.numel() else kept.sum()
    deviation = torch.where(highest > lowest, deviation, torch.zeros_like(deviation))
    return (deviation if shift_mean else deviation + mean).masked_fill(~valid, 0.0)
