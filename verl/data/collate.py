"""Prompt rows to a DataProto of frame "prompt": object columns only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

from verl.data.rows import Row
from verl.protocol import DataProto, object_column

# Padded forms that a dataset may also offer; padding is made by generation, from prompt_ids.
PADDED_FORMS = frozenset({"input_ids", "attention_mask", "position_ids"})


def collate_prompts(rows: Sequence[Row], uids: Sequence[str]) -> DataProto:
    """A batch with column ``uid`` and every column of ``rows``; a row that lacks a column has None there.

    ``uids`` identify draws, not texts: two rows with the same prompt stay two prompts.
    """
    if len(rows) != len(uids) or len(set(uids)) != len(uids):
        raise ValueError(f"{len(rows)} rows need as many different uids, got {len(uids)} ({len(set(uids))} different)")
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in PADDED_FORMS]
    arrays = {name: object_column([row.get(name) for row in rows]) for name in columns}
    return DataProto(batch=None, non_tensor_batch={"uid": object_column(list(uids)), **arrays}, meta_info={})
