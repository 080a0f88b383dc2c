"""Matrix products of a small model's layers on this CPU: torch's own (MKL in float32) against oneDNN's, and bfloat16.

python benchmarks/cpu_matmul.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SHAPES = [(576, 576), (1536, 576), (576, 1536), (49152, 576)]  # (output, input) of SmolLM2-135M's linear layers


def onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


COLUMNS: list[tuple[str, Callable[..., torch.Tensor], torch.dtype]] = [
    ("float32, torch", torch.nn.functional.linear, torch.float32),
    ("float32, oneDNN", onednn, torch.float32),
    ("bfloat16, torch", torch.nn.functional.linear, torch.bfloat16),
    ("bfloat16, oneDNN", onednn, torch.bfloat16),
]


def gigaflops(product: Callable[..., torch.Tensor], rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> float:
    """Best-quarter rate of x @ w.T."""
    repeats = 15
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(rows, inputs).to(dtype)
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        product(x, weight)
        times.append(time.perf_counter() - started)
    best = sorted(times[2:])[repeats // 4]
    return 2 * rows * outputs * inputs / best / 1e9


def rate(product: Callable[..., torch.Tensor], rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> str:
    if product is onednn and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "not here"
    return f"{gigaflops(product, rows, outputs, inputs, dtype):.0f}"


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; GFLOP/s")
    print("| rows | layer | " + " | ".join(name for name, *_ in COLUMNS) + " |")
    print("|---|---|" + "---|" * len(COLUMNS))
    for rows in (64, 384, 1280):
        for outputs, inputs in SHAPES:
            rates = [rate(product, rows, outputs, inputs, dtype) for _, product, dtype in COLUMNS]
            print(f"| {rows} | {outputs}x{inputs} | " + " | ".join(rates) + " |", flush=True)


if __name__ == "__main__":
    main()
