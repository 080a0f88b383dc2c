"""The limits of the native engine."""

from __future__ import annotations

from dataclasses import dataclass

from verl.errors import RolloutError

COMPILE_MODES = ("auto", "on", "off")


@dataclass(frozen=True)
class NativeSettings:
    """Limits of one engine.

    Attributes:
        max_num_seqs: rows decoded together; more requests wait.
        max_num_batched_tokens: prompt tokens computed in one forward; longer work is cut into chunks.
        page_size: tokens in a page of the cache.
        gpu_memory_utilization: share of the free memory of a GPU that the cache takes, unless ``max_pages`` says.
        max_pages: pages at most; None sizes the cache (a GPU: by its free memory; else: by need, up to
            ``host_cache_bytes``).
        host_cache_bytes: cap of the cache outside a GPU.
        host_slab_bytes: cap of the copies of running rows' keys and values that a CPU attends to; 0 for none.
        host_pack_bytes: a model on a CPU whose linear weights are not larger decodes with packed copies of them.
        window: decode steps on a GPU between two looks of the host.
        overlap: where the same rows will go on, begin the next window before the results of the last are looked at.
        compile: compile the decoder layers on a GPU; "auto" does so once enough decode steps are planned.
        triton: use the Triton kernels where the GPU runs them.
        graphs: capture decode steps as CUDA graphs.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    page_size: int = 16
    gpu_memory_utilization: float = 0.5
    max_pages: int | None = None
    host_cache_bytes: int = 2 << 30
    host_slab_bytes: int = 2 << 30
    host_pack_bytes: int = 2 << 30
    window: int = 16
    overlap: bool = True
    compile: str = "auto"
    triton: bool = True
    graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "window"):
            if getattr(self, name) < 1:
                raise RolloutError(f"rollout.{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise RolloutError(
                f"rollout.gpu_memory_utilization is {self.gpu_memory_utilization}; it is a share, above 0 and up to 1."
            )
        if self.max_pages is not None and self.max_pages < 1:
            raise RolloutError(f"max_pages is {self.max_pages}; the cache needs at least one page.")
        if self.compile not in COMPILE_MODES:
            raise RolloutError(f"compile is '{self.compile}'; it is one of {', '.join(COMPILE_MODES)}.")
