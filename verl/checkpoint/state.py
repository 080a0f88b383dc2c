"""The state of a run: tensors, plain values and left-over batches, independent of the number of processes.

Why not torch.distributed.checkpoint: its ``.metadata`` file is a pickle (in torch 2.6 as in 2.13), and unpickling runs
whatever code the file's author put there. Here tensors lie in safetensors files, each whole and under its own name, and
everything else is JSON, so that a checkpoint from a stranger can be resumed. Layout of the folder::

    tensors-00001.safetensors ...   at most about 2 GB each, so that writing needs host memory for one of them
    state.json                      where each tensor lies, and the plain values
    extra.bin                       bytes of the arrays among the plain values
    protos/NAME.safetensors         left-over batches
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from verl.errors import CheckpointError, DataError
from verl.protocol import DataProto
from verl.protocol.serialize import ObjectEncoder, decode_object

SHARD_BYTES = 2_000_000_000
_FORMAT = "verl.state/1"
_INDEX, _BLOB, _PROTOS = "state.json", "extra.bin", "protos"
_FILE = re.compile(r"tensors-\d{5}\.safetensors")
_RESERVED = "__metadata__"
# What every safetensors release stores under its own type; other types are stored as their bytes.
_NATIVE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip


# ---- tensors and plain values ----------------------------------------------------------------------------------------


def write_state(
    folder: str | Path,
    tensors: Mapping[str, torch.Tensor],
    extra: Mapping[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write into ``folder`` (made if need be).

    Args:
        tensors: dense tensors of any type, shape (0-d and empty too) and device. They are fetched one by one, in
            order, and at most ``shard_bytes`` of them (one tensor at least) are held on the host at a time.
        extra: None, numbers, str, bytes, lists, tuples, dicts with string keys, NumPy arrays, tensors, Metrics; nested.

    Raises:
        CheckpointError: a tensor is sparse or spread over processes, or a value in ``extra`` is of another type.
    """
    encoder = ObjectEncoder()
    try:
        encoded = {key: encoder.encode(value, f"the state '{key}'") for key, value in extra.items()}
    except DataError as error:
        raise CheckpointError(str(error)) from error
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, dict[str, Any]] = {}
    for number, shard in enumerate(_shards(tensors, shard_bytes), start=1):
        index |= _write_shard(shard, folder / f"tensors-{number:05d}.safetensors")
    (folder / _BLOB).write_bytes(encoder.blob)
    document = {"format": _FORMAT, "tensors": index, "extra": encoded}
    (folder / _INDEX).write_text(json.dumps(document), encoding="utf-8")


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors on the host, in groups of at most ``limit`` bytes."""
    shard: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    size = 0
    for key, tensor in tensors.items():
        _check(key, tensor)
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard.clear()  # and not a new dict: the caller still holds this one, and two would be in memory
            storages.clear()
            size = 0
        host = _on_host(tensor)
        if host.untyped_storage().data_ptr() in storages:  # tied weights; safetensors refuses shared memory
            host = host.clone()
        storages.add(host.untyped_storage().data_ptr())
        shard[key] = host
        size += tensor.nbytes
    if shard:
        yield shard


def _write_shard(shard: Mapping[str, torch.Tensor], path: Path) -> dict[str, dict[str, Any]]:
    """Write one file; returns the index entries of its tensors."""
    stored = {
        key: tensor if tensor.dtype in _NATIVE else tensor.reshape(-1).view(torch.uint8)
        for key, tensor in shard.items()
    }
    save_file(stored, path, metadata={"format": _FORMAT})
    return {
        key: {"file": path.name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for key, tensor in shard.items()
    }


def _check(key: str, tensor: torch.Tensor) -> None:
    if key == _RESERVED:
        raise CheckpointError(
            f"a tensor cannot be saved under the name {_RESERVED}, which safetensors keeps for itself"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise CheckpointError(
            f"the tensor '{key}' is a {type(tensor).__name__} with layout {tensor.layout}: only whole, dense tensors "
            "are saved, so gather or convert it first"
        )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous on the CPU, in a storage of its own size; without a copy where it is so already."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def read_state(folder: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What :func:`write_state` wrote. Tensors are on the CPU and mapped: their bytes are read when they are used, so
    that copying them into a model one by one needs no memory for the whole. Changing one does not change the file.

    Raises:
        CheckpointError: there is no state in ``folder``, or it is damaged.
    """
    folder = Path(folder)
    document = _read_index(folder)
    try:
        places = document["tensors"]
        by_file: dict[str, list[str]] = {}
        for key, place in places.items():
            by_file.setdefault(place["file"], []).append(key)
        tensors: dict[str, torch.Tensor] = {}
        for name, keys in by_file.items():
            if not _FILE.fullmatch(name):
                raise CheckpointError(f"the state in {folder} is damaged: {_INDEX} names the file {name!r}")
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: _restored(file.get_tensor(key), places[key]) for key in keys}
        blob = (folder / _BLOB).read_bytes()
        extra = {key: decode_object(value, blob) for key, value in document["extra"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"the state in {folder} is damaged: {error.filename or error} is missing") from None
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the state in {folder} is damaged: {error}") from error
    return {key: tensors[key] for key in places}, extra


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    if not path.is_file():
        raise CheckpointError(f"there is no saved state in {folder} (it has no {_INDEX})")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the state in {folder} is damaged: {_INDEX} is not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not of the format {_FORMAT}")
    return document


def _restored(stored: torch.Tensor, place: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = getattr(torch, place["dtype"]), tuple(place["shape"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown tensor type {place['dtype']!r}")
    if dtype in _NATIVE:
        if stored.dtype != dtype or tuple(stored.shape) != shape:
            raise ValueError(f"a tensor is {stored.dtype} {tuple(stored.shape)} instead of {dtype} {shape}")
        return stored
    # bytes may lie at any address in the file, numbers may not: copy them (such types are rare and small)
    return stored.clone().view(dtype).reshape(shape) if stored.numel() else torch.empty(shape, dtype=dtype)


# ---- left-over batches -----------------------------------------------------------------------------------------------


def write_protos(folder: str | Path, protos: Mapping[str, DataProto]) -> None:
    """Write each batch under its name, which may be any short text."""
    place = Path(folder) / _PROTOS
    place.mkdir(parents=True, exist_ok=True)
    for name, proto in protos.items():
        proto.save_to_disk(place / f"{quote(name, safe=' ')}.safetensors")


def read_protos(folder: str | Path) -> dict[str, DataProto]:
    """The batches by name; none where :func:`write_protos` wrote none.

    Raises:
        CheckpointError: one of them is damaged.
    """
    try:
        return {
            unquote(path.name.removesuffix(".safetensors")): DataProto.load_from_disk(path)
            for path in sorted((Path(folder) / _PROTOS).glob("*.safetensors"))
        }
    except DataError as error:
        raise CheckpointError(str(error)) from error
