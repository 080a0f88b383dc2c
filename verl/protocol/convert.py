"""Making the parts of a DataProto, checking them, showing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.errors import DataError
from verl.protocol.columns import few, object_column

if TYPE_CHECKING:
    from verl.protocol.dataproto import DataProto


Parts = tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]
"""batch, non_tensor_batch, meta_info."""


def tensor_batch(tensors: Mapping[str, torch.Tensor] | None, num_batch_dims: int) -> TensorDict | None:
    """The tensors as one TensorDict, after checking that they agree in their first ``num_batch_dims`` dimensions."""
    if not tensors:
        return None
    sizes = {key: tuple(value.shape[:num_batch_dims]) for key, value in tensors.items()}
    if len(set(sizes.values())) > 1 or any(len(size) < num_batch_dims for size in sizes.values()):
        raise DataError(f"the tensors differ in their first {num_batch_dims} dimension(s): {sizes}")
    return TensorDict(dict(tensors), batch_size=next(iter(sizes.values())))


def check_parts(batch: TensorDict | None, columns: Mapping[str, np.ndarray]) -> None:
    """Raise DataError unless every column has the same number of rows and the right type."""
    if batch is not None and not (isinstance(batch, TensorDict) and batch.batch_dims):
        raise DataError("DataProto.batch must be a TensorDict with rows, or None; DataProto.from_dict makes one")
    rows = None if batch is None else batch.batch_size[0]
    for key, column in columns.items():
        if not isinstance(column, np.ndarray) or column.ndim == 0:
            raise DataError(f"object column {key!r} is a {type(column).__name__}, not a NumPy array with rows")
        rows = len(column) if rows is None else rows
        if len(column) != rows:
            raise DataError(f"object column {key!r} has {len(column)} rows where the batch has {rows}")
    both = set() if batch is None else set(batch.keys()) & set(columns)
    if both:
        raise DataError(f"{few(sorted(both))} is a tensor and an object column at once: rename one")


def parts_of_tensordict(source: TensorDict) -> Parts:
    """(tensors, object columns, meta): a NonTensorStack is a column, a NonTensorData a value about all rows."""
    tensors, columns, meta = {}, {}, {}
    for key, value in ((key, source.get(key)) for key in list(source.keys())):
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, NonTensorStack):
            columns[key] = object_column([item.data for item in value.unbind(0)])
        elif isinstance(value, NonTensorData):
            meta[key] = value.data
        else:
            raise DataError(f"entry {key!r} is a nested {type(value).__name__}; DataProto has one level of keys")
    return (TensorDict(tensors, batch_size=source.batch_size) if tensors else None), columns, meta


def as_tensordict(data: DataProto) -> TensorDict:
    """The inverse of :func:`parts_of_tensordict`."""
    batch = TensorDict({}, batch_size=[len(data)]) if data.batch is None else data.batch.copy()
    for key, column in data.non_tensor_batch.items():
        batch.set(key, NonTensorStack(*[NonTensorData(value) for value in column]))
    for key, value in data.meta_info.items():
        batch.set(key, NonTensorData(value, batch_size=batch.batch_size))
    return batch


def describe(data: DataProto) -> str:
    """One line a column: key, kind, shape, dtype, device."""
    lines = [f"DataProto of {len(data)} rows"]
    for key in data.tensor_keys():
        value = data.batch[key]
        lines.append(f"  batch.{key}: {value.dtype} {tuple(value.shape)} on {value.device}")
    for key, column in data.non_tensor_batch.items():
        kinds = sorted({type(value).__name__ for value in column.ravel()})
        lines.append(f"  non_tensor_batch.{key}: {column.shape} of {', '.join(kinds) or 'nothing'}")
    return "\n".join(lines + [f"  meta_info.{key}: {type(value).__name__}" for key, value in data.meta_info.items()])
