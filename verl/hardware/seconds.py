"""How long a step takes on a GPU, roughly: matrix products at a share of the card's rate, decoding by its bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from verl.hardware.cards import Card
from verl.hardware.memory import ModelShape, Workload, cache_bytes, lora, resident, usable_bytes, weight_bytes

REACHED = 0.4  # of a card's matrix rate, what an update usually reaches
READ = 0.3  # of its bandwidth, what decoding usually reaches
HOST_BANDWIDTH = 25e9  # bytes a second of host memory, that an optimizer step there reads and writes
LINK = 20e9  # bytes a second between host and GPU
DECODE_STEP = 3e-3  # seconds of a step that are there however little there is to do


@dataclass(frozen=True)
class StepWork:
    """Tokens of one training step over all micro-batches.

    Attributes:
        samples: responses. prompt, response: tokens of each, at most.
        computed: tokens that an update computes, prompts shared.
        epochs: passes over them. forwards: passes without a gradient (old log-probs, reference, values).
        optimizer_steps: of one update.
    """

    samples: int
    response: int
    computed: int
    epochs: int = 1
    forwards: int = 0
    optimizer_steps: int = 1


def step_seconds(shape: ModelShape, work: Workload, step: StepWork, card: Card) -> dict[str, float]:
    """Seconds by phase if every response is full. Prefill and scoring are left out."""
    rate = card.tflops * 1e12 * REACHED
    factor = (4 if lora(shape, work) else 6) + (2 * work.checkpointed if work.checkpointing else 0)
    seconds = {
        "rollout": _decoding(shape, work, step, card),
        "log-probs": 2 * shape.parameters * step.computed * step.forwards / rate,
        "update": factor * shape.parameters * step.computed * step.epochs / rate,
    }
    if work.offload:
        seconds["update"] += step.optimizer_steps * _on_host(work.trainable, work)
    if work.critic:
        seconds["critic's update"] = 6 * shape.parameters * step.computed * step.epochs / rate
        if work.critic_offload:
            seconds["critic's update"] += step.optimizer_steps * _on_host(shape.parameters, work)
    return seconds


def _decoding(shape: ModelShape, work: Workload, step: StepWork, card: Card) -> float:
    """Each decoding step reads the weights once and every cached token."""
    one = 2 * shape.layers * shape.key * work.element * work.rollout_tokens
    free = usable_bytes(work) - sum(resident(shape, work).values())
    at_a_time = max(1, min(work.rollout_rows, step.samples, cache_bytes(shape, work, free) // one))
    read = weight_bytes(shape, work) + at_a_time * one / 2  # caches are half full on average
    each = max(DECODE_STEP, read / (card.bandwidth * 1e9 * READ))
    return -(-step.samples // at_a_time) * step.response * each


def _on_host(trainable: int, work: Workload) -> float:
    """Gradients down, weights up, and an optimizer that reads and writes master, moments and gradient."""
    return trainable * (28 / HOST_BANDWIDTH + 2 * work.element / LINK)
