"""Time, throughput and memory under verl's metric names. Pure but for reading memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from verl.metrics import Metrics

# What each phase's seconds are divided by: generation is charged to the tokens that it made, the others to all tokens
# that they read.
_RESPONSE_TOKEN_PHASES = ("gen",)
_ALL_TOKEN_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")

_TIME_PREFIXES = ("timing_s/", "timing_per_token_ms/", "perf/")


def is_time_metric(name: str) -> bool:
    """Whether a field of ``metrics.jsonl`` depends on the clock or the machine's memory (and may differ on resume)."""
    return name == "time" or name.startswith(_TIME_PREFIXES)


def timing_metrics(seconds: Mapping[str, float]) -> Metrics:
    """``timing_s/<phase>``: seconds of each phase of one step, as measured on the controller; repeats add up."""
    metrics = Metrics()
    for phase, value in seconds.items():
        metrics.add(f"timing_s/{phase}", value, reduce="sum")
    return metrics


def timing_per_token_metrics(seconds: Mapping[str, float], response_tokens: int, total_tokens: int) -> Metrics:
    """``timing_per_token_ms/<phase>``: milliseconds a token (response tokens for ``gen``, prompt + response otherwise).

    Declared as means weighted by tokens, so that merging two steps gives the time of all their tokens.
    """
    metrics = Metrics()
    for phase, value in seconds.items():
        tokens = response_tokens if phase in _RESPONSE_TOKEN_PHASES else total_tokens
        if phase in _RESPONSE_TOKEN_PHASES + _ALL_TOKEN_PHASES and tokens > 0:
            metrics.add(f"timing_per_token_ms/{phase}", 1000 * value / tokens, weight=tokens)
    return metrics


def throughput_metrics(total_tokens: int, step_seconds: float, devices: int = 1) -> Metrics:
    """``perf/total_num_tokens``, ``perf/time_per_step`` (s) and ``perf/throughput`` (tokens/s for each device).

    Args:
        total_tokens: prompt and response tokens of the whole batch, padding not counted.
        step_seconds: wall time of the whole step.
        devices: how many accelerators (or CPU processes) worked on it.
    """
    if step_seconds <= 0 or devices < 1:
        raise ValueError(f"a step takes time and a device: got {step_seconds} s on {devices} devices")
    metrics = Metrics()
    metrics.add("perf/total_num_tokens", total_tokens, reduce="sum")
    metrics.add("perf/time_per_step", step_seconds, reduce="mean")
    metrics.add("perf/throughput", total_tokens / (step_seconds * devices), weight=step_seconds * devices)
    return metrics


def memory_metrics() -> Metrics:
    """``perf/cpu_memory_used_gb`` of the machine and, with CUDA, this process's peak ``perf/max_memory_*_gb`` (GiB)."""
    import psutil

    metrics = Metrics()
    torch = sys.modules.get("torch")  # a process that never loaded torch holds no device memory
    if torch is not None and torch.cuda.is_available():
        metrics.add("perf/max_memory_allocated_gb", torch.cuda.max_memory_allocated() / 1024**3, reduce="max")
        metrics.add("perf/max_memory_reserved_gb", torch.cuda.max_memory_reserved() / 1024**3, reduce="max")
    metrics.add("perf/cpu_memory_used_gb", psutil.virtual_memory().used / 1024**3, reduce="max")
    return metrics


def step_metrics(
    seconds: Mapping[str, float], response_tokens: int, total_tokens: int, step_seconds: float, devices: int = 1
) -> Metrics:
    """All of the above for one training step; ``seconds`` are its phases, ``step_seconds`` its whole wall time."""
    return Metrics.merged(
        [
            timing_metrics({**seconds, "step": step_seconds}),
            timing_per_token_metrics(seconds, response_tokens, total_tokens),
            throughput_metrics(total_tokens, step_seconds, devices),
            memory_metrics(),
        ]
    )
