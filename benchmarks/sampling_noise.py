"""Milliseconds of one draw from (rows, vocabulary) logits with hashed noise: all rows at once, or a few at a time; and
as verl draws, which takes logarithms only where a token can win, log-probs included.

python benchmarks/sampling_noise.py
"""

from __future__ import annotations

import statistics
import time

import torch

from verl.rollout import sampling
from verl.rollout.base import SamplingParams
from verl.rollout.sampling import gumbel_noise

ROWS, VOCABULARY = 64, 49152  # a decode step of 64 responses of SmolLM2


def draw(logits: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, part: int) -> torch.Tensor:
    """(rows,) ids, ``part`` rows at a time."""
    cut = range(0, len(logits), part)
    noise = (gumbel_noise(seed[i : i + part], position[i : i + part], logits.shape[1]) for i in cut)
    return torch.cat([each.add_(logits[i : i + part]).argmax(-1) for i, each in zip(cut, noise, strict=True)])


def own_draw(logits: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, _: int) -> torch.Tensor:
    return sampling.draw(logits, SamplingParams(2), seed, position)[0]


def milliseconds(part: int, how=draw, repeats: int = 9) -> float:
    """Median time of a draw."""
    logits, seed = 4 * torch.randn(ROWS, VOCABULARY), torch.arange(ROWS, dtype=torch.int32)
    times = []
    for step in range(repeats + 1):
        position = torch.full((ROWS,), step, dtype=torch.int32)
        started = time.perf_counter()
        how(logits, seed, position, part)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:]) * 1e3


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {ROWS} x {VOCABULARY}")
    print("| rows at a time | ms |\n|---|---|")
    for part in (1, 2, 4, 8, 16, ROWS):
        print(f"| {part} | {milliseconds(part):.0f} |", flush=True)
    print(f"| verl | {milliseconds(ROWS, own_draw):.0f} |")


if __name__ == "__main__":
    main()
