"""Does this torch build fit this GPU and its driver? If not, which wheel does. Used by ``verl doctor``."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute numbers of the CUDA driver API


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch was built for.

    Attributes:
        version: ``torch.__version__``.
        cuda: version of its CUDA runtime ("12.6"); None for a build without CUDA.
        architectures: ``torch.cuda.get_arch_list()``: "sm_80" (machine code), "compute_90" (PTX, for that and newer).
    """

    version: str
    cuda: str | None
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: the newest CUDA version it serves, and its GPUs as (name, compute capability)."""

    cuda: tuple[int, int]
    gpus: tuple[tuple[str, tuple[int, int]], ...]


def torch_build() -> TorchBuild:
    """The installed torch. Imports torch; the list is there even if the driver is too old for it."""
    import torch

    architectures = tuple((torch._C._cuda_getArchFlags() or "").split()) if torch.version.cuda else ()
    return TorchBuild(torch.__version__, torch.version.cuda, architectures)


def nvidia_driver() -> Driver | None:
    """Ask the driver itself, so that a torch build that does not fit cannot hide a GPU. None: no driver, or no GPU."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            cuda = ctypes.CDLL(library)
            break
        except OSError:
            continue
    else:
        return None
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version)) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return None
    gpus = tuple(_gpu(cuda, index) for index in range(count.value))
    return Driver((version.value // 1000, version.value % 1000 // 10), gpus) if gpus else None


def _gpu(cuda: ctypes.CDLL, index: int) -> tuple[str, tuple[int, int]]:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    return name.value.decode(errors="replace"), (major.value, minor.value)


def has_kernels(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Can code for these architectures run on a chip?

    Machine code ``sm_XY`` runs on the same major version with an equal or higher minor one (``sm_90a``: on exactly
    that chip); PTX ``compute_XY`` is compiled for every chip that is as new or newer.
    """
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
        if match is None:
            continue
        kind, major, minor, suffix = match[1], int(match[2]), int(match[3]), match[4]
        if suffix == "a":
            fits = (major, minor) == capability
        elif kind == "compute" and not suffix:
            fits = (major, minor) <= capability
        else:
            fits = major == capability[0] and minor <= capability[1]
        if fits:
            return True
    return False


def right_wheel(capability: tuple[int, int], driver_cuda: tuple[int, int]) -> str | None:
    """What to install so that torch fits chip and driver; None if there is no such torch.

    Pascal and Maxwell (capability 5.0 to 6.2) were last served by torch 2.6 for CUDA 11.8. A build for CUDA N.x runs on
    every driver that serves CUDA N.0 or newer.
    """
    if capability < (5, 0) or driver_cuda < (11, 0):
        return None
    if capability < (7, 0) or driver_cuda < (12, 0):
        return _wheel("torch==2.6.0", "cu118") if capability < (10, 0) else None
    if capability < (7, 5):
        return _wheel("torch", "cu126")
    if driver_cuda < (13, 0):
        return _wheel("torch", "cu128" if capability >= (10, 0) else "cu126")
    return _wheel("torch", "cu130")


def _wheel(requirement: str, build: str) -> str:
    return f"install {requirement} from PyTorch's wheel index {build} (pip's --index-url)"


def build_problems(build: TorchBuild, driver: Driver | None) -> list[str]:
    """One sentence, with its remedy, for each way in which the torch build does not fit the GPUs of this machine."""
    if driver is None:
        return []
    problems = []
    for name, capability in dict.fromkeys(driver.gpus):
        chip = f"the GPU '{name}' (compute capability {capability[0]}.{capability[1]})"
        wheel = right_wheel(capability, driver.cuda)
        remedy = wheel or "no torch >= 2.6 serves it with this driver: update the driver or use the CPU"
        if build.cuda is None:
            problems.append(f"torch {build.version} is a build without CUDA, so {chip} lies idle: {remedy}")
        elif int(build.cuda.split(".")[0]) > driver.cuda[0]:
            served = f"{driver.cuda[0]}.{driver.cuda[1]}"
            problems.append(
                f"torch {build.version} is built for CUDA {build.cuda}, newer than the driver of {chip}, "
                f"which serves CUDA {served}: update the driver, or {remedy}"
            )
        elif not has_kernels(build.architectures, capability):
            has = ", ".join(build.architectures) or "nothing"
            problems.append(f"torch {build.version} has no kernels for {chip}, only for {has}: {remedy}")
    return problems
