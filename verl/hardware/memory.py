"""How much memory a run needs, phase by phase, before anything is loaded. Pure arithmetic on shapes.

What a decoder layer saves for its backward pass was counted from the code of transformers' Llama-like layers and held
against measured peaks (``tests/hardware/test_hardware_memory.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

GIB = 2**30
CONTEXT_BYTES = int(0.8 * GIB)  # CUDA's own, and its libraries' workspaces
USABLE = 0.95  # of the rest: what the allocator can hand out before fragmentation hurts
LOGITS_CHUNK = 32 * 2**20  # elements, see verl.models.linear_logprob
KERNEL_CHUNK = 512 * 2**20
KEPT_SHARE = 8
MOMENT_BYTES = {"adamw": 8.0, "sgd": 0.0}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. ``parameters`` counts tied weights once; ``query``, ``key``: heads times head size."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    query: int
    key: int
    vocabulary: int


@dataclass(frozen=True)
class Workload:
    """What is done with the model on one device.

    Attributes:
        element: bytes of an element of the live weights: 2 or 4.
        device_bytes: memory of the device.
        cuda: the device is a CUDA GPU (else host memory is what is counted).
        kernels: the fused log-prob runs on Triton kernels.
        micro_tokens: tokens of the largest micro-batch of the update; forward_tokens: of the log-prob passes.
        trained_share: share of the tokens that are responses.
        trainable: trained parameters; adapters only, with LoRA. optimizer: a key of ``MOMENT_BYTES``.
        reference: a frozen copy is loaded. critic: a value model of the policy's shape is trained.
        rollout_rows, rollout_tokens: sequences in flight at a time, and tokens of each.
        flash: attention is flash attention over packed rows, without padded copies.
        offload: masters, gradient sums and moments are in host memory.
    """

    element: int
    device_bytes: int
    cuda: bool
    kernels: bool
    micro_tokens: int
    forward_tokens: int
    trained_share: float
    trainable: int
    rollout_rows: int
    rollout_tokens: int
    optimizer: str = "adamw"
    reference: bool = False
    critic: bool = False
    checkpointing: bool = False
    compiled: bool = False
    flash: bool = False
    offload: bool = False


@dataclass(frozen=True)
class Phase:
    """Bytes at a phase's peak by what they are for."""

    name: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def activation_bytes_per_token(shape: ModelShape, work: Workload) -> int:
    """What one decoder layer keeps of one token until the backward pass."""
    b, d = work.element, shape.hidden
    key = shape.key if work.flash else shape.query  # without flash attention keys are repeated to the query heads
    attention = b * (2 * shape.query + 2 * key)  # q, k, v and the output
    if not work.flash:
        attention += b * 2 * shape.query  # padded copies, and the output in packed order
    if work.compiled:
        return 6 * d * b // 2 + attention + 3 * b * shape.intermediate
    # two norms: their input in fp32, the normalised state and the scaled one; gate, silu, up and their product
    return 2 * (4 * d + 2 * b * d) + attention + 4 * b * shape.intermediate


def activations(shape: ModelShape, work: Workload) -> int:
    """Bytes of activations of one micro-batch at the start of its backward pass."""
    layer = activation_bytes_per_token(shape, work)
    if work.checkpointing:
        return work.micro_tokens * (shape.layers * work.element * shape.hidden + layer)
    return work.micro_tokens * shape.layers * layer


def logits_bytes(shape: ModelShape, work: Workload, tokens: int, *, training: bool) -> int:
    """Bytes of the fused log-prob: a chunk of logits, and what is kept for the backward pass if it fits the budget."""
    trained = max(1, int(tokens * work.trained_share))
    whole = trained * shape.vocabulary
    chunk = min(whole, KERNEL_CHUNK) * work.element if work.kernels else 3 * min(whole, LOGITS_CHUNK) * 4
    budget = work.device_bytes // KEPT_SHARE if work.cuda else GIB
    if training and whole * work.element <= budget:
        return whole * work.element + (0 if work.kernels else chunk)
    weight_gradient = shape.vocabulary * shape.hidden * 4 if training and work.trainable >= shape.parameters else 0
    return chunk + weight_gradient


def resident(shape: ModelShape, work: Workload) -> dict[str, int]:
    """What stays for the whole run: weights, masters, moments of every role."""
    roles = 2 if work.critic else 1
    trainable = work.trainable + (shape.parameters if work.critic else 0)
    adapters = work.trainable if lora(shape, work) else 0
    here = 0 if work.offload else trainable
    parts = {
        "weights": (roles * shape.parameters + adapters) * work.element,
        "fp32 masters": here * 4 if work.element < 4 else 0,
        "optimizer moments": int(here * MOMENT_BYTES[work.optimizer]),
        "reference": shape.parameters * work.element if work.reference else 0,
    }
    return {name: count for name, count in parts.items() if count}


def gradient_bytes(work: Workload) -> int:
    return 0 if work.offload else 4 * work.trainable


def lora(shape: ModelShape, work: Workload) -> bool:
    return work.trainable < shape.parameters


def phases(shape: ModelShape, work: Workload) -> list[Phase]:
    """Rollout, log-probs and update, each with what is resident in it."""
    fixed = resident(shape, work)
    cache = 2 * shape.layers * shape.key * work.element * work.rollout_rows * work.rollout_tokens
    # sampling: logits, probabilities and noise of one step in fp32
    rollout = {**fixed, "KV cache": cache, "sampling": 3 * 4 * work.rollout_rows * shape.vocabulary}
    hidden = work.forward_tokens * (6 * shape.hidden + 3 * shape.intermediate) * work.element
    forward_logits = logits_bytes(shape, work, work.forward_tokens, training=False)
    forward = {**fixed, "one layer": hidden, "logits": forward_logits}
    update = {
        **fixed,
        "fp32 gradients": gradient_bytes(work),
        "activations": activations(shape, work),
        "logits": logits_bytes(shape, work, work.micro_tokens, training=True),
    }
    return [Phase("rollout", rollout), Phase("log-probs", forward), Phase("update", update)]


def peak(shape: ModelShape, work: Workload) -> Phase:
    return max(phases(shape, work), key=lambda phase: phase.total)


def usable_bytes(work: Workload) -> int:
    return int((work.device_bytes - (CONTEXT_BYTES if work.cuda else 0)) * USABLE)


def fits(shape: ModelShape, work: Workload) -> bool:
    return peak(shape, work).total <= usable_bytes(work)


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of adapters of this rank beside all linear layers."""
    d, q, k, i = shape.hidden, shape.query, shape.key, shape.intermediate
    return shape.layers * rank * ((d + q) + 2 * (d + k) + (q + d) + 2 * (d + i) + (i + d))


@dataclass(frozen=True)
class Change:
    """One thing to change, as configuration values, and the memory that is then needed."""

    values: dict[str, Any]
    work: Workload
    peak: Phase


def changes_until_it_fits(shape: ModelShape, work: Workload, longest: int) -> list[Change]:
    """The cheapest changes, one upon the other, until the run fits; the last may still not fit.

    Args:
        longest: tokens of the longest sequence, below which a micro-batch cannot go.
    """
    done: list[Change] = []
    while not fits(shape, work):
        found = _next_change(shape, work, longest)
        if found is None or peak(shape, found[1]).total >= peak(shape, work).total:
            break
        values, work = found
        done.append(Change(values, work, peak(shape, work)))
    return done


def _next_change(shape: ModelShape, work: Workload, longest: int) -> tuple[dict[str, Any], Workload] | None:
    """What lowers the phase at the peak: its values in the configuration, and the workload then."""
    kept = sum(resident(shape, work).values()) + gradient_bytes(work)
    if kept > usable_bytes(work) and not lora(shape, work):
        adapters = replace(work, trainable=lora_parameters(shape, 16), reference=False)
        return {"actor_rollout_ref.model.lora_rank": 16}, adapters
    phase = peak(shape, work).name
    if phase == "rollout" and work.rollout_rows > 1:
        rows = work.rollout_rows
        while rows > 1 and _total(shape, replace(work, rollout_rows=rows), phase) > usable_bytes(work):
            rows //= 2
        return {"actor_rollout_ref.rollout.max_num_seqs": rows}, replace(work, rollout_rows=rows)
    if phase == "update" and not work.checkpointing:
        return {"actor_rollout_ref.model.enable_gradient_checkpointing": True}, replace(work, checkpointing=True)
    tokens = max(work.micro_tokens, work.forward_tokens)
    smaller = work
    while tokens // 2 >= longest and _total(shape, smaller, phase) > usable_bytes(work):
        tokens //= 2
        micro, forward = min(work.micro_tokens, tokens), min(work.forward_tokens, tokens)
        smaller = replace(work, micro_tokens=micro, forward_tokens=forward)
    if smaller is not work:
        return {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": tokens}, smaller
    if not lora(shape, work):
        adapters = replace(work, trainable=lora_parameters(shape, 16), reference=False)
        return {"actor_rollout_ref.model.lora_rank": 16}, adapters
    return None


def _total(shape: ModelShape, work: Workload, name: str) -> int:
    return next(phase.total for phase in phases(shape, work) if phase.name == name)


@dataclass(frozen=True)
class Card:
    """A GPU that ``verl plan --gpu`` knows. ``tflops``: dense matrix rate by the datasheet, in the dtype it gets."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    tflops: float


CARDS = (
    Card("Tesla P40", (6, 1), 24, 12), Card("Tesla P100", (6, 0), 16, 9), Card("Tesla V100", (7, 0), 32, 112),
    Card("Tesla T4", (7, 5), 16, 65), Card("RTX 2080 Ti", (7, 5), 11, 54), Card("RTX 3060", (8, 6), 12, 51),
    Card("RTX 3090", (8, 6), 24, 71), Card("RTX 4090", (8, 9), 24, 165), Card("RTX 5090", (12, 0), 32, 210),
    Card("A10", (8, 6), 24, 125), Card("L4", (8, 9), 24, 121), Card("L40S", (8, 9), 48, 362),
    Card("A100 40GB", (8, 0), 40, 312), Card("A100 80GB", (8, 0), 80, 312), Card("H100", (9, 0), 80, 790),
    Card("H200", (9, 0), 139, 790), Card("B200", (10, 0), 180, 2250),
)  # fmt: skip
