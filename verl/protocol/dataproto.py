"""DataProto, the batch that every node of the dataflow takes and gives."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from verl.errors import DataError
from verl.protocol import convert, rows, storage
from verl.protocol.columns import (
    object_column,
    rename_keys,
    require_keys,
    row_indices,
    union_meta,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.protocol.item import DataProtoConfig, DataProtoItem
from verl.protocol.serialize import deserialize_tensordict, serialize_tensordict, tensor_bytes

_AUTO_PADDING = "_verl_auto_padding"


@dataclass(eq=False)
class DataProto:
    """Rows of tensors and objects, and values about all rows.

    ``batch``: TensorDict whose first dimension is the row, or None. ``non_tensor_batch``: object arrays with one
    element a row. ``meta_info``: anything about the whole batch; ``meta_info["metrics"]`` is a verl Metrics (or
    verl's older dicts of numbers). Methods return new batches that may share memory with this one, except those
    that say "in place" (``to``, ``pop``, ``rename``, ``union``, ``reorder``, ``padding``, as in verl); even those
    never change another DataProto made from the same columns.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    # ---- construction -------------------------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """From one dict whose values are tensors or NumPy arrays, each with the rows first."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in data.items() if not isinstance(value, torch.Tensor)}
        for key, value in others.items():
            if not isinstance(value, np.ndarray):
                raise DataError(f"column {key!r} is a {type(value).__name__}: only tensors and NumPy arrays have rows")
        return cls.from_dict(tensors, others, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """From tensors that agree in their first ``num_batch_dims`` dimensions, and sequences with one item a row."""
        if num_batch_dims < 1 or (num_batch_dims > 1 and non_tensors):
            raise DataError(f"num_batch_dims={num_batch_dims}: must be 1 with object columns, and at least 1 without")
        batch = convert.tensor_batch(tensors, num_batch_dims)
        meta = dict(meta_info or {}) | ({_AUTO_PADDING: True} if auto_padding else {})
        return cls(batch, {key: object_column(value) for key, value in (non_tensors or {}).items()}, meta)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None) -> DataProto:
        """From a TensorDict: a NonTensorStack becomes an object column, a NonTensorData an entry of meta_info."""
        batch, columns, meta = convert.parts_of_tensordict(tensor_dict)
        return cls(batch, columns, {**(meta_info or {}), **meta})

    def to_tensordict(self) -> TensorDict:
        """The inverse of :meth:`from_tensordict`."""
        return convert.as_tensordict(self)

    # ---- looking ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def has_columns(self) -> bool:
        """Whether there is any column, even one without rows."""
        return self.batch is not None or bool(self.non_tensor_batch)

    def tensor_keys(self) -> list[str]:
        """The keys of ``batch``; none when it is None."""
        return [] if self.batch is None else list(self.batch.keys())

    def check_consistency(self) -> None:
        """Raise DataError unless every column has the same number of rows and the right type."""
        convert.check_parts(self.batch, self.non_tensor_batch)

    def get_data_info(self) -> str:
        """One line a column: key, kind, shape, dtype, device."""
        return convert.describe(self)

    def print_size(self, prefix: str = "") -> None:
        """Print how many GiB the tensors take."""
        print(f"{prefix + ': ' if prefix else ''}{tensor_bytes(self.batch) / 2**30:.4f} GiB of tensors")

    # ---- rows ---------------------------------------------------------------------------------------------------

    def __getitem__(self, item: Any) -> DataProto | DataProtoItem:
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (list, np.ndarray, torch.Tensor)):
            return self.select_idxs(item)
        row = int(row_indices([item], len(self))[0])
        batch = None if self.batch is None else self.batch[row]
        return DataProtoItem(batch, {key: column[row] for key, column in self.non_tensor_batch.items()}, self.meta_info)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows ``start:end:step``, as views where the step is positive."""
        if step is not None and step < 0:
            return self.select_idxs(range(len(self))[start:end:step])
        part = slice(start, end, step)
        batch = None if self.batch is None else self.batch[part]
        columns = {key: column[part] for key, column in self.non_tensor_batch.items()}
        return type(self)(batch, columns, dict(self.meta_info))

    def select_idxs(self, idxs: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """The rows with these numbers, in this order (repeats allowed), or where a boolean mask is True. Copies."""
        index = row_indices(idxs, len(self))
        batch = None
        if self.batch is not None:
            where = torch.from_numpy(index)
            tensors = {key: value[where.to(value.device)] for key, value in self.batch.items()}
            batch = TensorDict(tensors, batch_size=[len(index), *self.batch.batch_size[1:]])
        columns = {key: column[index] for key, column in self.non_tensor_batch.items()}
        return type(self)(batch, columns, dict(self.meta_info))

    def reorder(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Put the rows into this order, in place. ``indices`` must name every row once."""
        index = row_indices(indices, len(self))
        if len(index) != len(self) or len(np.unique(index)) != len(index):
            raise DataError(f"reorder needs each of the {len(self)} rows exactly once; select_idxs picks some of them")
        moved = self.select_idxs(index)
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row ``repeat_times`` times: 0, 0, 1, 1 when interleaved, else 0, 1, 0, 1."""
        order = np.arange(len(self))
        return self.select_idxs(np.repeat(order, repeat_times) if interleave else np.tile(order, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Row i ``repeat_times[i]`` times, one after the other."""
        times = np.asarray([int(count) for count in repeat_times], dtype=np.int64)
        if len(times) != len(self) or (times < 0).any():
            raise DataError(f"sample_level_repeat needs one count >= 0 for each of the {len(self)} rows, got {times}")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """See :func:`verl.protocol.rows.unfold_column_chunks`."""
        return rows.unfold_column_chunks(self, n_split, split_keys)

    def chunk(self, chunks: int) -> list[DataProto]:
        """``chunks`` contiguous parts of equal length; of nearly equal length when padding is enabled."""
        if chunks < 1:
            raise DataError(f"a batch can be cut into 1 part or more, not into {chunks}")
        if len(self) % chunks and not self.is_padding_enabled():
            raise DataError(
                f"{len(self)} rows cannot be cut into {chunks} equal parts: pad_dataproto_to_divisor first, or make "
                "the batch with auto_padding=True to allow parts that differ by one row"
            )
        return [self.slice(start, end) for start, end in rows.chunk_bounds(len(self), chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Contiguous parts of ``split_size`` rows; the last may be shorter."""
        if split_size < 1:
            raise DataError(f"split_size must be 1 or more, not {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """All rows, in order.

        Every part must have the same keys, dtypes and trailing shapes (DataError names the key); parts without rows
        are passed over. ``meta_info``: metrics are merged, any other entry must be equal wherever it occurs.
        """
        return rows.concat(data) if data else DataProto()

    def is_padding_enabled(self) -> bool:
        return bool(self.meta_info.get(_AUTO_PADDING, False)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append ``padding_size`` copies of the first or last row, in place."""
        if padding_candidate not in ("first", "last"):
            raise DataError(f"padding_candidate is 'first' or 'last', not {padding_candidate!r}")
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self.select_idxs([*range(len(self)), *[row] * padding_size])
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    # ---- columns ------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Only these keys; None keeps all of its kind. With ``deepcopy`` nothing is shared with this batch."""
        picked = self._picked(
            self.tensor_keys() if batch_keys is None else batch_keys,
            self.non_tensor_batch if non_tensor_batch_keys is None else non_tensor_batch_keys,
            self.meta_info if meta_info_keys is None else meta_info_keys,
            keep_rows=True,
        )
        return copy.deepcopy(picked) if deepcopy else picked

    def _picked(self, tensors: Any, columns: Any, meta: Any, keep_rows: bool) -> DataProto:
        tensors = require_keys(tensors, self.tensor_keys(), "tensor")
        columns = require_keys(columns, self.non_tensor_batch, "object column")
        meta = require_keys(meta, self.meta_info, "meta_info entry")
        batch = self.batch.select(*tensors) if self.batch is not None and (tensors or keep_rows) else None
        return type(self)(
            batch, {key: self.non_tensor_batch[key] for key in columns}, {key: self.meta_info[key] for key in meta}
        )

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Take these keys out, in place, and return them as a batch of their own. None takes nothing of its kind."""
        popped = self._picked(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or (), keep_rows=False)
        if self.batch is not None:
            self.batch = self.batch.exclude(*popped.tensor_keys())
        self.non_tensor_batch = {k: v for k, v in self.non_tensor_batch.items() if k not in popped.non_tensor_batch}
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in popped.meta_info}
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Give tensors new keys, in place; returns self."""
        if self.batch is not None or old_keys:
            self.batch = rename_keys(self.batch, old_keys, new_keys)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Take in the columns and meta of ``other``, in place, row i to row i; returns self.

        Keys on both sides must be equal (NaN == NaN; ``metrics`` are merged), else DataError and nothing changes.
        """
        if self.has_columns() and other.has_columns() and len(self) != len(other):
            raise DataError(f"a union needs equal row counts: {len(self)} here, {len(other)} in the other batch")
        batch = union_tensor_dict(self.batch, other.batch)
        columns = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        united = type(self)(batch, columns, union_meta(self.meta_info, other.meta_info))
        self.batch, self.non_tensor_batch, self.meta_info = united.batch, united.non_tensor_batch, united.meta_info
        return self

    def join(self, other: DataProto, on: str = "uid") -> DataProto:
        """This batch with the columns of ``other`` added, matched by the ids in column ``on`` of both.

        Rows and their order are those of this batch. Every id of this batch must be in ``other`` exactly once; ids
        that only ``other`` has are left out. Several rows here may share a ``uid`` (samples of one prompt), but not a
        ``sample_id``. Other columns on both sides must be equal after matching. A broken rule is a DataError naming
        a few of the ids, or the column.
        """
        return self.select().union(other.select_idxs(rows.join_index(self, other, on)))

    # ---- iterating, moving, storing -----------------------------------------------------------------------------

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of ``mini_batch_size`` rows (which must divide the batch), ``epochs`` times over.

        ``dataloader_kwargs`` go to torch's DataLoader (``{"shuffle": True}``); ``seed`` fixes its order.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise DataError(f"{len(self)} rows do not divide into mini-batches of {mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader = DataLoader(
            range(len(self)), mini_batch_size, collate_fn=list, generator=generator, **(dataloader_kwargs or {})
        )
        return (self.select_idxs(index) for _ in range(epochs) for index in loader)

    def to(self, device: str | torch.device) -> DataProto:
        """Move the tensors, in place; returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        batch = None if self.batch is None else serialize_tensordict(self.batch)
        return {"batch": batch, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.batch = None if state["batch"] is None else deserialize_tensordict(state["batch"])
        self.non_tensor_batch, self.meta_info = state["non_tensor_batch"], state["meta_info"]

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write one safetensors file. Tensors of any dtype; object columns and meta_info may hold None, numbers, str,
        bytes, lists, tuples, dicts with string keys, NumPy arrays, tensors and Metrics; else DataError names the place.
        """
        storage.save_parts((self.batch, self.non_tensor_batch, self.meta_info), filepath)

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> DataProto:
        """Read what :meth:`save_to_disk` wrote; nothing is unpickled, so a file from a stranger can run no code."""
        return cls(*storage.load_parts(filepath))


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows into a batch again; the meta_info is that of the first row."""
    if not items:
        return DataProto()
    tensors = {}
    if items[0].batch is not None:
        tensors = {key: torch.stack([item.batch[key] for item in items]) for key in list(items[0].batch.keys())}
    columns = {key: [item.non_tensor_batch[key] for item in items] for key in items[0].non_tensor_batch}
    return DataProto.from_dict(tensors, columns, dict(items[0].meta_info))


BatchData = DataProto | TensorDict
