"""Reference log-probs of a whole data set, asked for once before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl.data import validation_batches
from verl.data.loader import Collate, RowSource
from verl.data.rows import Row
from verl.notices import notice
from verl.protocol import DataProto

BATCH = 256  # rows a call; micro-batches are cut from them as always


class KnownReference:
    """A data set whose rows also have the reference's numbers, one a key."""

    def __init__(self, dataset: RowSource, values: dict[str, torch.Tensor]):
        self.dataset, self.values = dataset, values

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> Row:
        known = {name: float(values[position]) for name, values in self.values.items()}
        return {**self.dataset[position], **known}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


def known_reference(
    dataset: RowSource, collate: Collate, ask: Callable[[DataProto], DataProto], keys: Sequence[str]
) -> KnownReference:
    """``dataset`` with what ``ask`` gives for every row: (B,) tensors under ``keys``."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in keys}
    for batch in validation_batches(dataset, BATCH, collate=collate):
        answer = ask(batch).batch
        for name in keys:
            found[name].append(answer[name].double())
    notice(f"The reference's log-probs of {len(dataset)} rows are known; the reference is not needed any more.")
    return KnownReference(dataset, {name: torch.cat(parts) for name, parts in found.items()})


def collate_known(collate: Collate, keys: Sequence[str], rows: Sequence[Row], uids: Sequence[str]) -> DataProto:
    """``collate`` without the ``keys``, which become (B,) float32 tensors."""
    plain = [{name: value for name, value in row.items() if name not in keys} for row in rows]
    batch = collate(plain, uids)
    for name in keys:
        batch.batch[name] = torch.tensor([row[name] for row in rows], dtype=torch.float32)
    return batch
