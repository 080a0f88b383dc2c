"""Resuming is equal bit for bit for the same versions, device and number of threads: name what differs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from verl import hardware
from verl._version import __version__

_LABELS = {
    "threads": "CPU threads of torch",
    "cpu_kernels": "CPU kernels of torch",
    "device": "device",
    "cuda": "CUDA",
}


def runtime_facts(device: str | None = None) -> dict[str, Any]:
    """What decides the last bits of a run, as plain values.

    Args:
        device: the kind of device that the run uses ("cuda", "cpu", "mps"); None is the best there is.
    """
    return {
        "verl": __version__,
        "torch": str(torch.__version__),
        "transformers": importlib.metadata.version("transformers"),
        "numpy": numpy.__version__,
        "threads": torch.get_num_threads(),
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "device": hardware.probe(device).name,
    }


def environment_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One phrase for each fact that differs, such as ``torch 2.12.0 -> 2.13.0``; empty when resuming is exact."""
    names = [*saved, *(name for name in now if name not in saved)]
    return [
        f"{_LABELS.get(name, name)} {_shown(saved.get(name))} -> {_shown(now.get(name))}"
        for name in names
        if saved.get(name) != now.get(name)
    ]


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
