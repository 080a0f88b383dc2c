"""Checkpoints that survive whatever happens while they are written, and resume that equals never having stopped.

- ``store``: the folders ``global_step_N``, the tracker, the links, retention. Needs no torch.
- ``state``: tensors, plain values and left-over batches of a run, read back without unpickling anything.
- ``rng``: the states of all random number generators.
- ``environment``: what must be equal for a resumed run to be equal bit for bit.

Importing this package does not import torch; what needs it is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verl.checkpoint.durable import only_run
from verl.checkpoint.layout import step_of
from verl.checkpoint.store import CheckpointStore

if TYPE_CHECKING:
    from verl.checkpoint import rng
    from verl.checkpoint.environment import environment_differences, runtime_facts
    from verl.checkpoint.state import read_protos, read_state, write_protos, write_state

_LAZY = {
    "environment_differences": "verl.checkpoint.environment",
    "read_protos": "verl.checkpoint.state",
    "read_state": "verl.checkpoint.state",
    "runtime_facts": "verl.checkpoint.environment",
    "write_protos": "verl.checkpoint.state",
    "write_state": "verl.checkpoint.state",
}
"""Public name → module that defines it."""

__all__ = [
    "CheckpointStore",
    "environment_differences",
    "only_run",
    "read_protos",
    "read_state",
    "rng",
    "runtime_facts",
    "step_of",
    "write_protos",
    "write_state",
]


def __getattr__(name: str) -> Any:
    if name == "rng":
        return importlib.import_module("verl.checkpoint.rng")
    if name not in _LAZY:
        raise AttributeError(f"module 'verl.checkpoint' has no attribute '{name}'")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
