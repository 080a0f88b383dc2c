"""Between a sample batch and reward functions: response lengths, texts, call arguments, and the scored rows back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.errors import RewardError
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.rewards.contract import RewardResult, is_finite


def response_lengths(response_mask: torch.Tensor) -> torch.Tensor:
    """Tokens of each response up to its last sampled one. (B, R) mask to (B,) int64; 0 for a row without any."""
    places = torch.arange(1, response_mask.shape[1] + 1, device=response_mask.device)
    marked = torch.where(response_mask.bool(), places, torch.zeros_like(places))
    return marked.amax(dim=1) if response_mask.shape[1] else marked.sum(dim=1)


def solution_texts(batch: DataProto, tokenizer: Any) -> list[str]:
    """The decoded response of every row, special tokens skipped. Ids are only read, never made from text."""
    lengths = response_lengths(batch.batch["response_mask"]).tolist()
    ids = [row[:length] for row, length in zip(batch.batch["responses"].tolist(), lengths, strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def row_arguments(batch: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """What verl's reward functions are offered, per row: data_source, solution_str, ground_truth, extra_info.

    ``ground_truth`` is passed on unchanged from ``reward_model``, else from a column of that name. ``extra_info`` is a
    copy, {} where the row has none, with ``num_turns`` and ``rollout_reward_scores`` when generation recorded them.
    """
    columns = batch.non_tensor_batch
    rows = []
    for row, text in enumerate(solution_texts(batch, tokenizer)):
        extra = dict(_at(columns, "extra_info", row) or {})
        for name, column in (("num_turns", "__num_turns__"), ("rollout_reward_scores", "reward_scores")):
            if column in columns:
                extra[name] = columns[column][row]
        rows.append(
            {
                "data_source": _at(columns, "data_source", row),
                "solution_str": text,
                "ground_truth": ground_truth(columns, row),
                "extra_info": extra,
            }
        )
    return rows


def ground_truth(columns: dict[str, np.ndarray], row: int) -> Any:
    """The reference answer of a row, or None."""
    rule = _at(columns, "reward_model", row)
    if isinstance(rule, dict) and "ground_truth" in rule:
        return rule["ground_truth"]
    return _at(columns, "ground_truth", row)


def reward_style(columns: dict[str, np.ndarray], row: int) -> str | None:
    """``reward_model.style`` of a row: rule, reference, none..., or None."""
    rule = _at(columns, "reward_model", row)
    return rule.get("style") if isinstance(rule, dict) else None


def _at(columns: dict[str, np.ndarray], name: str, row: int) -> Any:
    return columns[name][row] if name in columns else None


def scored_batch(batch: DataProto, results: Sequence[RewardResult], metrics: Metrics) -> DataProto:
    """The rows of ``batch`` with their scores, and nothing else.

    Tensors ``token_level_scores`` (B, R) float32 with the score at the response's last token and ``score_valid`` (B,)
    bool; object columns ``uid``, ``sample_id``, ``reward_extra_info`` (a dict each) and ``reward_error`` (a text or
    None); ``meta_info["metrics"]``. A row without a score has 0.0 everywhere and ``score_valid`` False.
    """
    mask = batch.batch["response_mask"]
    lengths = response_lengths(mask)
    valid = torch.tensor([result.score is not None for result in results], dtype=torch.bool, device=mask.device)
    valid &= lengths > 0
    values = torch.tensor([result.score or 0.0 for result in results], dtype=torch.float32, device=mask.device)
    scores = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    rows = valid.nonzero().squeeze(1)
    scores[rows, lengths[rows] - 1] = values[rows]
    columns: dict[str, np.ndarray] = {
        k: batch.non_tensor_batch[k] for k in ("uid", "sample_id") if k in batch.non_tensor_batch
    }
    columns["reward_extra_info"] = _objects([result.extra for result in results])
    columns["reward_error"] = _objects([result.error for result in results])
    return DataProto.from_dict(
        tensors={"token_level_scores": scores, "score_valid": valid},
        non_tensors=columns,
        meta_info={"metrics": metrics},
    )


def flatten_extra_info(batch: DataProto) -> dict[str, np.ndarray]:
    """``reward_extra_info`` as one object column per key found in any row; None where a row lacks the key.

    It is done on whole batches, because pieces of one batch may know different keys.
    """
    if "reward_extra_info" not in batch.non_tensor_batch:
        raise RewardError("this batch has no column 'reward_extra_info': score it first")
    infos = list(batch.non_tensor_batch["reward_extra_info"])
    keys = dict.fromkeys(key for info in infos for key in info)
    return {key: _objects([info.get(key) for info in infos]) for key in keys}


def add_extra_metrics(metrics: Metrics, results: Sequence[RewardResult]) -> None:
    """``reward/{key}/mean`` over the rows where the key holds a finite number; texts and None are left out."""
    for result in results:
        for key, value in result.extra.items():
            if isinstance(value, (bool, int, float)) and is_finite(value):
                metrics.add(f"reward/{key}/mean", float(value))


def _objects(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column
