"""Checkpoints that survive whatever happens while they are written, and resume that equals never having stopped.

- ``store``: the folders ``global_step_N``, the tracker, the links, retention. Needs no torch.
- ``state``: tensors, plain values and left-over batches of a run, read back without unpickling anything.
- ``rng``: the states of all random number generators.
- ``environment``: what must be equal for a resumed run to be equal bit for bit.

Importing this package does not import torch.
"""

from verl.checkpoint.layout import step_of
from verl.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "step_of"]
