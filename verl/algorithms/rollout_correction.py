"""Correction for rollouts that were not sampled by exactly the policy being trained.

Sources of the gap: another engine or dtype, stale weights. rho = p_train / p_rollout of the sampled tokens. Truncated
importance weights multiply the policy loss (https://fengyao.notion.site/off-policy-rl; sequence weights and rejection:
https://richardli.xyz/rl-collapse); rejection narrows the mask (`verl.algorithms.rollout_rejection`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.masked import LOG_RATIO_LIMIT, as_mask, clean, masked_mean
from verl.algorithms.rollout_rejection import rejection_mask
from verl.algorithms.settings import setting
from verl.algorithms.token_metrics import token_metrics
from verl.errors import ConfigError
from verl.metrics import Metrics

PREFIX = "rollout_corr/"
LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class RolloutCorrection:
    """``weights`` (B, R), detached, or None; ``response_mask`` (B, R) bool after rejection; ``metrics``."""

    weights: Tensor | None
    response_mask: Tensor
    metrics: Metrics


def rollout_correction(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: Any
) -> RolloutCorrection:
    """All that ``algorithm.rollout_correction`` asks for, on (B, R) log-probs of the trained and the sampling policy.

    Keys: ``rollout_is`` (null, token, sequence), ``rollout_is_threshold``, ``rollout_is_batch_normalize``,
    ``rollout_rs``, ``rollout_rs_threshold``. Run it over the whole mini-batch: batch normalisation crosses rows.
    """
    mask = as_mask(response_mask)
    log_ratio = clean(old_log_prob.detach(), mask) - clean(rollout_log_prob.detach(), mask)
    metrics = offpolicy_metrics(old_log_prob, rollout_log_prob, mask)
    weights, kept = None, mask
    if (level := setting(config, "rollout_is", None)) is not None:
        weights, found = importance_weights(
            log_ratio,
            mask,
            level,
            setting(config, "rollout_is_threshold", 2.0),
            bool(setting(config, "rollout_is_batch_normalize", False)),
        )
        metrics.merge(found)
    if (modes := setting(config, "rollout_rs", None)) is not None:
        kept, found = rejection_mask(log_ratio, mask, modes, setting(config, "rollout_rs_threshold", None))
        metrics.merge(found.prefixed(PREFIX))
    return RolloutCorrection(weights, kept, metrics)


def parse_is_threshold(threshold: float | str) -> tuple[float | None, float]:
    """(lower, upper) of "upper", upper or "lower_upper"."""
    parts = str(threshold).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or any(number <= 0 for number in numbers) or numbers != sorted(numbers):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is_threshold={threshold!r}: give a positive number, or 'low_high'"
        )
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def importance_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    level: str = "token",
    threshold: float | str = 2.0,
    batch_normalize: bool = False,
) -> tuple[Tensor, Metrics]:
    """Weights (B, R), 0 at masked positions, and their metrics.

    ``level`` token: rho of the token; sequence: the product over the sequence, at each of its tokens. A single
    ``threshold`` truncates from above; "low_high" gives weight 0 outside the two (IcePop). ``batch_normalize`` then
    divides by the mean (over tokens, or over non-empty sequences), so it needs the whole mini-batch.
    """
    if level not in LEVELS:
        raise ConfigError(f"algorithm.rollout_correction.rollout_is={level!r}: use null, token or sequence")
    lower, upper = parse_is_threshold(threshold)
    mask = as_mask(response_mask)
    exponent = clean(log_ratio.detach(), mask)
    if level == "sequence":
        exponent = exponent.sum(dim=-1, keepdim=True).expand_as(exponent)
    raw = exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().masked_fill(~mask, 0.0)
    if lower is None:
        weights = raw.clamp(max=upper)
    else:
        weights = raw.masked_fill((raw < lower) | (raw > upper), 0.0)
    metrics = _weight_metrics(weights, raw, mask, 1.0 / upper if lower is None else lower, upper)
    if batch_normalize:
        per_sequence = masked_mean(weights, mask, axis=-1)
        mean = float(masked_mean(weights, mask) if level == "token" else masked_mean(per_sequence, mask.any(dim=-1)))
        weights = weights / mean if mean > 1e-8 else weights
        metrics.add(f"{PREFIX}rollout_is_batch_norm_factor", mean if mean > 1e-8 else 1.0)
    return weights, metrics


def _weight_metrics(weights: Tensor, raw: Tensor, mask: Tensor, lower: float, upper: float) -> Metrics:
    metrics = token_metrics(
        mask,
        {
            f"{PREFIX}rollout_is_mean": weights,
            f"{PREFIX}rollout_is_ratio_fraction_high": raw > upper,
            f"{PREFIX}rollout_is_ratio_fraction_low": raw < lower,
        },
    )
    valid = weights[mask]
    tokens = float(valid.numel())
    if not tokens:
        return metrics
    metrics.add(f"{PREFIX}rollout_is_max", float(valid.max()), reduce="max")
    metrics.add(f"{PREFIX}rollout_is_min", float(valid.min()), reduce="min")
    metrics.add(f"{PREFIX}rollout_is_std", float(valid.std(unbiased=False)), weight=tokens)
    squares = float(valid.square().mean())
    # Effective sample size as a share of the tokens: 1 when all weights are equal.
    share = float(valid.mean()) ** 2 / squares if squares > 0 else 0.0
    metrics.add(f"{PREFIX}rollout_is_eff_sample_size", share, weight=tokens)
    return metrics


def offpolicy_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Metrics:
    """How far the two policies are apart on the sampled tokens; nothing for an empty mask.

    kl: mean of log p_rollout - log p_train. k3_kl: its low-variance twin. *_ppl: mean over sequences of the perplexity.
    log_ppl_diff, ppl_ratio: of training to rollout. chi2_token, chi2_seq: E[rho^2] - 1 of tokens and of sequences.
    """
    mask = as_mask(response_mask)
    train, sampled = clean(old_log_prob.detach(), mask), clean(rollout_log_prob.detach(), mask)
    log_ratio = train - sampled
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = token_metrics(
        mask,
        {
            f"{PREFIX}kl": -log_ratio,
            f"{PREFIX}k3_kl": torch.expm1(bounded) - bounded,
            f"{PREFIX}chi2_token": torch.expm1(2 * bounded),
        },
    )
    rows = mask.any(dim=-1)
    lengths = mask.sum(dim=-1)[rows]
    sequences = float(rows.sum())
    if not sequences:
        return metrics
    log_ppl_train, log_ppl_sampled = -train.sum(dim=-1)[rows] / lengths, -sampled.sum(dim=-1)[rows] / lengths
    difference = log_ppl_train - log_ppl_sampled
    total = log_ratio.sum(dim=-1)[rows].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    for name, value in {
        "training_ppl": log_ppl_train.exp(),
        "rollout_ppl": log_ppl_sampled.exp(),
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": difference.exp(),
        "chi2_seq": torch.expm1(2 * total),
    }.items():
        metrics.add(PREFIX + name, float(value.mean()), weight=sequences)
    return metrics
