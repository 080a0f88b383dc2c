"""From a (B, R) matrix of per-token losses to one number, the same however the batch was cut.

The training engine SUMS the losses of its micro-batches. That gives the loss of the whole mini-batch exactly when every
micro-batch divides by the counts of the whole optimizer step, so those counts are passed around as `GlobalCounts`: as
an argument, or, for losses written by users, as the ambient counts of the current context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from verl.algorithms.masked import as_mask, clean
from verl.errors import ConfigError

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True)
class GlobalCounts:
    """What the losses of one optimizer step are divided by, over all micro-batches and all ranks.

    ``tokens``: valid tokens. ``sequences``: sequences with at least one valid token; a fully masked sequence counts in
    no mode. ``horizon``: the constant of seq-mean-token-sum-norm (default there: the width of the matrix, which depends
    on padding, so an engine that trims padding sets it to the longest allowed response).
    """

    tokens: float
    sequences: float
    horizon: float | None = None

    @staticmethod
    def of(mask: Tensor, horizon: float | None = None) -> GlobalCounts:
        """The counts of one whole (B, R) mask."""
        valid = as_mask(mask)
        return GlobalCounts(float(valid.sum()), float(valid.any(dim=-1).sum()), horizon)


_ambient: ContextVar[GlobalCounts | None] = ContextVar("verl_global_counts", default=None)


@contextmanager
def use_counts(counts: GlobalCounts) -> Iterator[None]:
    """Inside the block, every `agg_loss` without counts of its own divides by ``counts``."""
    token = _ambient.set(counts)
    try:
        yield
    finally:
        _ambient.reset(token)


def _over(total: Tensor, count: float) -> Tensor:
    """``total / count``; an empty batch has total 0 and stays 0."""
    return total / count if count > 0 else total


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    counts: GlobalCounts | None = None,
    loss_scale_factor: float | None = None,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
) -> Tensor:
    """Aggregate per-token losses (B, R) into a scalar.

    token-mean: sum / tokens. token-sum: sum. seq-mean-token-sum: mean over sequences of their sums.
    seq-mean-token-mean: mean over sequences of their means. seq-mean-token-sum-norm: seq-mean-token-sum divided by
    ``loss_scale_factor`` (Dr. GRPO, arXiv:2503.20783), else by the horizon.

    Denominators: ``counts``, else ``batch_num_tokens`` / ``global_batch_size`` (which counts NON-EMPTY sequences, so
    that both paths agree), else the ambient counts, else this matrix alone. The result is multiplied by ``dp_size``
    for engines that average gradients over ranks. An all-masked matrix gives 0 with zero gradient.

    Raises ConfigError for an unknown mode, ValueError if ``dp_size > 1`` comes without global counts.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ConfigError(f"loss_agg_mode={loss_agg_mode!r} is unknown; use one of {', '.join(LOSS_AGG_MODES)}")
    valid = as_mask(loss_mask)
    losses = clean(loss_mat, valid)
    if loss_agg_mode == "token-sum":
        return losses.sum() * dp_size

    per_token = loss_agg_mode == "token-mean"
    explicit = batch_num_tokens if per_token else global_batch_size
    if counts is None and explicit is None:
        counts = _ambient.get()
    if counts is not None:
        count = counts.tokens if per_token else counts.sequences
    elif explicit is not None:
        count = float(explicit)
    elif dp_size > 1:
        raise ValueError(f"{loss_agg_mode} over {dp_size} ranks needs the global counts of the optimizer step")
    else:
        local = GlobalCounts.of(valid)
        count = local.tokens if per_token else local.sequences
    if per_token:
        return _over(losses.sum(), count) * dp_size

    per_sequence = losses.sum(dim=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        per_sequence = per_sequence / valid.sum(dim=-1).clamp(min=1)
    loss = _over(per_sequence.sum(), count) * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        horizon = loss_scale_factor or (counts.horizon if counts is not None else None) or loss_mask.shape[-1]
        loss = loss / horizon
    return loss
