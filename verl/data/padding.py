"""Rows with token ids to sample batches, padded as a rollout pads them: prompts on the left, responses on the right.

The functions fit `PromptLoader`'s ``collate`` once the pad token is bound:
``PromptLoader(dataset, 8, collate=functools.partial(collate_pairs, pad_id=tokenizer.pad_token_id))``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from verl.data.rows import Row
from verl.errors import DataError
from verl.protocol import DataProto, object_column

_IN_TENSORS = frozenset({"prompt_ids", "response_ids", "response_mask"})
_OF_SIDES = frozenset({"chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask"})


def collate_sequences(
    rows: Sequence[Row], uids: Sequence[str], pad_id: int, sample_ids: Sequence[str] | None = None
) -> DataProto:
    """A sample batch of B rows that have ``prompt_ids``, ``response_ids`` and ``response_mask``.

    Tensors: prompts (B, P), responses (B, R), response_mask (B, R), and input_ids, attention_mask, position_ids
    (B, P + R), int64, P and R as wide as the widest row. Attention follows the lengths, never the ids: a pad token may
    equal an eos token. Columns: uid, sample_id (default ``{uid}/0``), and all other keys of the rows.
    """
    sample_ids = [f"{uid}/0" for uid in uids] if sample_ids is None else list(sample_ids)
    if not len(rows) == len(uids) == len(set(sample_ids)):
        raise ValueError(f"{len(rows)} rows need as many uids and different sample ids")
    width = max((len(row["prompt_ids"]) for row in rows), default=0)
    total = width + max((len(row["response_ids"]) for row in rows), default=0)
    ids = np.full((len(rows), total), pad_id, np.int64)
    attention, trained = np.zeros_like(ids), np.zeros_like(ids)
    for i, row in enumerate(rows):
        start, end = width - len(row["prompt_ids"]), width + len(row["response_ids"])
        ids[i, start:width], ids[i, width:end] = row["prompt_ids"], row["response_ids"]
        attention[i, start:end] = 1
        trained[i, width:end] = row["response_mask"]
    tensors = {
        "prompts": ids[:, :width],
        "responses": ids[:, width:],
        "response_mask": trained[:, width:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(1) - 1, 0),
    }
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _IN_TENSORS]
    columns = {name: object_column([row.get(name) for row in rows]) for name in names}
    return DataProto(
        batch=TensorDict(
            {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()},
            batch_size=[len(rows)],
        ),
        non_tensor_batch={"uid": object_column(list(uids)), "sample_id": object_column(sample_ids), **columns},
        meta_info={},
    )


def collate_pairs(rows: Sequence[Row], uids: Sequence[str], pad_id: int) -> DataProto:
    """Items of a `PreferenceDataset` as a sample batch of 2B rows, the two sides of a pair next to one another.

    Columns beside those of `collate_sequences`: ``pair_id`` (the uid) and ``side`` ("chosen" or "rejected");
    ``sample_id`` is ``{uid}/chosen`` or ``{uid}/rejected``.
    """
    sides: list[Row] = []
    for row, uid in zip(rows, uids, strict=True):
        shared = {name: value for name, value in row.items() if name not in _OF_SIDES}
        for side in ("chosen", "rejected"):
            own = {"response_ids": row[f"{side}_ids"], "response_mask": row[f"{side}_mask"]}
            sides.append({**shared, **own, "pair_id": uid, "side": side})
    sample_ids = [f"{row['pair_id']}/{row['side']}" for row in sides]
    return collate_sequences(sides, [row["pair_id"] for row in sides], pad_id, sample_ids)


def collate_unpaired(rows: Sequence[Row], uids: Sequence[str], pad_id: int) -> DataProto:
    """Items of an `UnpairedDataset` as a sample batch, with the tensor ``label`` (B,) bool."""
    batch = collate_sequences([{k: v for k, v in row.items() if k != "label"} for row in rows], uids, pad_id)
    assert batch.batch is not None
    batch.batch["label"] = torch.tensor([bool(row["label"]) for row in rows], dtype=torch.bool)
    return batch


def mismatched(batch: DataProto) -> DataProto:
    """For KTO's estimate of the KL: each row's prompt with the response of the row after it (the last with the first).

    ``batch`` is a whole mini-batch as `collate_unpaired` makes it; the result has its rows, ids and widths, and only
    tensors that belong to the new sequences. A mini-batch of one row has no other response: DataError.
    """
    rows = len(batch)
    if rows < 2:
        raise DataError(
            "the KL estimate of kto pairs each prompt with another row's response: use mini-batches of 2 up"
        )
    assert batch.batch is not None
    tensors = {key: batch.batch[key] for key in ("prompts", "responses", "response_mask", "attention_mask")}
    width = tensors["prompts"].shape[1]
    responses, trained = tensors["responses"].roll(-1, 0), tensors["response_mask"].roll(-1, 0)
    attention = torch.cat([tensors["attention_mask"][:, :width], tensors["attention_mask"][:, width:].roll(-1, 0)], 1)
    return DataProto(
        batch=TensorDict(
            {
                "prompts": tensors["prompts"],
                "responses": responses,
                "response_mask": trained,
                "input_ids": torch.cat([tensors["prompts"], responses], 1),
                "attention_mask": attention,
                "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            },
            batch_size=[rows],
        ),
        non_tensor_batch={key: batch.non_tensor_batch[key] for key in ("uid", "sample_id")},
        meta_info={},
    )
