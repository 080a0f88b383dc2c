"""GPUs that ``verl plan --gpu`` knows by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """``tflops``: dense matrix rate by the datasheet, in the dtype it gets. ``bandwidth``: of its memory, in GB/s."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    tflops: float
    bandwidth: float


CARDS = (
    Card("Tesla P40", (6, 1), 24, 12, 346), Card("Tesla P100", (6, 0), 16, 9, 732),
    Card("GTX 1080 Ti", (6, 1), 11, 11, 484), Card("Tesla V100", (7, 0), 32, 112, 900),
    Card("Tesla T4", (7, 5), 16, 65, 320), Card("RTX 2080 Ti", (7, 5), 11, 54, 616),
    Card("RTX 3060", (8, 6), 12, 51, 360), Card("RTX 3080", (8, 6), 10, 59, 760),
    Card("RTX 3090", (8, 6), 24, 71, 936), Card("RTX A6000", (8, 6), 48, 155, 768),
    Card("RTX 4080", (8, 9), 16, 97, 717), Card("RTX 4090", (8, 9), 24, 165, 1008),
    Card("RTX 5090", (12, 0), 32, 210, 1792), Card("A10", (8, 6), 24, 125, 600), Card("L4", (8, 9), 24, 121, 300),
    Card("L40S", (8, 9), 48, 362, 864), Card("A100 40GB", (8, 0), 40, 312, 1555),
    Card("A100 80GB", (8, 0), 80, 312, 2039), Card("H100", (9, 0), 80, 790, 3350),
    Card("H200", (9, 0), 139, 790, 4800), Card("B200", (10, 0), 180, 2250, 8000),
)  # fmt: skip
