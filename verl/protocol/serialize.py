"""Tensors as NumPy byte views: what DataProto's pickle is made of.

A pickled tensor drags its whole storage along, even for a slice. A NumPy array carries only its own bytes, and
pickle protocol 5 (Ray, multiprocessing with out-of-band buffers) moves those without copying.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.errors import DataError

EncodedTensor = tuple[str, tuple[int, ...], np.ndarray]
"""dtype name, shape, and the bytes (uint8, 1-D)."""


def serialize_single_tensor(tensor: torch.Tensor) -> EncodedTensor:
    """(dtype name, shape, bytes) of a dense tensor of any dtype, moved to the CPU; a view when it is there already."""
    if tensor.layout != torch.strided or tensor.is_nested:
        raise DataError(f"only dense tensors can be sent between processes, not a {tensor.layout} one: pad it first")
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return str(dense.dtype).removeprefix("torch."), tuple(dense.shape), dense.reshape(-1).view(torch.uint8).numpy()


def deserialize_single_tensor(encoded: EncodedTensor) -> torch.Tensor:
    """The tensor again, on the CPU. It shares the array's memory, unless that is read-only (then it is a copy)."""
    name, shape, data = encoded
    dtype = getattr(torch, name)
    if not data.size:
        return torch.empty(shape, dtype=dtype)
    if not data.flags.writeable:  # e.g. Ray's object store: writing to it in place would end the process
        data = data.copy()
    return torch.from_numpy(data).view(dtype).reshape(shape)


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], dict[str, EncodedTensor]]:
    """(batch size, encoded tensors by key)."""
    return tuple(batch.batch_size), {key: serialize_single_tensor(value) for key, value in batch.items()}


def deserialize_tensordict(encoded: tuple[tuple[int, ...], dict[str, EncodedTensor]]) -> TensorDict:
    """The TensorDict again, on the CPU."""
    batch_size, tensors = encoded
    return TensorDict({key: deserialize_single_tensor(value) for key, value in tensors.items()}, batch_size=batch_size)


def tensor_bytes(batch: TensorDict | None) -> int:
    """Bytes of the tensors' own elements."""
    return 0 if batch is None else sum(value.numel() * value.element_size() for value in batch.values())


class ObjectEncoder:
    """Python objects as JSON, with array contents put aside in ``blob`` (one run of bytes).

    Accepted: None, bool, int, float, str, list, tuple, dict with string keys, bytes, NumPy numbers and arrays, torch
    tensors, verl Metrics; nested as deep as JSON allows. Anything else is a DataError that names ``where``.
    """

    TAG = "$"

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def blob(self) -> bytes:
        return b"".join(self._pieces)

    def _put(self, data: bytes) -> tuple[int, int]:
        start = self._size
        self._pieces.append(data)
        self._size += len(data)
        return start, self._size

    def encode(self, value: Any, where: str) -> Any:
        from verl.metrics import Metrics

        if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
            return str(value) if isinstance(value, str) else value
        if isinstance(value, list):
            return [self.encode(item, where) for item in value]
        if isinstance(value, tuple):
            return {self.TAG: "tuple", "items": [self.encode(item, where) for item in value]}
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise DataError(f"{where} has a dict whose keys are not all strings, which cannot be saved: {value!r}")
            encoded = {key: self.encode(item, where) for key, item in value.items()}
            return {self.TAG: "dict", "items": encoded} if self.TAG in value else encoded
        if isinstance(value, bytes):
            return {self.TAG: "bytes", "at": self._put(value)}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._encode_array(value, where)
        if isinstance(value, torch.Tensor):
            name, shape, data = serialize_single_tensor(value)
            return {self.TAG: "tensor", "dtype": name, "shape": shape, "at": self._put(data.tobytes())}
        if isinstance(value, Metrics):
            items = [[name, m.total, m.weight, m.reduce] for name, m in value._items.items()]
            return {self.TAG: "metrics", "items": items}
        raise DataError(
            f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: only plain "
            "values (None, numbers, str, bytes, list, tuple, dict), NumPy arrays, tensors and Metrics can"
        )

    def _encode_array(self, value: np.ndarray | np.generic, where: str) -> Any:
        if value.dtype == object:
            items = [self.encode(item, where) for item in value.ravel().tolist()]
            return {self.TAG: "objects", "shape": value.shape, "items": items}
        if value.dtype.kind not in "biufcU":
            raise DataError(f"{where} holds an array of {value.dtype}, which cannot be saved")
        kind = "array" if isinstance(value, np.ndarray) else "number"
        place = self._put(np.ascontiguousarray(value).tobytes())
        return {self.TAG: kind, "dtype": value.dtype.str, "shape": value.shape, "at": place}


def decode_object(value: Any, blob: bytes) -> Any:
    """What :class:`ObjectEncoder` was given, rebuilt from its JSON and its blob."""
    if isinstance(value, list):
        return [decode_object(item, blob) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(ObjectEncoder.TAG)
    if tag is None:
        return {key: decode_object(item, blob) for key, item in value.items()}
    if tag == "dict":
        return {key: decode_object(item, blob) for key, item in value["items"].items()}
    if tag == "tuple":
        return tuple(decode_object(item, blob) for item in value["items"])
    if tag == "metrics":
        return _decode_metrics(value["items"])
    if tag == "objects":
        column = np.empty(len(value["items"]), dtype=object)
        for row, item in enumerate(value["items"]):
            column[row] = decode_object(item, blob)
        return column.reshape(value["shape"])
    data = blob[slice(*value["at"])]
    if tag == "bytes":
        return data
    if tag == "tensor":
        return deserialize_single_tensor((value["dtype"], tuple(value["shape"]), np.frombuffer(data, np.uint8)))
    array = np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"]).copy()
    return array[()] if tag == "number" else array


def _decode_metrics(items: list[list[Any]]) -> Any:
    from verl.metrics import Metric, Metrics

    bag = Metrics()
    bag._known.update({name: Metric(value, weight, reduce) for name, value, weight, reduce in items})
    return bag
