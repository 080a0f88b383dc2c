"""Matrix products of a small model's layers on this CPU, float32 against bfloat16: which of the two is faster here?

python benchmarks/cpu_matmul.py
"""

from __future__ import annotations

import time

import torch

SHAPES = [(576, 576), (1536, 576), (576, 1536), (49152, 576)]  # (output, input) of SmolLM2-135M's linear layers


def gigaflops(rows: int, outputs: int, inputs: int, dtype: torch.dtype, repeats: int = 15) -> float:
    """Best-quarter rate of x @ w.T."""
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(rows, inputs).to(dtype)
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        times.append(time.perf_counter() - started)
    best = sorted(times[2:])[repeats // 4]
    return 2 * rows * outputs * inputs / best / 1e9


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; GFLOP/s")
    print("| rows | layer | float32 | bfloat16 |\n|---|---|---|---|")
    for rows in (64, 384, 1280):
        for outputs, inputs in SHAPES:
            rates = [gigaflops(rows, outputs, inputs, dtype) for dtype in (torch.float32, torch.bfloat16)]
            print(f"| {rows} | {outputs}x{inputs} | {rates[0]:.0f} | {rates[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
