"""Batches of prompts: for training with a position that can be saved, for validation every row exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from verl.data.collate import collate_prompts
from verl.data.rows import Row
from verl.data.sampler import Draw, PromptSampler, permutation, resolve_seed
from verl.errors import DataError
from verl.notices import notice
from verl.protocol import DataProto

LastBatch = Literal["drop", "short"]
Collate = Callable[[Sequence[Row], Sequence[str]], DataProto]
"""From dataset rows and the uids of their draws to a batch."""


class RowSource(Protocol):
    """What a loader needs of a dataset: its length and prompt rows by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Row: ...


class PromptLoader:
    """Draws training batches; frame "prompt", see :func:`~verl.data.collate.collate_prompts`, unless ``collate`` makes
    another of them.

    Rows left at the end of an epoch are not drawn (``last_batch="drop"``, with a notice of how many) or make a short
    batch ("short"). ``epochs=None`` goes on for ever. The ``uid`` of a prompt is ``e{epoch}.{position}``: unique for
    every draw, equal in a resumed run.

    Iterating gives the batches that are left, as :meth:`next_batch` does. :meth:`draw` gives any number of rows in the
    same order, across the border of epochs, for loops that refill a batch.
    """

    def __init__(
        self,
        dataset: RowSource,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        last_batch: LastBatch = "drop",
        epochs: int | None = None,
        collate: Collate = collate_prompts,
    ):
        if batch_size < 1:
            raise DataError(f"data.train_batch_size={batch_size}: must be at least 1")
        if last_batch not in ("drop", "short"):
            raise DataError(f"data.last_batch={last_batch!r}: use drop or short")
        rows = len(dataset)
        if rows == 0:
            raise DataError("the dataset is empty: there is nothing to train on")
        if last_batch == "drop" and rows < batch_size:
            raise DataError(
                f"the dataset has {rows} rows, fewer than data.train_batch_size={batch_size}: not one whole batch. "
                f"Set data.train_batch_size to {rows} or less, or data.last_batch=short"
            )
        unused = rows % batch_size if last_batch == "drop" else 0
        if unused:
            notice(
                f"{unused} row{'s' if unused > 1 else ''} unused per epoch: {rows} rows in batches of {batch_size} "
                "(data.last_batch=short makes a smaller batch of them)"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.last_batch: LastBatch = last_batch
        self.collate = collate
        self._sampler = PromptSampler(rows, shuffle=shuffle, seed=seed, epochs=epochs)

    @property
    def epoch(self) -> int:
        """The epoch of the last draw, from 0."""
        return self._sampler.epoch

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (1 if rest and self.last_batch == "short" else 0)

    @property
    def total_steps(self) -> int | None:
        """Batches in all epochs; None without an end."""
        return None if self._sampler.epochs is None else self.steps_per_epoch * self._sampler.epochs

    def __iter__(self) -> Iterator[DataProto]:
        return self

    def __next__(self) -> DataProto:
        return self.next_batch()

    def next_batch(self) -> DataProto:
        """The next batch of one epoch. Raises StopIteration after the last batch of the last epoch."""
        sampler = self._sampler
        needed = self.batch_size if self.last_batch == "drop" else 1
        if sampler.remaining < needed:
            if sampler.is_last_epoch:
                raise StopIteration
            sampler.next_epoch()
        return self._batch(sampler.take(min(self.batch_size, sampler.remaining)))

    def draw(self, count: int) -> DataProto:
        """The next ``count`` rows, whatever the epoch; fewer only at the end of the last one, then StopIteration."""
        draws = self._sampler.take(count)
        if not draws:
            raise StopIteration
        return self._batch(draws)

    def _batch(self, draws: list[Draw]) -> DataProto:
        return self.collate([self.dataset[draw.row] for draw in draws], [draw.uid for draw in draws])

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; independent of batch size, workers and world size."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)


def validation_batches(
    dataset: RowSource,
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    collate: Collate = collate_prompts,
) -> Iterator[DataProto]:
    """Every row exactly once, the last batch possibly short; ``batch_size=None``: all rows in one batch.

    ``uid`` is ``v{row}``, so a row gets the same sampling seed each time and whatever the batch size.
    """
    rows = len(dataset)
    if batch_size is not None and batch_size < 1:
        raise DataError(f"data.val_batch_size={batch_size}: must be at least 1, or null for all rows at once")
    size = batch_size or max(rows, 1)
    order = permutation(rows, resolve_seed(seed), 0) if shuffle else range(rows)
    numbers = [int(row) for row in order]
    for start in range(0, rows, size):
        group = numbers[start : start + size]
        yield collate([dataset[row] for row in group], [f"v{row}" for row in group])
