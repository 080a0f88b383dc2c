"""What travels between controller and ranks: pickles whose large arrays lie beside them, so that Ray copies nothing.

A torch tensor inside a Ray message is pickled byte by byte. As a NumPy view it goes into the object store as it is
and is mapped, not copied, by whoever reads it.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from verl.protocol.serialize import deserialize_single_tensor, serialize_single_tensor

IN_BAND_BYTES = 4096
"""Smaller arrays stay inside the pickle: a buffer of their own would cost more."""


class Packed(NamedTuple):
    """A pickle and the memory of its large arrays."""

    head: bytes
    buffers: list[np.ndarray]


class _Pickler(cloudpickle.Pickler):
    """Sends any tensor, however deep, as the NumPy view that DataProto uses; a tensor arrives on the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _tensor, serialize_single_tensor(obj)
        return super().reducer_override(obj)


def _tensor(*encoded: Any) -> torch.Tensor:
    return deserialize_single_tensor(encoded)


def pack(value: Any) -> Packed:
    """Make ``value`` ready for Ray. Classes and functions of ``__main__`` travel with it."""
    buffers: list[np.ndarray] = []

    def put_beside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < IN_BAND_BYTES:
            return True
        buffers.append(np.frombuffer(raw, dtype=np.uint8))
        return False

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=put_beside).dump(value)
    return Packed(file.getvalue(), buffers)


def unpack(packed: Packed) -> Any:
    """The value again. Its NumPy arrays may be read-only; tensors are not."""
    return pickle.loads(packed.head, buffers=packed.buffers)
