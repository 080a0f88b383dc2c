"""Row algebra of DataProto: concatenate, cut, pad, fold, join. Functions here never change their arguments."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.errors import DataError
from verl.protocol.columns import concat_meta, few, object_column, require_keys

if TYPE_CHECKING:
    from verl.protocol.dataproto import DataProto

PAD_ID_PREFIX = "__pad__/"
"""The ids of rows that exist only to fill a shard begin with this."""

_ID_COLUMNS = ("uid", "sample_id")


def concat(parts: Sequence[DataProto]) -> DataProto:
    """Rows of all parts, in order. See :meth:`DataProto.concat` for the rules."""
    meta = concat_meta([part.meta_info for part in parts])
    # A part without rows may come from a rank that had nothing to do and so could not know the columns.
    filled = [part for part in parts if len(part)] or [part for part in parts if part.has_columns()][:1] or parts[:1]
    first = filled[0]
    if len(filled) == 1:
        return type(first)(first.batch, dict(first.non_tensor_batch), meta)
    _require_same_keys(filled)
    batch = None
    if first.batch is not None:
        tensors = {key: _concat_tensor(key, [part.batch[key] for part in filled]) for key in first.tensor_keys()}
        rows = sum(len(part) for part in filled)
        batch = TensorDict(tensors, batch_size=[rows, *first.batch.batch_size[1:]])
    columns = {key: np.concatenate([part.non_tensor_batch[key] for part in filled]) for key in first.non_tensor_batch}
    return type(first)(batch, columns, meta)


def _require_same_keys(parts: Sequence[DataProto]) -> None:
    for name, keys_of in (("tensors", lambda p: set(p.tensor_keys())), ("columns", lambda p: set(p.non_tensor_batch))):
        first = keys_of(parts[0])
        for number, part in enumerate(parts):
            if keys_of(part) != first:
                raise DataError(
                    f"part {number} of the concatenation has other {name} than part 0: "
                    f"{few(sorted(keys_of(part) ^ first))} is on one side only"
                )


def _concat_tensor(key: str, values: list[torch.Tensor]) -> torch.Tensor:
    for number, value in enumerate(values):
        if value.shape[1:] != values[0].shape[1:] or value.dtype != values[0].dtype:
            raise DataError(
                f"tensor {key!r} cannot be concatenated: part 0 is {values[0].dtype} {tuple(values[0].shape)}, "
                f"part {number} is {value.dtype} {tuple(value.shape)}; pad with pad_to_common_width first"
            )
    return torch.cat(values)


def pad_to_common_width(
    protos: Sequence[DataProto], pad_values: Mapping[str, float], left: Collection[str] = frozenset()
) -> list[DataProto]:
    """The same batches with the tensors named in ``pad_values`` padded in dimension 1 to the widest among them.

    ``pad_values`` gives the fill value of each key (keys that a batch lacks are passed over); keys in ``left`` are
    padded on the left. ``input_ids`` and its like, made of a left-padded and a right-padded half, can be padded on
    one side only: bring the other half to one width first.
    """
    widths: dict[str, int] = {}
    for proto in protos:
        for key in proto.tensor_keys():
            if key in pad_values:
                widths[key] = max(widths.get(key, 0), proto.batch[key].shape[1])
    padded = []
    for proto in protos:
        wider = {}
        for key in proto.tensor_keys():
            value = proto.batch[key]
            missing = widths[key] - value.shape[1] if key in widths else 0
            if missing:
                fill = value.new_full((value.shape[0], missing, *value.shape[2:]), pad_values[key])
                value = torch.cat([fill, value] if key in left else [value, fill], dim=1)
            wider[key] = value
        batch = None if proto.batch is None else TensorDict(wider, batch_size=proto.batch.batch_size)
        padded.append(type(proto)(batch, dict(proto.non_tensor_batch), dict(proto.meta_info)))
    return padded


def chunk_bounds(rows: int, chunks: int) -> list[tuple[int, int]]:
    """``chunks`` contiguous ranges that cover ``rows`` and differ by at most one row, the longer ones first."""
    size, longer = divmod(rows, chunks)
    starts = [size * number + min(number, longer) for number in range(chunks + 1)]
    return list(itertools.pairwise(starts))


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows 0, 1, ... at the end until the row count divides by ``size_divisor``.

    Returns the padded batch and the number of rows added, which :func:`unpad_dataproto` takes away again. A batch
    without rows is left as it is (0 divides by everything). The added rows are plain copies: call
    :func:`mark_padding_rows` before anything is computed over them.
    """
    if size_divisor < 1:
        raise DataError(f"rows can be padded to a multiple of a positive number, not of {size_divisor}")
    rows = len(data)
    pad_size = -rows % size_divisor
    if not pad_size:
        return data, 0
    return data.select_idxs(np.arange(rows + pad_size) % rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Take away the last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise DataError(f"{pad_size} padding rows cannot be taken from a batch of {len(data)} rows")
    return data.slice(0, len(data) - pad_size) if pad_size else data


def mark_padding_rows(data: DataProto, pad_size: int) -> DataProto:
    """The batch with its last ``pad_size`` rows made to count for nothing.

    ``response_mask`` becomes 0 and ``score_valid`` False there, so that no token, sequence or group counts them;
    ``uid`` and ``sample_id`` become ids of their own beginning with ``PAD_ID_PREFIX``, so that they join no group.
    """
    if not pad_size:
        return data
    start = len(data) - pad_size
    batch = None if data.batch is None else data.batch.copy()
    for key in ("response_mask", "score_valid"):
        if key in data.tensor_keys():
            batch[key] = data.batch[key].clone()
            batch[key][start:] = 0
    columns = dict(data.non_tensor_batch)
    for key in _ID_COLUMNS:
        if key in columns:
            columns[key] = columns[key].astype(object)  # a copy, and wide enough for any id
            columns[key][start:] = [f"{PAD_ID_PREFIX}{number}" for number in range(pad_size)]
    return type(data)(batch, columns, dict(data.meta_info))


def padding_rows(data: DataProto) -> np.ndarray:
    """Which rows were marked by :func:`mark_padding_rows`: (rows,) bool, from ``uid`` or else ``sample_id``."""
    for key in _ID_COLUMNS:
        if key in data.non_tensor_batch:
            return np.array([str(i).startswith(PAD_ID_PREFIX) for i in data.non_tensor_batch[key]], dtype=bool)
    return np.zeros(len(data), dtype=bool)


def join_index(data: DataProto, other: DataProto, on: str) -> np.ndarray:
    """For every row of ``data`` the row of ``other`` with the same id in column ``on``: (rows,) int64."""
    for side, proto in (("left", data), ("right", other)):
        require_keys([on], proto.non_tensor_batch, f"object column ({side} side of the join)")
    wanted, offered = data.non_tensor_batch[on].tolist(), other.non_tensor_batch[on].tolist()
    checked = [("right", offered)] + ([("left", wanted)] if on == "sample_id" else [])
    for side, ids in checked:
        double = [value for value, count in Counter(ids).items() if count > 1]
        if double:
            raise DataError(f"{on} {few(double)} is more than once on the {side} side of the join: ids must be unique")
    position = {value: row for row, value in enumerate(offered)}
    missing = list(dict.fromkeys(value for value in wanted if value not in position))
    if missing:
        raise DataError(
            f"{on} {few(missing)} has no row on the right side of the join ({len(missing)} of {len(set(wanted))} "
            "ids are missing there)"
        )
    return np.array([position[value] for value in wanted], dtype=np.int64)


def unfold_column_chunks(data: DataProto, n_split: int, split_keys: Collection[str] | None = None) -> DataProto:
    """Cut the columns in ``split_keys`` into ``n_split`` along dimension 1 and stack the pieces as rows.

    (B, n_split * m, ...) becomes (B * n_split, m, ...), the pieces of a row one after the other; every other column
    is repeated to match.
    """
    split_keys = set(split_keys or ())
    require_keys(split_keys, [*data.tensor_keys(), *data.non_tensor_batch], "column")
    repeated = data.repeat(n_split, interleave=True)
    for key in split_keys:
        if key in data.tensor_keys():
            value = data.batch[key]
            _require_divisible(key, value.shape[1], n_split)
            repeated.batch[key] = value.reshape(value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])
        else:
            pieces: list[Any] = []
            for row in data.non_tensor_batch[key]:
                _require_divisible(key, len(row), n_split)
                width = len(row) // n_split
                pieces += [row[part * width : (part + 1) * width] for part in range(n_split)]
            repeated.non_tensor_batch[key] = object_column(pieces)
    return repeated


def _require_divisible(key: str, width: int, n_split: int) -> None:
    if width % n_split:
        raise DataError(f"column {key!r} is {width} wide, which does not divide into {n_split} equal pieces")


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Fold rows: every column (B, ...) becomes (new_batch_size, B / new_batch_size, ...)."""
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise DataError(f"{rows} rows cannot be folded into {new_batch_size} equal groups")
    inner = rows // new_batch_size
    batch = None
    if data.batch is not None:
        tensors = {key: value.reshape(new_batch_size, inner, *value.shape[1:]) for key, value in data.batch.items()}
        batch = TensorDict(tensors, batch_size=[new_batch_size])
    columns = {k: v.reshape(new_batch_size, inner, *v.shape[1:]) for k, v in data.non_tensor_batch.items()}
    return type(data)(batch, columns, dict(data.meta_info))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Undo :func:`fold_batch_dim`: the first ``batch_dims`` dimensions of every column become one."""
    batch = None
    if data.batch is not None:
        tensors = {key: value.flatten(0, batch_dims - 1) for key, value in data.batch.items()}
        rows = int(np.prod(next(iter(data.batch.values())).shape[:batch_dims])) if tensors else 0
        batch = TensorDict(tensors, batch_size=[rows])
    columns = {
        key: value.reshape(int(np.prod(value.shape[:batch_dims])), *value.shape[batch_dims:])
        for key, value in data.non_tensor_batch.items()
    }
    return type(data)(batch, columns, dict(data.meta_info))
