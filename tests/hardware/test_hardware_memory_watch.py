"""Host memory that grows from step to step is noticed, and nothing else is."""

from __future__ import annotations

import random

import pytest

from verl.hardware.memory_watch import GIB, MIB, WARM, WINDOW, MemoryWatch, resident_bytes


def told(values, total=64 * GIB):
    watch = MemoryWatch(total)
    return [text for value in values if (text := watch.after_step(int(value)))]


def test_a_leak_is_told_once_with_the_steps_that_are_left():
    [text] = told(2 * GIB + 20 * MIB * step for step in range(100))
    assert "20 MiB a step" in text and "3,1" in text  # (64 - 2.5) GiB / 20 MiB


@pytest.mark.parametrize(
    "values",
    [
        [2 * GIB] * 100,
        [2 * GIB + (step % 7) * 300 * MIB for step in range(100)],  # up and down with the lengths
        [2 * GIB + min(step, WARM) * 500 * MIB for step in range(100)],  # caches that fill
        [2 * GIB + (3 * GIB if step > 40 else 0) for step in range(100)],  # one step up, as a longer sequence makes it
        [2 * GIB + step * MIB for step in range(100)],  # too little to matter
    ],
)
def test_other_memory_is_not_told(values):
    assert told(values) == []


def test_noise_does_not_hide_a_leak():
    rng = random.Random(0)
    assert len(told(2 * GIB + 30 * MIB * step + rng.randint(0, 60) * MIB for step in range(60))) == 1


def test_a_real_leak_is_seen():
    kept, watch, found = [], MemoryWatch(64 * GIB), []
    for _ in range(WARM + WINDOW + 2):
        kept.append(bytearray(b"x") * (8 * MIB))
        found.append(watch.after_step(resident_bytes()))
    assert sum(text is not None for text in found) == 1
    assert resident_bytes() > 8 * MIB * WINDOW
