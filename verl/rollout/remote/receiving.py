"""The other end of ``weights.py``: opens the trainer's weights in a process of the engine, where they lie."""

from __future__ import annotations

import math
import pickle

import torch

DEVICE = 6  # place of the device's number in the arguments of torch's rebuild_cuda_tensor


def opened(table: bytes) -> dict[str, torch.Tensor]:
    """Name → tensor, for the pickled table of :class:`verl.rollout.remote.weights.ExportedWeights`.

    The tensors stay the trainer's: what they hold changes with every update.
    """
    files: dict[str, torch.Tensor] = {}
    return {
        name: _tensor(getattr(torch, dtype), shape, source, files) for name, dtype, shape, source in pickle.loads(table)
    }


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], source: tuple, files: dict[str, torch.Tensor]) -> torch.Tensor:
    if source[0] == "file":
        _, path, size, offset = source
        if path not in files:
            files[path] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        count = math.prod(shape) * dtype.itemsize
        return files[path][offset : offset + count].view(dtype).view(shape)
    # a CUDA tensor of the trainer, opened here without a copy; the trainer's GPU is the first one of this process
    _, rebuild, arguments = source
    return rebuild(*arguments[:DEVICE], 0, *arguments[DEVICE + 1 :])
