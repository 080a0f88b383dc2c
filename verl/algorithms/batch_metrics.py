"""Metrics of a rollout batch, with verl's names: scores, advantages, lengths, groups, agreement with the rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.groups import Groups
from verl.algorithms.masked import as_mask, upcast
from verl.algorithms.rewards_shaping import settle_rewards, usable_rows
from verl.metrics import Metrics


def add_spread(metrics: Metrics, name: str, values: Tensor) -> None:
    """``name/mean``, ``name/max`` and ``name/min`` of a flat tensor; nothing if it is empty."""
    if values.numel() == 0:
        return
    values = values.detach().to(torch.float64 if values.device.type == "cpu" else torch.float32)
    metrics.add(f"{name}/mean", float(values.mean()), weight=float(values.numel()))
    metrics.add(f"{name}/max", float(values.max()), reduce="max")
    metrics.add(f"{name}/min", float(values.min()), reduce="min")


def data_metrics(batch: Mapping[str, Any], max_prompt_length: int | None = None) -> Metrics:
    """Metrics of one batch of samples (the keys of the sample frame; each part is reported if its keys are there).

    Scores and rewards: sum per row, over rows whose reward did not fail (``generation_mask``, where it is given, is the
    mask before rejection). Advantages, returns and values: over trainable
    tokens of those rows. Lengths: from ``attention_mask``, so tool output counts (``response_mask`` says what is
    trained, not how long a response is).
    """
    metrics = Metrics()
    mask = as_mask(batch["response_mask"])
    generated = mask if batch.get("generation_mask") is None else as_mask(batch["generation_mask"])
    rows = usable_rows(generated, batch.get("score_valid"))
    for key, name in (("token_level_scores", "critic/score"), ("token_level_rewards", "critic/rewards")):
        if batch.get(key) is not None:
            settled = settle_rewards(batch[key], generated, score_valid=batch.get("score_valid"))
            add_spread(metrics, name, settled.sum(dim=-1)[rows])
    trainable = mask & rows.unsqueeze(-1)
    keys = [key for key in ("advantages", "returns", "values") if batch.get(key) is not None]
    found = dict(zip(keys, _picked(trainable, *(batch[key] for key in keys)), strict=True))
    for key, values in found.items():
        add_spread(metrics, f"critic/{key}", values)
    if "values" in found and "returns" in found:
        _add_explained_variance(metrics, found["values"], found["returns"])
    metrics.add("reward/failed_rows", float((generated.any(dim=-1) & ~rows).sum()), reduce="sum")
    metrics.merge(length_metrics(batch, max_prompt_length))
    return metrics


def _picked(mask: Tensor, *values: Tensor) -> list[Tensor]:
    """``value[mask]`` of each, with one look at the mask."""
    where = mask.flatten().nonzero().flatten()
    return [value.flatten() if len(where) == mask.numel() else value.flatten()[where] for value in values]


def _add_explained_variance(metrics: Metrics, values: Tensor, returns: Tensor) -> None:
    """1 - Var(returns - values) / Var(returns); left out where returns do not vary."""
    if returns.numel() < 2:
        return
    variance = float(returns.float().var())
    if variance > 0:
        residual = float((returns.float() - values.float()).var())
        metrics.add("critic/vf_explained_var", 1.0 - residual / variance, weight=float(returns.numel()))


def length_metrics(batch: Mapping[str, Any], max_prompt_length: int | None = None) -> Metrics:
    """``response_length/*``, ``response_length_non_aborted/*``, ``response/aborted_ratio``, ``prompt_length/*``.

    Needs ``attention_mask`` (B, P + R) and ``response_mask`` (B, R). A response is clipped if its ``finish_reason`` is
    "length" (without that column: if it fills all R positions), and aborted if it has no token.
    """
    metrics = Metrics()
    if batch.get("attention_mask") is None or len(batch["response_mask"]) == 0:
        return metrics
    attention = as_mask(batch["attention_mask"])
    width = batch["response_mask"].shape[-1]
    prompt_width = attention.shape[-1] - width
    prompts = attention[:, :prompt_width].sum(dim=-1)
    responses = attention[:, prompt_width:].sum(dim=-1)
    rows = float(len(responses))
    reasons = batch.get("finish_reason")
    if reasons is None:
        clipped = responses >= width
    else:
        clipped = torch.tensor([reason == "length" for reason in reasons], device=responses.device)
    aborted = responses == 0
    add_spread(metrics, "response_length", responses)
    metrics.add("response_length/clip_ratio", float(clipped.float().mean()), weight=rows)
    present = ~aborted
    add_spread(metrics, "response_length_non_aborted", responses[present])
    if bool(present.any()):
        ratio = float(clipped[present].float().mean())
        metrics.add("response_length_non_aborted/clip_ratio", ratio, weight=float(present.sum()))
    metrics.add("response/aborted_ratio", float(aborted.float().mean()), weight=rows)
    add_spread(metrics, "prompt_length", prompts)
    limit = prompt_width if max_prompt_length is None else max_prompt_length
    metrics.add("prompt_length/clip_ratio", float((prompts >= limit).float().mean()), weight=rows)
    return metrics


def group_metrics(
    scores: Sequence[float] | np.ndarray | Tensor,
    index: Sequence[Any] | np.ndarray,
    score_valid: Sequence[bool] | np.ndarray | Tensor | None = None,
    correct_above: float = 0.0,
) -> Metrics:
    """Groups of one prompt that teach nothing, and how many prompts are solved; ``scores`` (B,).

    ``training/zero_std_groups`` (count) and ``/zero_std_group_ratio``: groups of two or more valid rows with one score.
    ``training/group_accuracy``: mean over groups of the share of rows with a score above ``correct_above``.
    ``training/groups_all_correct_ratio``, ``training/groups_none_correct_ratio``.
    """
    values = np.asarray(scores, dtype=np.float64)
    groups = Groups.of(index, None if score_valid is None else np.asarray(score_valid, dtype=bool))
    counts = groups.counts()
    comparable = counts >= 2
    flat = comparable & ~groups.differs(np.where(groups.usable, values, 0.0))
    metrics = Metrics()
    metrics.add("training/zero_std_groups", float(flat.sum()), reduce="sum")
    present = counts > 0
    if comparable.any():
        weight = float(comparable.sum())
        metrics.add("training/zero_std_group_ratio", float(flat.sum()) / weight, weight=weight)
    if present.any():
        accuracy = groups.means((values > correct_above).astype(np.float64))[present]
        weight = float(present.sum())
        metrics.add("training/group_accuracy", float(accuracy.mean()), weight=weight)
        metrics.add("training/groups_all_correct_ratio", float((accuracy == 1).mean()), weight=weight)
        metrics.add("training/groups_none_correct_ratio", float((accuracy == 0).mean()), weight=weight)
    return metrics


def rollout_agreement(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> Metrics:
    """How well training and rollout agree on the probability of the sampled tokens.

    ``training/rollout_probs_diff_valid`` (1 if there was a token to compare), ``_mean``, ``_max``, ``_std`` of
    |p_train - p_rollout|, and ``training/rollout_actor_probs_pearson_corr``.
    """
    mask = as_mask(response_mask)
    metrics = Metrics()
    metrics.add("training/rollout_probs_diff_valid", float(bool(mask.any())), reduce="min")
    train, sampled = (upcast(x).exp() for x in _picked(mask, old_log_probs.detach(), rollout_log_probs.detach()))
    tokens = float(train.numel())
    if not tokens:
        return metrics
    gap = (train - sampled).abs()
    metrics.add("training/rollout_probs_diff_mean", float(gap.mean()), weight=tokens)
    metrics.add("training/rollout_probs_diff_max", float(gap.max()), reduce="max")
    metrics.add("training/rollout_probs_diff_std", float(gap.std(unbiased=False)), weight=tokens)
    spread = float(train.std(unbiased=False) * sampled.std(unbiased=False))
    if spread > 0:
        covariance = float(((train - train.mean()) * (sampled - sampled.mean())).mean())
        metrics.add("training/rollout_actor_probs_pearson_corr", covariance / spread, weight=tokens)
    return metrics
