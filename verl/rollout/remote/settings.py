"""What an engine that works elsewhere is told. Plain values: they travel to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RemoteSettings:
    """Limits and choices of one engine.

    Attributes:
        dtype: torch name of the type that the engine computes in; None: the model's.
        max_model_len: tokens of prompt and response together; None: the model's context.
        gpu_memory_utilization: share of the whole GPU that the engine may use, weights included; on a CPU it bounds
            the cache.
        enforce_eager: no compilation and no CUDA graphs; None: on a CPU only, where compiling takes minutes.
        sleep: give weights and cache back between rollouts (CUDA).
        engine_kwargs: more of the engine's own arguments, by name; they win.
        probe_tolerance: mean difference of log-probs that is allowed after an update; None: by dtype.
        server_url: address of a running vLLM server, in place of a process.
        server_weights_dir: folder that the trainer and the server both see; None: one in memory of this machine.
    """

    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.5
    tensor_parallel_size: int = 1
    enforce_eager: bool | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    sleep: bool = True
    trust_remote_code: bool = False
    seed: int = 0
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    probe_tolerance: float | None = None
    server_url: str | None = None
    server_weights_dir: str | None = None
