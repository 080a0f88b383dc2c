"""A DataProto in one safetensors file: tensors as they are, object columns and meta as JSON. Nothing is unpickled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDict

from verl.errors import DataError
from verl.protocol.columns import object_column
from verl.protocol.convert import Parts
from verl.protocol.serialize import ObjectEncoder, decode_object

_FORMAT = "verl.DataProto/1"
_TENSOR = "batch."
_JSON, _BLOB = "objects.json", "objects.blob"


def save_parts(parts: Parts, filepath: str | Path) -> None:
    """Write a batch; the file appears whole or not at all."""
    batch, columns, meta = parts
    encoder = ObjectEncoder()
    document = {
        "batch_size": None if batch is None else list(batch.batch_size),
        "tensors": [] if batch is None else list(batch.keys()),
        "columns": {key: _encode_column(encoder, key, column) for key, column in columns.items()},
        "meta_info": encoder.encode(dict(meta), "meta_info"),
    }
    tensors = {} if batch is None else {_TENSOR + key: _own_memory(value) for key, value in batch.items()}
    tensors[_JSON] = _byte_tensor(json.dumps(document).encode())
    tensors[_BLOB] = _byte_tensor(encoder.blob)
    path = Path(filepath)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        save_file(tensors, temporary, metadata={"format": _FORMAT})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _encode_column(encoder: ObjectEncoder, key: str, column: np.ndarray) -> dict[str, Any]:
    rows = [encoder.encode(value, f"object column {key!r}, row {row},") for row, value in enumerate(column.ravel())]
    return {"shape": column.shape, "rows": rows}


def _own_memory(value: torch.Tensor) -> torch.Tensor:
    """safetensors refuses tensors that share a storage, which slices of one batch may well do."""
    value = value.detach().cpu().contiguous()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def load_parts(filepath: str | Path) -> Parts:
    """Read what :func:`save_parts` wrote. A file of another kind, or a damaged one, is a DataError."""
    path = Path(filepath)
    if not path.is_file():
        raise DataError(f"there is no file {path} to load a DataProto from")
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("format") != _FORMAT:
                raise DataError(f"{path} is a safetensors file, but not one that DataProto.save_to_disk wrote")
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except SafetensorError as error:
        raise DataError(
            f"{path} is damaged or was not written by DataProto.save_to_disk (pickled batches are not read, because "
            f"unpickling runs code): {error}"
        ) from error
    try:
        return _decoded(tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _decoded(tensors: dict[str, torch.Tensor]) -> Parts:
    blob = tensors.pop(_BLOB).numpy().tobytes()
    document = json.loads(tensors.pop(_JSON).numpy().tobytes())
    batch = None
    if document["batch_size"] is not None:
        batch = TensorDict(
            {key: tensors[_TENSOR + key] for key in document["tensors"]}, batch_size=document["batch_size"]
        )
    columns = {key: _decode_column(column, blob) for key, column in document["columns"].items()}
    return batch, columns, decode_object(document["meta_info"], blob)


def _decode_column(column: dict[str, Any], blob: bytes) -> np.ndarray:
    return object_column([decode_object(value, blob) for value in column["rows"]]).reshape(column["shape"])
