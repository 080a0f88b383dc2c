"""Learning-rate schedules as pure functions of the training step."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "cosine", "linear", "wsd")
WSD_DECAY_SHARE = 0.1  # the last tenth of the steps decays


def lr_factor(
    step: int,
    *,
    kind: str = "constant",
    warmup_steps: int = 0,
    total_steps: int = 0,
    min_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Factor on the base learning rate at training step ``step`` (0-based).

    During warm-up the factor is (step + 1) / (warmup_steps + 1): it is never 0, so the first step does something.
    ``cosine`` goes to ``min_ratio`` over ``num_cycles`` half turns times two; ``wsd`` is constant and then falls
    linearly over the last tenth.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if kind == "constant" or total_steps <= 0:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if kind == "cosine":
        return min_ratio + (1 - min_ratio) * max(0.0, 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress)))
    if kind == "linear":
        return min_ratio + (1 - min_ratio) * (1 - progress)
    if kind == "wsd":
        into_decay = max(0.0, (progress - (1 - WSD_DECAY_SHARE)) / WSD_DECAY_SHARE)
        return 1 - (1 - min_ratio) * into_decay
    raise ValueError(f"unknown learning-rate schedule {kind!r}; there are {', '.join(SCHEDULES)}")
