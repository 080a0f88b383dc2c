"""The state of a role in pieces: every rank writes what it holds, and any number of ranks reads it back.

Layout of the folder, for rank R of W::

    pieces-R-of-W.json                      what lies where: rows ``start`` and on of a tensor of a ``whole`` shape
    pieces-R-of-W-00001.safetensors ...     at most about 2 GB each

A run on one device writes one set, of whole tensors. Rows are along the first dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from verl.checkpoint.durable import flush_path
from verl.checkpoint.tensors import SHARD_BYTES, check_bytes, restored, sealed, shards, unsealed, write_shard
from verl.errors import CheckpointError
from verl.train_engine.saved import SavedRows, StatePiece

_FORMAT = "verl.pieces/1"
_INDEX = re.compile(r"pieces-(\d{5})-of-(\d{5})\.json")
_FILE = re.compile(r"pieces-\d{5}-of-\d{5}-\d{5}\.safetensors")


class PieceWriter:
    """Writes the pieces of one rank into ``folder``, which all ranks must see. It may be sent to other processes."""

    def __init__(self, folder: str | Path, *, shard_bytes: int = SHARD_BYTES):
        self.folder = Path(folder)
        self.shard_bytes = shard_bytes

    def __call__(self, rank: int, world_size: int, pieces: Mapping[str, StatePiece]) -> None:
        """Write all pieces of this rank, fetched one by one, and flush them to the disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f"pieces-{rank:05d}-of-{world_size:05d}"
        index: dict[str, dict[str, Any]] = {}
        tensors = {name: piece.tensor for name, piece in pieces.items()}
        written = []
        for number, shard in enumerate(shards(tensors, self.shard_bytes), start=1):
            written.append(self.folder / f"{stem}-{number:05d}.safetensors")
            index |= write_shard(shard, written[-1], _FORMAT)
        for name, piece in pieces.items():
            index[name] |= {"whole": list(piece.shape), "start": piece.start}
        written.append(self.folder / f"{stem}.json")
        written[-1].write_text(sealed({"format": _FORMAT, "tensors": index}), encoding="utf-8")
        for path in (*written, self.folder):
            flush_path(path)


class SavedPieces(SavedRows):
    """What :class:`PieceWriter` wrote, by name; a tensor's bytes are read, and checked, when it is asked for.

    A weight of which only the master was saved is also its live weight.

    Raises:
        CheckpointError: a rank's pieces are missing, or an index is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._places: dict[str, list[dict[str, Any]]] = {}
        for path in _indices(self.folder):
            try:
                document = unsealed(path.read_text(encoding="utf-8"))
                if document["format"] != _FORMAT:
                    raise ValueError(f"it is not of the format {_FORMAT}")
                for name, place in document["tensors"].items():
                    self._add(name, place)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"the state in {folder} is damaged: {path.name}: {error}") from None
        for name, places in self._places.items():
            self._check_cover(name, places)

    def __reduce__(self):
        return SavedPieces, (self.folder,)

    def _add(self, name: str, place: dict[str, Any]) -> None:
        if not _FILE.fullmatch(place["file"]):
            raise ValueError(f"it names the file {place['file']!r}")
        numbers = [place["start"], *place["shape"], *place["whole"]]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"the place of '{name}' is not made of numbers")
        self._places.setdefault(name, []).append(place)

    def _check_cover(self, name: str, places: list[dict[str, Any]]) -> None:
        places.sort(key=lambda place: (place["start"], place["shape"]))
        whole = places[0]["whole"]
        reached = 0
        for place in places:
            fits = place["whole"] == whole and place["shape"][1:] == whole[1:] and place["start"] == reached
            if not fits and place["shape"] != whole:
                raise CheckpointError(f"the state in {self.folder} is damaged: the pieces of '{name}' do not fit")
            reached += place["shape"][0] if place["shape"] else 0
        if whole and reached != whole[0]:
            raise CheckpointError(f"the state in {self.folder} is damaged: '{name}' is not all there")

    def _name(self, name: str) -> str:
        if name not in self._places and name.startswith("live/"):
            name = "master/" + name.removeprefix("live/")
        if name not in self._places:
            raise KeyError(name)
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._places[self._name(name)][0]["whole"])

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        name = self._name(name)
        parts = []
        for place in self._places[name]:
            first = place["start"]
            low, high = max(start, first), min(stop, first + place["shape"][0])
            if low < high:
                parts.append(self._read(name, place)[low - first : high - first])
        if not parts:
            place = self._places[name][0]
            return torch.empty(0, *place["whole"][1:], dtype=getattr(torch, place["dtype"]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, name: str, place: Mapping[str, Any]) -> torch.Tensor:
        try:
            check_bytes(self.folder / place["file"], {name: place})
            with safe_open(self.folder / place["file"], framework="pt") as file:
                return restored(file.get_tensor(name), place)
        except FileNotFoundError:
            raise CheckpointError(f"the state in {self.folder} is damaged: {place['file']} is missing") from None
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
            raise CheckpointError(f"the state in {self.folder} is damaged: {error}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        if shape:
            return self.rows(name, 0, shape[0])
        return self._read(self._name(name), self._places[self._name(name)][0])

    def __contains__(self, name: object) -> bool:
        try:
            self._name(str(name))
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _indices(folder: Path) -> list[Path]:
    """The index files of all ranks of the run that wrote them."""
    found = {
        (int(match[1]), int(match[2])): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _INDEX.fullmatch(path.name))
    }
    if not found:
        raise CheckpointError(f"there is no saved state in {folder}")
    worlds = sorted({world for _, world in found})
    missing = [rank for rank in range(worlds[0]) if (rank, worlds[0]) not in found]
    if len(worlds) > 1 or missing:
        raise CheckpointError(
            f"the state in {folder} is damaged: it was written by {worlds[0]} ranks, and the part of rank "
            f"{missing[0] if missing else worlds[1]} is {'missing' if missing else 'of another run'}"
        )
    return [found[rank, worlds[0]] for rank in range(worlds[0])]
