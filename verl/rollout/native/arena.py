"""GPU memory whose address stays while its physical pages come and go (CUDA virtual memory management).

Captured graphs hold addresses. With an arena the cache can give its memory to the weight update and take it back
without capturing anything again. The driver is called through ctypes, so nothing has to be compiled.
"""

from __future__ import annotations

import ctypes

import torch

from verl.errors import RolloutError

_PINNED, _DEVICE, _READ_WRITE, _MINIMUM_GRANULARITY = 1, 1, 3, 0


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Pointer:
    """Lets torch see ``size`` bytes at ``address`` as a uint8 tensor."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Arena:
    """``size`` bytes of address space on a CUDA device, with memory behind it while mapped.

    Raises:
        RolloutError: the driver refuses (its call and error number are in the message).
    """

    def __init__(self, size: int, device: torch.device):
        self._cuda = ctypes.CDLL("libcuda.so.1")
        torch.cuda.synchronize(device)  # there is a context now
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._location = _Location(_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            ctypes.c_int(_MINIMUM_GRANULARITY),
        )
        self.size = -(-size // granularity.value) * granularity.value
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(self.size),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self.address = address.value
        self._handle: ctypes.c_uint64 | None = None

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.close()

    def _call(self, name: str, *arguments) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise RolloutError(f"the CUDA driver's {name} failed with error {status}")

    @property
    def mapped(self) -> bool:
        return self._handle is not None

    def map(self) -> None:
        """Put memory behind the addresses; what it held is gone."""
        if self.mapped:
            return
        handle = ctypes.c_uint64()
        size, address = ctypes.c_size_t(self.size), ctypes.c_uint64(self.address)
        zero = ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), zero)
        self._call("cuMemMap", address, size, ctypes.c_size_t(0), handle, zero)
        access = _Access(self._location, _READ_WRITE)
        self._call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self._handle = handle

    def unmap(self) -> None:
        """Give the memory back. Nothing may touch the addresses until :meth:`map`."""
        if self._handle is None:
            return
        torch.cuda.synchronize(self.device)
        self._call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))
        self._call("cuMemRelease", self._handle)
        self._handle = None

    def tensor(self) -> torch.Tensor:
        """(size,) uint8 view of the addresses; make it while mapped."""
        return torch.as_tensor(_Pointer(self.address, self.size), device=self.device)

    def close(self) -> None:
        """Give back memory and addresses; tensors over them must not be used any more."""
        self.unmap()
        self._call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))
        self.address = 0
