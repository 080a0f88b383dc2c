"""Running out of memory: recognising it, getting back to where one was, and what there is to say about it."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

_PHRASES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class MemoryShortageError(RuntimeError):
    """Memory ran out on some rank while gradients were summed. Nothing was changed: the step can be taken again.

    Attributes:
        micro_batch: number of this rank's micro-batch that did not fit; None if it was another rank's.
    """

    def __init__(self, micro_batch: int | None):
        super().__init__("out of memory" if micro_batch is not None else "out of memory on another rank")
        self.micro_batch = micro_batch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory is short: CUDA's, a library's inside it, or the CPU allocator's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


def release_memory() -> None:
    """Give back what a failed attempt left behind. Call it outside the ``except`` block, whose frames hold tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class RandomState:
    """torch's generators: that of the CPU and those of the GPUs in use."""

    cpu: torch.Tensor
    gpus: list[torch.Tensor]

    @staticmethod
    def capture() -> RandomState:
        started = torch.cuda.is_available() and torch.cuda.is_initialized()
        return RandomState(torch.get_rng_state(), torch.cuda.get_rng_state_all() if started else [])

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.gpus:
            torch.cuda.set_rng_state_all(self.gpus)


def memory_numbers(device: torch.device) -> str:
    """How full the device is, for messages."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        return f"{_gib(total)} on the GPU, {_gib(held)} of it held by this process, {_gib(free)} free"
    import psutil

    memory = psutil.virtual_memory()
    return f"{_gib(memory.total)} in this machine, {_gib(memory.available)} available"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
