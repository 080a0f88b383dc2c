"""Text of sampled rows: for people, for files, for validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl.protocol import DataProto
from verl.tracking.samples import sample_row


def decode_rows(samples: DataProto, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """(prompt texts, response texts) of a sample batch. Prompts keep special tokens, as the model saw them."""
    tensors = samples.batch
    width = tensors["prompts"].shape[1]
    attention = tensors["attention_mask"].numpy().astype(bool)
    prompts, responses = tensors["prompts"].numpy(), tensors["responses"].numpy()
    prompt_ids = [row[keep].tolist() for row, keep in zip(prompts, attention[:, :width], strict=True)]
    response_ids = [row[keep].tolist() for row, keep in zip(responses, attention[:, width:], strict=True)]
    return (
        tokenizer.batch_decode(prompt_ids),
        tokenizer.batch_decode(response_ids, skip_special_tokens=True),
    )


def row_scores(samples: DataProto) -> list[float | None]:
    """The summed score of each row; None where the reward failed."""
    tensors = samples.batch
    totals = tensors["token_level_scores"].masked_fill(~tensors["response_mask"].bool(), 0).sum(1).tolist()
    return [total if ok else None for total, ok in zip(totals, tensors["score_valid"].tolist(), strict=True)]


def prompt_values(frames: dict[str, DataProto], column: str) -> list[Any]:
    """A prompt column for every sample row, joined by uid."""
    prompts = frames["prompt"].non_tensor_batch
    if column not in prompts:
        return [None] * len(frames["sample"])
    by_uid = dict(zip(prompts["uid"], prompts[column], strict=True))
    return [by_uid[uid] for uid in frames["sample"].non_tensor_batch["uid"]]


def ground_truths(frames: dict[str, DataProto]) -> list[Any]:
    """``reward_model.ground_truth`` of every sample row, or None."""
    return [
        model.get("ground_truth") if isinstance(model, dict) else None
        for model in prompt_values(frames, "reward_model")
    ]


def sample_rows(
    frames: dict[str, DataProto], tokenizer: PreTrainedTokenizerBase, *, step: int, split: str, rows: Sequence[int]
) -> list[dict[str, Any]]:
    """Rows for the sample table and ``samples.jsonl``."""
    if not len(rows):
        return []
    samples = frames["sample"].select_idxs(np.array(rows))
    picked = {"prompt": frames["prompt"], "sample": samples}
    prompts, responses = decode_rows(samples, tokenizer)
    scores = row_scores(samples) if "token_level_scores" in samples.batch.keys() else [None] * len(samples)
    columns = samples.non_tensor_batch
    return [
        sample_row(step, split, prompt, response, score, truth, reason, uid)
        for prompt, response, score, truth, reason, uid in zip(
            prompts, responses, scores, ground_truths(picked), columns["finish_reason"], columns["uid"], strict=True
        )
    ]
