"""The states of all random number generators, as tensors and plain values (nothing pickled)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from verl.notices import notice

_CPU, _CUDA = "torch_cpu", "torch_cuda_{}"


def capture() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The states of torch (uint8 tensors: CPU, and each CUDA device if this process uses CUDA) and of Python's
    ``random`` and NumPy's global generator (plain values and arrays)."""
    tensors = {_CPU: torch.get_rng_state()}
    if torch.cuda.is_initialized():  # asking a process that does not use the GPUs would occupy them
        tensors |= {_CUDA.format(i): state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    version, words, gauss = random.getstate()
    python = {"version": version, "words": np.array(words, dtype=np.int64), "gauss": gauss}
    return tensors, {"python": python, "numpy": np.random.get_state(legacy=False)}


def restore(tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    """Put back what :func:`capture` gave. States of GPUs that are not here are left out with a notice."""
    python = values["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(values["numpy"])
    torch.set_rng_state(tensors[_CPU].clone())
    saved = len(tensors) - 1
    here = torch.cuda.device_count() if saved and torch.cuda.is_available() else 0
    for index in range(min(saved, here)):
        torch.cuda.set_rng_state(tensors[_CUDA.format(index)].clone(), index)
    if saved > here:
        notice(
            f"The checkpoint has the random states of {saved} GPUs and this machine has {here}: the others are unused."
        )
