"""Tensors in safetensors files, each with a checksum in the index beside them.

A checksum is the CRC-32 of a tensor's bytes: it finds what a disk or a copy got wrong, at about 2 GB/s on one core; it
is no protection against somebody who means to deceive.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from verl.errors import CheckpointError

SHARD_BYTES = 2_000_000_000
RESERVED = "__metadata__"
CHECKSUM = "crc32"
_BUFFER = 1 << 22
# What every safetensors release stores under its own type; other types are stored as their bytes.
NATIVE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip


def checksum(tensor: torch.Tensor) -> int:
    """Of the bytes of a contiguous tensor on the CPU."""
    return zlib.crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy())) if tensor.numel() else 0


def shards(tensors: Mapping[str, torch.Tensor], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors on the host, in groups of at most ``limit`` bytes (one tensor at least).

    Raises:
        CheckpointError: a tensor is sparse or spread over processes.
    """
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


def write_shard(shard: Mapping[str, torch.Tensor], path: Path, form: str) -> dict[str, dict[str, Any]]:
    """Write one file; returns the index entries of its tensors."""
    stored = {
        key: tensor if tensor.dtype in NATIVE else tensor.reshape(-1).view(torch.uint8) for key, tensor in shard.items()
    }
    save_file(stored, path, metadata={"format": form})
    return {
        key: {
            "file": path.name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            CHECKSUM: checksum(stored[key]),
        }
        for key, tensor in shard.items()
    }


def restored(stored: torch.Tensor, place: Mapping[str, Any]) -> torch.Tensor:
    """A tensor as its index entry says that it was.

    Raises:
        ValueError: it is of another type or shape.
    """
    dtype, shape = getattr(torch, place["dtype"]), tuple(place["shape"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown tensor type {place['dtype']!r}")
    if dtype in NATIVE and (stored.dtype != dtype or tuple(stored.shape) != shape):
        raise ValueError(f"a tensor is {stored.dtype} {tuple(stored.shape)} instead of {dtype} {shape}")
    if dtype in NATIVE:
        return stored
    # bytes may lie at any address in the file, numbers may not: copy them (such types are rare and small)
    return stored.clone().view(dtype).reshape(shape) if stored.numel() else torch.empty(shape, dtype=dtype)


def check_bytes(path: Path, places: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the bytes of these tensors of one file with their checksums.

    They are read through a small buffer: a mapped tensor would stay in memory.

    Raises:
        ValueError: they are not those that were written.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, path.stat().st_size)))
        for key, place in places.items():
            if CHECKSUM not in place:  # an index from before there were checksums
                continue
            start, stop = header[key]["data_offsets"]
            file.seek(8 + length + start)
            found, left = 0, stop - start
            while left > 0 and (part := file.read(min(left, _BUFFER))):
                found = zlib.crc32(part, found)
                left -= len(part)
            if left or found != place[CHECKSUM]:
                raise ValueError(
                    f"the bytes of '{key}' in {path.name} are not those that were written (their checksum differs); "
                    "use an older checkpoint or another copy of this one"
                )


def sealed(document: Mapping[str, Any]) -> str:
    """JSON with a checksum of itself."""
    return json.dumps({**document, CHECKSUM: _seal(document)})


def unsealed(text: str) -> Any:
    """What :func:`sealed` took; documents without a checksum are taken as they are.

    Raises:
        ValueError: it is no JSON, or was changed.
    """
    document = json.loads(text)
    if isinstance(document, dict) and CHECKSUM in document:
        seal = document.pop(CHECKSUM)
        if seal != _seal(document):
            raise ValueError("its text is not what was written (its checksum differs)")
    return document


def _seal(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _check(key: str, tensor: torch.Tensor) -> None:
    if key == RESERVED:
        raise CheckpointError(f"a tensor cannot be saved under the name {RESERVED}, which safetensors keeps for itself")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise CheckpointError(
            f"the tensor '{key}' is a {type(tensor).__name__} with layout {tensor.layout}: only whole, dense tensors "
            "are saved, so gather or convert it first"
        )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous on the CPU, in a storage of its own size; without a copy where it is so already."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()
