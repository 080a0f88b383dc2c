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
    """Address space of ``planes`` stretches of ``size`` bytes on a CUDA device, with memory behind the first part of
    each stretch, which can grow.

    A cache has one plane for the keys and one for the values of each layer: pages are added to all of them alike.

    Attributes:
        pitch: bytes from one plane to the next.
        mapped: bytes of each plane that have memory behind them.

    Raises:
        RolloutError: the driver refuses (its call and error number are in the message).
    """

    def __init__(self, planes: int, size: int, device: torch.device):
        self.device = device
        self._cuda, index = self._open(device)
        self._location = _Location(_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            ctypes.c_int(_MINIMUM_GRANULARITY),
        )
        self.granularity = granularity.value
        self.planes, self.pitch, self.mapped = planes, self._rounded(size), 0
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
        self._pieces: list[tuple[int, int, ctypes.c_uint64]] = []  # address, bytes and handle of what is mapped

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.close()

    @staticmethod
    def _open(device: torch.device):
        """The driver, and the number of the device."""
        torch.cuda.synchronize(device)  # there is a context now
        return ctypes.CDLL("libcuda.so.1"), torch.cuda.current_device() if device.index is None else device.index

    def _wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def _call(self, name: str, *arguments) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise RolloutError(f"the CUDA driver's {name} failed with error {status}")

    def _rounded(self, size: int) -> int:
        return -(-size // self.granularity) * self.granularity

    @property
    def size(self) -> int:
        """Bytes of address space."""
        return self.planes * self.pitch

    def map(self, size: int) -> None:
        """Put memory behind at least the first ``size`` bytes of every plane. What was mapped keeps its content; what
        is new holds anything.

        Raises:
            RolloutError: there is not so much memory; then nothing has changed.
        """
        target = min(self._rounded(size), self.pitch)
        if target <= self.mapped:
            return
        before = len(self._pieces)
        try:
            for plane in range(self.planes):
                self._map_piece(self.address + plane * self.pitch + self.mapped, target - self.mapped)
        except RolloutError:
            self._unmap_pieces(before)
            raise
        self.mapped = target

    def _map_piece(self, address: int, size: int) -> None:
        handle, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        start, length = ctypes.c_uint64(address), ctypes.c_size_t(size)
        self._call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(self._properties), zero)
        try:
            self._call("cuMemMap", start, length, ctypes.c_size_t(0), handle, zero)
        except RolloutError:
            self._call("cuMemRelease", handle)
            raise
        self._pieces.append((address, size, handle))
        access = _Access(self._location, _READ_WRITE)
        self._call("cuMemSetAccess", start, length, ctypes.byref(access), ctypes.c_size_t(1))

    def _unmap_pieces(self, keep: int) -> None:
        while len(self._pieces) > keep:
            address, size, handle = self._pieces.pop()
            self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
            self._call("cuMemRelease", handle)

    def unmap(self) -> None:
        """Give the memory back. Nothing may touch the addresses until :meth:`map`."""
        if self.mapped:
            self._wait()
            self._unmap_pieces(0)
            self.mapped = 0

    def tensor(self) -> torch.Tensor:
        """(size,) uint8 view of all addresses, also of those without memory; make it while something is mapped."""
        return torch.as_tensor(_Pointer(self.address, self.size), device=self.device)

    def close(self) -> None:
        """Give back memory and addresses; tensors over them must not be used any more."""
        self.unmap()
        self._call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))
        self.address = 0
