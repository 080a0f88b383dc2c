"""The state of a run: tensors, plain values and left-over batches, independent of the number of processes.

Why not torch.distributed.checkpoint: its ``.metadata`` file is a pickle (in torch 2.6 as in 2.13), and unpickling runs
whatever code the file's author put there. Here tensors lie in safetensors files, each whole and under its own name, and
everything else is JSON, so that a checkpoint from a stranger can be resumed. Layout of the folder::

    tensors-00001.safetensors ...   at most about 2 GB each, so that writing needs host memory for one of them
    state.json                      where each tensor lies, its checksum, and the plain values
    extra.bin                       bytes of the arrays among the plain values
    protos/NAME.safetensors         left-over batches, with their checksums in protos/checksums.json
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, safe_open

from verl.checkpoint.tensors import SHARD_BYTES, check_bytes, restored, sealed, shards, unsealed, write_shard
from verl.errors import CheckpointError, DataError
from verl.protocol import DataProto
from verl.protocol.serialize import ObjectEncoder, decode_object

_FORMAT = "verl.state/1"
_INDEX, _BLOB, _PROTOS, _SUMS = "state.json", "extra.bin", "protos", "checksums.json"
_FILE = re.compile(r"tensors-\d{5}\.safetensors")


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
    for number, shard in enumerate(shards(tensors, shard_bytes), start=1):
        index |= write_shard(shard, folder / f"tensors-{number:05d}.safetensors", _FORMAT)
    (folder / _BLOB).write_bytes(encoder.blob)
    document = {"format": _FORMAT, "tensors": index, "extra": encoded, "blob": zlib.crc32(encoder.blob)}
    (folder / _INDEX).write_text(sealed(document), encoding="utf-8")


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
            check_bytes(folder / name, {key: places[key] for key in keys})
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: restored(file.get_tensor(key), places[key]) for key in keys}
        blob = (folder / _BLOB).read_bytes()
        if "blob" in document and zlib.crc32(blob) != document["blob"]:
            raise CheckpointError(
                f"the state in {folder} is damaged: the bytes of {_BLOB} are not those that were written (their "
                "checksum differs); use an older checkpoint or another copy of this one"
            )
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
        document = unsealed(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the state in {folder} is damaged: {_INDEX} is not JSON, or was changed ({error})"
        ) from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not of the format {_FORMAT}")
    return document


# ---- left-over batches -----------------------------------------------------------------------------------------------


def write_protos(folder: str | Path, protos: Mapping[str, DataProto]) -> None:
    """Write each batch under its name, which may be any short text."""
    place = Path(folder) / _PROTOS
    place.mkdir(parents=True, exist_ok=True)
    for name, proto in protos.items():
        proto.save_to_disk(place / f"{quote(name, safe=' ')}.safetensors")
    sums = {path.name: zlib.crc32(path.read_bytes()) for path in sorted(place.glob("*.safetensors"))}
    (place / _SUMS).write_text(sealed(sums), encoding="utf-8")


def read_protos(folder: str | Path) -> dict[str, DataProto]:
    """The batches by name; none where :func:`write_protos` wrote none.

    Raises:
        CheckpointError: one of them is damaged.
    """
    place = Path(folder) / _PROTOS
    files = sorted(place.glob("*.safetensors"))
    _check_sums(place, files)
    try:
        return {unquote(path.name.removesuffix(".safetensors")): DataProto.load_from_disk(path) for path in files}
    except DataError as error:
        raise CheckpointError(str(error)) from error


def _check_sums(place: Path, files: list[Path]) -> None:
    """Compare files with their checksums; folders from before there were any have none."""
    if not (place / _SUMS).is_file():
        return
    try:
        sums = unsealed((place / _SUMS).read_text(encoding="utf-8"))
        changed = [path.name for path in files if zlib.crc32(path.read_bytes()) != sums[path.name]]
        missing = sorted(set(sums) - {path.name for path in files})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the state in {place} is damaged: {_SUMS}: {error}") from None
    if changed or missing:
        raise CheckpointError(
            f"the state in {place} is damaged: {(changed or missing)[0]} "
            f"{'is not what was written (its checksum differs)' if changed else 'is missing'}"
        )
