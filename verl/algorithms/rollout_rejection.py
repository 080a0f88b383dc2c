"""Rejection of tokens or whole sequences on which the trained and the sampling policy are too far apart.

Divergences of a token, with x = log p_train - log p_rollout clamped to +-20: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verl.algorithms.masked import LOG_RATIO_LIMIT, as_mask, clean
from verl.errors import ConfigError
from verl.metrics import Metrics

MODES = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
_KEY = "algorithm.rollout_correction"


def parse_rejection(modes: str, thresholds: float | str | None) -> dict[str, tuple[float, float]]:
    """{mode: (lowest, highest) kept divergence} of comma-separated modes and as many thresholds (or one for all).

    A k1 mode takes ratio bounds "low_high" (one number h means 1/h_h), of which the logarithms bound k1; the others
    take one upper bound.
    """
    names = [name.strip() for name in str(modes).split(",") if name.strip()]
    if unknown := [name for name in names if name not in MODES]:
        raise ConfigError(f"{_KEY}.rollout_rs={unknown[0]!r} is unknown; use {', '.join(MODES)}, joined by commas")
    specs = [spec.strip() for spec in str(thresholds).split(",")] if thresholds is not None else []
    if not names or len(specs) not in (1, len(names)):
        raise ConfigError(
            f"{_KEY}.rollout_rs_threshold={thresholds!r}: give one threshold, or one for each of {len(names)} modes"
        )
    specs = specs * len(names) if len(specs) == 1 else specs
    return {name: _bounds(name, spec) for name, spec in zip(names, specs, strict=True)}


def _bounds(mode: str, spec: str) -> tuple[float, float]:
    wanted = "'low_high' or one number" if mode.endswith("k1") else "one number"
    try:
        numbers = [float(part) for part in spec.split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in ((1, 2) if mode.endswith("k1") else (1,)) or any(number <= 0 for number in numbers):
        raise ConfigError(f"{_KEY}.rollout_rs_threshold={spec!r} for {mode}: give {wanted}, positive")
    if not mode.endswith("k1"):
        return -math.inf, numbers[0]
    low, high = numbers if len(numbers) == 2 else (1.0 / numbers[0], numbers[0])
    if low > high:
        raise ConfigError(f"{_KEY}.rollout_rs_threshold={spec!r} for {mode}: the low bound is above the high one")
    return math.log(low), math.log(high)


def rejection_mask(
    log_ratio: Tensor, response_mask: Tensor, modes: str, thresholds: float | str | None
) -> tuple[Tensor, Metrics]:
    """(narrowed mask (B, R) bool, metrics): a token stays if it passes every mode; a sequence mode judges whole rows.

    Metrics, without prefix: ``rollout_rs_{mode}_mean`` / ``_max`` / ``_min`` of the statistic,
    ``rollout_rs_{mode}_masked_fraction``, ``rollout_rs_masked_fraction`` (of tokens) and
    ``rollout_rs_seq_masked_fraction`` (rows that lost at least one token).
    """
    mask = as_mask(response_mask)
    x = clean(log_ratio.detach(), mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    divergences = {"k1": -x, "k2": 0.5 * x.square(), "k3": torch.expm1(x) - x}
    rows = mask.any(dim=-1)
    tokens, sequences = float(mask.sum()), float(rows.sum())
    kept, metrics = mask, Metrics()
    for mode, (lowest, highest) in parse_rejection(modes, thresholds).items():
        level, divergence = mode.rsplit("_", 1)
        values = divergences[divergence]
        statistic = values if level == "token" else _per_sequence(values, mask, level)
        passes = (statistic >= lowest) & (statistic <= highest)
        if level != "token":
            passes = passes.unsqueeze(-1)
        kept = kept & passes
        judged = statistic[mask] if level == "token" else statistic[rows]
        if judged.numel():
            metrics.add(f"rollout_rs_{mode}_mean", float(judged.mean()), weight=float(judged.numel()))
            metrics.add(f"rollout_rs_{mode}_max", float(judged.max()), reduce="max")
            metrics.add(f"rollout_rs_{mode}_min", float(judged.min()), reduce="min")
            lost = float((mask & ~passes).sum()) / tokens
            metrics.add(f"rollout_rs_{mode}_masked_fraction", lost, weight=tokens)
    if tokens:
        metrics.add("rollout_rs_masked_fraction", float((mask & ~kept).sum()) / tokens, weight=tokens)
        touched = float((mask & ~kept).any(dim=-1).sum())
        metrics.add("rollout_rs_seq_masked_fraction", touched / sequences, weight=sequences)
    return kept, metrics


def _per_sequence(values: Tensor, mask: Tensor, level: str) -> Tensor:
    """(B,) sum, mean or maximum of (B, R) over valid tokens; 0 for an empty row."""
    if level == "seq_max":
        highest = values.masked_fill(~mask, -math.inf).amax(dim=-1)
        return highest.masked_fill(~mask.any(dim=-1), 0.0)
    total = values.masked_fill(~mask, 0.0).sum(dim=-1)
    return total if level == "seq_sum" else total / mask.sum(dim=-1).clamp(min=1)
