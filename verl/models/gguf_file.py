"""GGUF files: what they say and the tensors they hold, read once. Only the formats of numbers that are decoded here."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.errors import ModelError

_SCALARS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}  # type number → struct's letter
_STRING, _ARRAY = 8, 9
_BLOCK = 32
_FORMATS = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 3: ("Q4_1", _BLOCK, 20), 8: ("Q8_0", _BLOCK, 34)}
"""Type number → name, numbers a block, bytes a block."""


@dataclass
class _Place:
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """One file.

    Attributes:
        values: what the file says about the model and its tokenizer, by GGUF's keys.
        names: of its tensors.

    Raises:
        ModelError: it is no GGUF file of version 2 or 3, or ends too early.
    """

    def __init__(self, path: Path):
        self.path = path
        self._data = np.memmap(path, np.uint8, "r")
        self._bytes = memoryview(self._data)
        self._at = 0
        try:
            self.values, self._places = self._read()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as problem:
            raise ModelError(f"{path} is no whole GGUF file ({problem!r}); get it again.") from problem
        self.names = list(self._places)

    def tensor(self, name: str) -> np.ndarray:
        """The float32 numbers of a tensor, its slowest dimension first.

        Raises:
            ModelError: its format is not decoded here, or the file ends before it does.
        """
        place = self._places[name]
        if place.kind not in _FORMATS:
            known = ", ".join(kind for kind, *_ in _FORMATS.values())
            raise ModelError(f"{self.path}: '{name}' has numbers of GGUF's type {place.kind}; {known} are read here.")
        kind, numbers, size = _FORMATS[place.kind]
        length = math.prod(place.shape) // numbers * size
        raw = self._data[place.offset : place.offset + length]
        if len(raw) < length:
            raise ModelError(f"{self.path} ends within the tensor '{name}'; get it again.")
        return _decode(kind, np.asarray(raw).reshape(-1, size)).reshape(place.shape)

    def _read(self) -> tuple[dict[str, Any], dict[str, _Place]]:
        if bytes(self._bytes[:4]) != b"GGUF":
            raise ModelError(f"{self.path} is no GGUF file.")
        self._at = 4
        version, tensors, count = self._take("I"), self._take("Q"), self._take("Q")
        if version not in (2, 3):
            raise ModelError(f"{self.path} has version {version} of GGUF; 2 and 3 are read here.")
        values = {self._string(): self._value(self._take("I")) for _ in range(count)}
        places = {}
        for _ in range(tensors):
            name = self._string()
            shape = tuple(self._take("Q") for _ in range(self._take("I")))
            places[name] = _Place(shape[::-1], self._take("I"), self._take("Q"))
        alignment = values.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        for place in places.values():
            place.offset += start
        return values, places

    def _take(self, letter: str) -> Any:
        (value,) = struct.unpack_from("<" + letter, self._bytes, self._at)
        self._at += struct.calcsize("<" + letter)
        return value

    def _string(self) -> str:
        length = self._take("Q")
        if self._at + length > len(self._bytes):
            raise struct.error("a text goes on beyond the end")
        text = bytes(self._bytes[self._at : self._at + length]).decode()
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(_SCALARS[kind])
        inner, count = self._take("I"), self._take("Q")
        if inner in _SCALARS:
            letters = f"<{count}{_SCALARS[inner]}"
            values = struct.unpack_from(letters, self._bytes, self._at)
            self._at += struct.calcsize(letters)
            return list(values)
        return [self._value(inner) for _ in range(count)]


def _decode(kind: str, blocks: np.ndarray) -> np.ndarray:
    """(blocks, bytes a block) to (blocks, numbers a block) float32."""
    if kind == "F32":
        return blocks.view(np.float32)
    if kind == "F16":
        return blocks.view(np.float16).astype(np.float32)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return blocks[:, 2:].view(np.int8) * scale
    least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)  # Q4_1: two numbers a byte, the low halves first
    halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return halves * scale + least
