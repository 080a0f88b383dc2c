"""Columns of a batch: making object columns, comparing values, and merging two sets of columns.

A column is either a tensor (rows in the first dimension) or a NumPy array of Python objects.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.errors import DataError
from verl.metrics import Metrics

METRICS_KEY = "metrics"
_SHOWN = 5


def few(values: Iterable[Any]) -> str:
    """The first few values for an error message: ``'a', 'b' and 7 more``."""
    values = list(values)
    shown = ", ".join(repr(value) for value in values[:_SHOWN])
    return shown if len(values) <= _SHOWN else f"{shown} and {len(values) - _SHOWN} more"


def object_column(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """A 1-D object array with one element per row.

    ``numpy.array(list_of_equal_lists, dtype=object)`` would make a 2-D array; here every row keeps its own object.
    """
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values if values.dtype == object else values.astype(object)
    if isinstance(values, (str, bytes)):
        raise DataError(f"an object column needs one value a row; {values!r:.40} is a single {type(values).__name__}")
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def same_value(left: Any, right: Any) -> bool:
    """Deep equality of two cells in which NaN equals NaN, and arrays and tensors are compared as a whole."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and same_tensor(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and same_array(left, right)
    if isinstance(left, Metrics) or isinstance(right, Metrics):
        return isinstance(left, Metrics) and isinstance(right, Metrics) and vars(left) == vars(right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_value(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, (float, np.floating)) and isinstance(right, (float, np.floating)) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def same_array(left: np.ndarray, right: np.ndarray) -> bool:
    """Equality of two arrays of one shape, NaN equal to NaN, objects compared deeply."""
    if left.shape != right.shape:
        return False
    if left.dtype == object or right.dtype == object:
        return all(map(same_value, left.ravel().tolist(), right.ravel().tolist()))
    equal = left == right
    if left.dtype.kind in "fc" and right.dtype.kind in "fc":
        equal = equal | (np.isnan(left) & np.isnan(right))
    return bool(np.all(equal))


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality of shape, dtype and values of two tensors, NaN equal to NaN, on whatever devices."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    right = right.to(left.device)
    equal = left == right
    if left.is_floating_point() or left.is_complex():
        equal = equal | (left.isnan() & right.isnan())
    return bool(equal.all())


def union_tensor_dict(left: TensorDict | None, right: TensorDict | None) -> TensorDict | None:
    """All tensors of both. A key of both sides must hold equal tensors (NaN == NaN), else DataError names it."""
    if left is None or right is None:
        return right if left is None else left
    if left.batch_size != right.batch_size:
        raise DataError(
            f"batches of different size cannot be united: {tuple(left.batch_size)} and {tuple(right.batch_size)} rows"
        )
    merged = dict(left.items())
    for key, value in right.items():
        if key in merged and not same_tensor(merged[key], value):
            raise DataError(_union_conflict("tensor", key))
        merged.setdefault(key, value)
    return TensorDict(merged, batch_size=left.batch_size)


def rename_keys(batch: TensorDict | None, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> TensorDict:
    """The same tensors under new keys, in the same order."""
    old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
    new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
    tensors = {} if batch is None else dict(batch.items())
    require_keys(old, tensors, "tensor")
    names = dict(zip(old, new, strict=False))
    renamed = {names.get(key, key): value for key, value in tensors.items()}
    if len(old) != len(new) or len(renamed) != len(tensors):
        raise DataError(f"cannot rename {few(old)} to {few(new)}: need one new key each, none of them in use")
    return TensorDict(renamed, batch_size=batch.batch_size)


def union_numpy_dict(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All object columns of both. A key of both sides must hold equal values (NaN == NaN), else DataError names it."""
    merged = dict(left)
    for key, value in right.items():
        if key in left and not same_array(left[key], value):
            raise DataError(_union_conflict("object column", key))
        merged.setdefault(key, value)
    return merged


def union_meta(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """All meta entries of both; ``metrics`` are merged when both are Metrics, anything else must be equal."""
    merged = dict(left)
    for key, value in right.items():
        if key == METRICS_KEY and isinstance(value, Metrics) and isinstance(left.get(key), Metrics):
            merged[key] = Metrics.merged([left[key], value])
        elif key in left and not same_value(left[key], value):
            raise DataError(_union_conflict("meta_info entry", key))
        else:
            merged.setdefault(key, value)
    return merged


def _union_conflict(kind: str, key: str) -> str:
    return f"the {kind} {key!r} is on both sides with different values: rename or drop one of them before the union"


def concat_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The meta of a concatenation: equal entries once, ``metrics`` merged, anything else is an error.

    Metrics objects are merged by their reducers. Dicts (or lists of dicts) of numbers become one dict of lists,
    in the order of the parts.
    """
    merged: dict[str, Any] = {}
    metrics = []
    for meta in metas:
        for key, value in meta.items():
            if key == METRICS_KEY:
                metrics.append(value)
            elif key in merged and not same_value(merged[key], value):
                raise DataError(
                    f"meta_info[{key!r}] differs between the parts to concatenate ({merged[key]!r} and {value!r}): "
                    "make it equal, or move it into a column"
                )
            else:
                merged.setdefault(key, value)
    metrics = [bag for bag in metrics if bag is not None]
    if metrics:
        merged[METRICS_KEY] = _merge_metrics(metrics)
    return merged


def _merge_metrics(parts: list[Any]) -> Metrics | dict[str, list[Any]]:
    if all(isinstance(part, Metrics) for part in parts):
        return Metrics.merged(parts)
    if any(isinstance(part, Metrics) for part in parts):
        raise DataError("meta_info['metrics'] is a Metrics in some parts and plain numbers in others: use one form")
    merged: dict[str, list[Any]] = {}
    for part in parts:
        for bag in part if isinstance(part, (list, tuple)) else [part]:
            if not isinstance(bag, Mapping):
                raise DataError(f"meta_info['metrics'] must be a Metrics, a dict or a list of dicts, not {bag!r}")
            for name, value in bag.items():
                merged.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return merged


def require_keys(wanted: Iterable[Any], present: Iterable[Any], kind: str) -> list[Any]:
    """``wanted`` as a list, or DataError naming those that are absent and the nearest that are there."""
    wanted, present = list(wanted), list(present)
    missing = [key for key in wanted if key not in present]
    if missing:
        near = difflib.get_close_matches(str(missing[0]), [str(key) for key in present], n=3) or sorted(
            map(str, present)
        )
        raise DataError(f"no {kind} {few(missing)} in this batch: it has {few(near)}" + ("" if near else "none"))
    return wanted


def row_indices(index: Any, rows: int) -> np.ndarray:
    """Row numbers (int64) from a list, array or tensor of row numbers, or from a boolean mask of all rows.

    Negative numbers count from the end; a number outside the batch is a DataError.
    """
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    index = np.asarray(index)
    if index.ndim != 1:
        raise DataError(f"rows are chosen with a one-dimensional index, not with one of shape {index.shape}")
    if index.dtype == bool:
        if len(index) != rows:
            raise DataError(f"a boolean row mask must have one element per row: it has {len(index)}, the batch {rows}")
        return np.flatnonzero(index)
    if index.size == 0:
        return np.zeros(0, dtype=np.int64)
    if index.dtype.kind not in "iu":
        raise DataError(f"rows are chosen by whole numbers or a boolean mask, not by {index.dtype}")
    index = index.astype(np.int64)
    outside = index[(index < -rows) | (index >= rows)]
    if outside.size:
        raise DataError(f"row {few(outside.tolist())} is outside the batch, which has {rows} rows")
    return np.where(index < 0, index + rows, index)
