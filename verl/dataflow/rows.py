"""The rows of a step: columns by frame, aligned by id, never by position.

Filters do not copy columns. Every node has an **epoch**, the number of filters (subset nodes) ordered before it, and
sees the rows that these filters left. A filter of one frame takes the dependent rows of the others along: a prompt goes
when its last sample has gone, and samples and pairs go with their prompt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.dataflow.node import GLOBAL_STEP, IDENTITY, ROW_ID, STEP, Key
from verl.errors import DataflowError
from verl.protocol import DataProto, object_column

Values = torch.Tensor | np.ndarray  # one column; the first dimension is rows
# A filter of the frame (key) decides over the rows of these frames.
AFFECTS = {"prompt": ("prompt", "sample", "pair"), "sample": ("prompt", "sample", "pair"), "pair": ("pair",)}


@dataclass(frozen=True)
class RowSet:
    """Identity of some rows of one frame, in order: row ids and the uid of the prompt of each."""

    ids: tuple[str, ...]
    uids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def position(self) -> dict[str, int]:
        return {row: i for i, row in enumerate(self.ids)}

    def where(self, keep: Callable[[str, str], bool]) -> RowSet:
        rows = [(row, uid) for row, uid in zip(self.ids, self.uids, strict=True) if keep(row, uid)]
        return RowSet(tuple(r for r, _ in rows), tuple(u for _, u in rows))

    def pick(self, index: Sequence[int]) -> RowSet:
        return RowSet(tuple(self.ids[i] for i in index), tuple(self.uids[i] for i in index))


@dataclass
class Part:
    """Rows that a node gave: all of them, or a piece of a stream."""

    rows: RowSet
    columns: dict[str, Values]  # by the graph's key name


def some(ids: Iterable[str], limit: int = 3) -> str:
    """The first few ids, for an error message."""
    ids = list(ids)
    return ", ".join(ids[:limit]) + (f", … ({len(ids)} rows)" if len(ids) > limit else "")


def natural(row_id: str, uid: str) -> tuple:
    """Sort key of a row among the rows of its prompt: ``a/2`` comes before ``a/10``."""
    rest = row_id[len(uid) :] if row_id.startswith(uid) else row_id
    return tuple((0, int(s), "") if s.isdigit() else (1, 0, s) for s in re.split(r"([0-9]+)", rest) if s)


def take(values: Values, index: Sequence[int]) -> Values:
    """Rows ``index`` of a column; the column itself, uncopied, when that is all of it in order."""
    if len(index) == len(values) and list(index) == list(range(len(index))):
        return values
    if isinstance(values, torch.Tensor):
        return values[torch.as_tensor(index, dtype=torch.long, device=values.device)]
    return values[np.asarray(index, dtype=np.int64)]


def join_columns(name: str, pieces: Sequence[Values]) -> Values:
    """Pieces of one column, one below the other. Their widths must agree: who makes the pieces pads them alike."""
    if len(pieces) == 1:
        return pieces[0]
    if not all(isinstance(p, torch.Tensor) for p in pieces):
        if any(isinstance(p, torch.Tensor) for p in pieces):
            raise DataflowError(f"key {name!r} is a tensor in one piece and an object array in another")
        return np.concatenate(pieces)
    shapes = {tuple(p.shape[1:]) for p in pieces}
    if len(shapes) > 1:
        raise DataflowError(
            f"pieces of key {name!r} have different shapes per row ({', '.join(map(str, sorted(shapes)))}): "
            "pad every piece to one width"
        )
    return torch.cat(list(pieces))


def join_parts(parts: Sequence[Part], names: Iterable[str]) -> Part:
    """Pieces of a stream as one part, in the order in which they came."""
    rows = RowSet(tuple(i for p in parts for i in p.rows.ids), tuple(u for p in parts for u in p.rows.uids))
    filled = [p for p in parts if len(p.rows)]
    return Part(rows, {n: join_columns(n, [p.columns[n] for p in filled]) for n in names} if filled else {})


def columns_of(batch: DataProto) -> dict[str, Values]:
    """All columns of a DataProto by name."""
    tensors = {} if batch.batch is None else dict(batch.batch.items())
    return {**tensors, **batch.non_tensor_batch}


def identity_of(batch: DataProto, frame: str, who: str) -> RowSet:
    """Read the identity columns of a batch of ``frame``; they must be there and the row ids unique."""
    columns = batch.non_tensor_batch
    missing = [name for name in ("uid", ROW_ID[frame]) if name not in columns]
    if missing:
        raise DataflowError(
            f"{who}: a batch of frame {frame!r} needs the identity column {missing[0]!r} (object array of str); "
            f"it has {', '.join(columns_of(batch)) or 'no columns'}"
        )
    rows = RowSet(tuple(map(str, columns[ROW_ID[frame]])), tuple(map(str, columns["uid"])))
    doubled = [row for row, count in Counter(rows.ids).items() if count > 1]
    if doubled:
        raise DataflowError(f"{who}: rows of frame {frame!r} appear twice: {some(doubled)}")
    return rows


def make_batch(frame: str, rows: RowSet | None, columns: Mapping[str, Values], meta: dict[str, Any]) -> DataProto:
    """A DataProto of these columns with the identity columns of ``frame``."""
    tensors = {name: v for name, v in columns.items() if isinstance(v, torch.Tensor)}
    objects = {name: v for name, v in columns.items() if not isinstance(v, torch.Tensor)}
    if rows is not None:
        objects["uid"] = object_column(rows.uids)
        if frame != "prompt":
            objects[ROW_ID[frame]] = object_column(rows.ids)
    batch = TensorDict(tensors, batch_size=[len(rows)]) if tensors and rows is not None else None
    return DataProto(batch=batch, non_tensor_batch=objects, meta_info=meta)


@dataclass
class _Column:
    epoch: int
    values: Values


@dataclass
class _Filter:
    frame: str
    ids: frozenset[str]
    uids: frozenset[str]

    def keep(self, frame: str) -> Callable[[str, str], bool]:
        return (lambda row, _: row in self.ids) if frame == self.frame else (lambda _, uid: uid in self.uids)


@dataclass
class Store:
    """Everything the step has made so far. Not thread-safe: the executor holds its lock around every use."""

    step: int
    values: dict[str, Any] = field(default_factory=dict)  # frame "step"
    _base: dict[str, tuple[int, RowSet]] = field(default_factory=dict)  # frame -> (epoch of making, rows)
    _columns: dict[Key, _Column] = field(default_factory=dict)
    _filters: dict[int, _Filter] = field(default_factory=dict)  # epoch that the filter begins -> filter

    def __contains__(self, key: Key) -> bool:
        return key.name in self.values if key.frame == STEP else key in self._columns

    def has_frame(self, frame: str) -> bool:
        return frame in self._base

    @property
    def frames(self) -> tuple[str, ...]:
        return tuple(self._base)

    def make_frame(self, frame: str, rows: RowSet, epoch: int) -> None:
        self._base[frame] = (epoch, rows)

    def add_filter(self, frame: str, survivors: RowSet, epoch: int) -> None:
        """From epoch ``epoch`` on only ``survivors`` of ``frame`` are seen."""
        self._filters[epoch] = _Filter(frame, frozenset(survivors.ids), frozenset(survivors.uids))

    def rows(self, frame: str, epoch: int) -> RowSet:
        """The rows of ``frame`` that are left at ``epoch``, in their order."""
        made, rows = self._base[frame]
        for start, chosen in sorted(self._filters.items()):
            if made < start <= epoch and frame in AFFECTS[chosen.frame]:
                rows = rows.where(chosen.keep(frame))
        return rows

    def survives(self, frame: str, row: str, uid: str, epoch: int) -> bool:
        """Whether no filter that has finished takes this row away before ``epoch``."""
        return all(
            chosen.keep(frame)(row, uid)
            for start, chosen in self._filters.items()
            if start <= epoch and frame in AFFECTS[chosen.frame]
        )

    def put(self, key: Key, values: Values, epoch: int) -> None:
        """Store a column that is aligned to ``rows(key.frame, epoch)``."""
        self._columns[key] = _Column(epoch, values)

    def column(self, key: Key, ids: Sequence[str]) -> Values:
        """The values of ``key`` for these row ids, in this order."""
        column = self._columns[key]
        position = self.rows(key.frame, column.epoch).position
        lost = [row for row in ids if row not in position]
        if lost:
            raise DataflowError(f"key {str(key)!r} has no value for the rows {some(lost)} of frame {key.frame!r}")
        return take(column.values, [position[row] for row in ids])

    def batch(
        self, frame: str, names: Mapping[str, Key], rows: RowSet | None, other: Callable | None = None
    ) -> DataProto:
        """The keys of ``names`` (name in the batch -> key) for ``rows`` of ``frame``; keys of frame prompt join by uid.

        ``other(key, ids)`` gives the columns that are still being streamed.
        """
        meta = {name: self.values[key.name] for name, key in names.items() if key.frame == STEP}
        columns = {}
        for name, key in names.items():
            if key.frame != STEP:
                ids = rows.ids if key.frame == frame else rows.uids
                columns[name] = self.column(key, ids) if key in self or other is None else other(key, ids)
        return make_batch(frame, rows, columns, {GLOBAL_STEP: self.step, **meta})

    def all_columns(self, frame: str, epoch: int) -> DataProto:
        """Every key of a frame, for the rows that are left at ``epoch``."""
        names = {key.name: key for key in self._columns if key.frame == frame}
        return self.batch(frame, names, self.rows(frame, epoch))

    def load(self, frame: str, batch: DataProto, declared: Iterable[Key], who: str) -> None:
        """Take in a batch from outside as the rows of ``frame``; columns beyond the declared ones come along."""
        rows = identity_of(batch, frame, who)
        columns = columns_of(batch)
        missing = [key.name for key in declared if key.name not in columns]
        if missing:
            raise DataflowError(
                f"{who}: the input batch of frame {frame!r} lacks the key {missing[0]!r}; it has {', '.join(columns)}"
            )
        if len(rows) == 0:
            raise DataflowError(f"{who}: the input batch of frame {frame!r} has no rows")
        self.make_frame(frame, rows, 0)
        for name, values in columns.items():
            if name not in IDENTITY:
                self.put(Key(frame, name), values, 0)
