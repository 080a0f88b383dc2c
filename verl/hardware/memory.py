"""How much memory a run needs, phase by phase, before anything is loaded. Pure arithmetic on shapes.

What a decoder layer saves for its backward pass was counted from the code of transformers' Llama-like layers and held
against measured peaks (``tests/hardware/test_hardware_memory.py``, ``benchmarks/plan_accuracy.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.hardware.cards import CARDS, Card

__all__ = ["CARDS", "GIB", "Card", "ModelShape", "Phase", "Workload", "fits", "host_bytes", "peak", "phases"]

GIB = 2**30
CONTEXT_BYTES = int(0.8 * GIB)  # CUDA's own, and its libraries' workspaces
USABLE = 0.92  # of the rest: what the allocator can hand out before fragmentation hurts, and a margin
LOGITS_CHUNK = 32 * 2**20  # elements, see verl.models.linear_logprob
KERNEL_CHUNK = 512 * 2**20
KEPT_SHARE = 8
MOMENT_BYTES = {"adamw": 8.0, "sgd": 0.0, "adafactor": 0.01, "adamw8bit": 2.05}
PAGED = {"pagedadamw": 8.0, "pagedadamw8bit": 2.05}
"""Moments that move to the host when the GPU is full."""
QUANTISED_BYTES = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.01}
"""A weight of a quantised linear layer, with its share of the scales."""


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

    @property
    def linear(self) -> int:
        """Parameters of the linear layers of all decoder layers (three of them in the MLP)."""
        attention = 2 * self.hidden * self.query + 2 * self.hidden * self.key
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


@dataclass(frozen=True)
class Workload:
    """What is done with the model on one device.

    Attributes:
        element: bytes of an element of the live weights: 2 or 4.
        device_bytes: memory of the device. host_bytes: memory of the machine.
        cuda: the device is a CUDA GPU (else host memory is what is counted).
        kernels: the fused log-prob runs on Triton kernels.
        micro_tokens: computed tokens of the largest micro-batch of the update; forward_tokens: of the log-prob passes.
        trained_share: share of the tokens that are responses.
        trainable: trained parameters; adapters only, with LoRA. optimizer: a key of ``MOMENT_BYTES`` or ``PAGED``.
        reference: a frozen copy is loaded. critic: a value model of the policy's shape is trained.
        reference_away, critic_away: its weights lie in host memory outside its phases.
        rollout_rows, rollout_tokens: sequences in flight at a time, and tokens of each.
        cache_share: share of the free memory that their cache may take; what does not fit waits.
        flash: attention is flash attention over packed rows, without padded copies.
        offload, critic_offload: masters, gradient sums and moments are in host memory.
        quantised: type of the frozen linear layers under adapters, a key of ``QUANTISED_BYTES``.
        checkpointed: share of the layers that recompute their activations, where ``checkpointing`` is on.
        shards: devices that the weights of every role are spread over (FSDP); a rollout has all of them on each.
        rollout_split: devices that share the rollout's weights and cache, by heads.
        cut: the shards are parts of matrices that compute as they lie (Megatron), and not gathered.
        stages: of them, those that hold different layers. (Of these the first keeps the activations of as many
            micro-batches, each of so much fewer layers.)
        sharers: copies of the weights that share masters and moments.
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
    critic_optimizer: str = "adamw"
    reference: bool = False
    critic: bool = False
    checkpointing: bool = False
    checkpointed: float = 1.0
    compiled: bool = False
    flash: bool = False
    offload: bool = False
    critic_offload: bool = False
    reference_away: bool = False
    critic_away: bool = False
    cache_share: float = 1.0
    quantised: str | None = None
    host_bytes: int = 64 * GIB
    shards: int = 1
    rollout_split: int = 1
    cut: bool = False
    stages: int = 1
    sharers: int = 1


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
    if not work.checkpointing:
        return work.micro_tokens * shape.layers * layer
    again = round(shape.layers * work.checkpointed)
    kept = (shape.layers - again) * layer + again * work.element * shape.hidden + (layer if again else 0)
    return work.micro_tokens * kept


def logits_bytes(shape: ModelShape, work: Workload, tokens: int, *, training: bool) -> int:
    """Bytes of the fused log-prob: a chunk of logits, and what is kept for the backward pass if it fits the budget."""
    trained = max(1, int(tokens * work.trained_share))
    if work.cut:
        return _cut_logits_bytes(shape, work, trained, training=training)
    whole = trained * shape.vocabulary
    wide = 4 * min(whole, LOGITS_CHUNK)
    chunk = min(whole, KERNEL_CHUNK) * work.element if work.kernels else 3 * wide
    budget = work.device_bytes // KEPT_SHARE if work.cuda else GIB
    if training and whole * work.element <= budget:
        return whole * work.element + (0 if work.kernels else 2 * wide)  # logits and their softmax
    weight_gradient = shape.vocabulary * shape.hidden * 4 if training and not lora(shape, work) else 0
    return chunk + weight_gradient


def _cut_logits_bytes(shape: ModelShape, work: Workload, trained: int, *, training: bool) -> int:
    """The same of a vocabulary that is cut: a chunk of this device's logits in fp32, never kept."""
    rows = -(-shape.vocabulary * work.stages // work.shards)
    chunk = 3 * 4 * min(trained * rows, LOGITS_CHUNK)
    return chunk + (4 * (rows * shape.hidden + trained * shape.hidden) if training else 0)


def weight_bytes(shape: ModelShape, work: Workload) -> int:
    """The policy's live weights, adapters included."""
    adapters = work.trainable if lora(shape, work) else 0
    whole = (shape.parameters + adapters) * work.element
    if work.quantised is None:
        return whole
    return int(whole - shape.linear * (work.element - QUANTISED_BYTES[work.quantised]))


def resident(shape: ModelShape, work: Workload) -> dict[str, int]:
    """What stays on the device for the whole run: weights, masters, moments of every role."""
    if work.shards > 1 and not work.cut:
        return _resident_shards(shape, work)
    here = 0 if work.offload else work.trainable
    critic = shape.parameters if work.critic and not work.critic_offload else 0
    moments = here * MOMENT_BYTES.get(work.optimizer, 0) + critic * MOMENT_BYTES.get(work.critic_optimizer, 0)
    parts = {
        "weights": weight_bytes(shape, work) // work.shards,
        "critic's weights": 0 if work.critic_away else _critic(shape, work),
        "reference": 0 if work.reference_away else _reference(shape, work),
        "fp32 masters": (here + critic) * 4 // (work.shards * work.sharers) if work.element < 4 else 0,
        "optimizer moments": int(moments) // (work.shards * work.sharers),
    }
    return {name: count for name, count in parts.items() if count}


def _resident_shards(shape: ModelShape, work: Workload) -> dict[str, int]:
    """The same for one shard: trained weights are their fp32 masters, frozen ones are in the type that computes."""
    here = 0 if work.offload else work.trainable
    critic = shape.parameters if work.critic and not work.critic_offload and not work.critic_away else 0
    moments = here * MOMENT_BYTES.get(work.optimizer, 0) + critic * MOMENT_BYTES.get(work.critic_optimizer, 0)
    frozen = shape.parameters * work.element if lora(shape, work) else 0
    parts = {
        "frozen weights": frozen // work.shards,
        "reference": 0 if work.reference_away else _reference(shape, work),
        "fp32 masters": (here + critic) * 4 // work.shards,
        "optimizer moments": int(moments) // work.shards,
    }
    return {name: count for name, count in parts.items() if count}


def gathered_bytes(shape: ModelShape, work: Workload, *, training: bool) -> int:
    """Whole weights while they compute: the embeddings, and a layer with the next; training adds their gradients."""
    if work.shards == 1 or work.cut:
        return 0
    outside = min(2 * shape.vocabulary * shape.hidden, shape.parameters)
    layer = shape.linear // shape.layers
    weights = (outside + 2 * layer) * work.element
    # gradients in the type that computes, and in fp32 on their way to the shards
    return weights + ((outside + layer) * (work.element + 4) if training and not lora(shape, work) else 0)


def _critic(shape: ModelShape, work: Workload) -> int:
    return shape.parameters * work.element // work.shards if work.critic else 0


def _reference(shape: ModelShape, work: Workload) -> int:
    return shape.parameters * work.element // work.shards if work.reference else 0


def host_bytes(shape: ModelShape, work: Workload) -> int:
    """What lies in (pinned) host memory because it was moved off a GPU."""
    each = 4 + 4  # master and gradient sum
    total = 0.0
    if work.offload:
        total += work.trainable * (each + {**MOMENT_BYTES, **PAGED}[work.optimizer])
    if work.critic and work.critic_offload:
        total += shape.parameters * (each + {**MOMENT_BYTES, **PAGED}[work.critic_optimizer])
    total += _reference(shape, work) if work.reference_away else 0
    total += _critic(shape, work) if work.critic_away else 0
    return int(total)


def gradient_bytes(work: Workload) -> int:
    return 0 if work.offload else 4 * work.trainable // work.shards


def lora(shape: ModelShape, work: Workload) -> bool:
    return work.trainable < shape.parameters


def cache_bytes(shape: ModelShape, work: Workload, free: int) -> int:
    """The cache of running sequences: all of them if they fit into its share of what is free, at least one."""
    one = 2 * shape.layers * shape.key * work.element * work.rollout_tokens // work.rollout_split
    return max(one, min(one * work.rollout_rows, int(free * work.cache_share)))


def phases(shape: ModelShape, work: Workload) -> list[Phase]:
    """Rollout, log-probs and updates, each with what is resident in it."""
    fixed = resident(shape, work)
    # sampling: logits, probabilities and noise of one step in fp32
    sampling = 3 * 4 * work.rollout_rows * shape.vocabulary
    free = usable_bytes(work) - sum(fixed.values()) - sampling
    whole = weight_bytes(shape, work) // work.rollout_split if work.shards > 1 else 0
    free -= whole
    rollout = {**fixed, "rollout's weights": whole, "KV cache": cache_bytes(shape, work, free), "sampling": sampling}
    hidden = work.forward_tokens * (6 * shape.hidden + 3 * shape.intermediate) * work.element
    forward_logits = logits_bytes(shape, work, work.forward_tokens, training=False)
    forward = {**fixed, "reference": _reference(shape, work), "one layer": hidden, "logits": forward_logits}
    forward["gathered weights"] = gathered_bytes(shape, work, training=False)
    update = {
        **fixed,
        "gathered weights": gathered_bytes(shape, work, training=True),
        "fp32 gradients": gradient_bytes(work),
        "gradient on its way": in_transit(shape, work, work.offload, work.trainable),
        "activations": activations(shape, work),
        "logits": logits_bytes(shape, work, work.micro_tokens, training=True),
    }
    found = [Phase("rollout", rollout), Phase("log-probs", forward), Phase("update", update)]
    if work.critic:
        critic = {
            **fixed,
            "critic's weights": _critic(shape, work),
            "gathered weights": gathered_bytes(shape, work, training=True),
            "fp32 gradients": 0 if work.critic_offload else 4 * shape.parameters // work.shards,
            "gradient on its way": in_transit(shape, work, work.critic_offload, shape.parameters),
            "activations": activations(shape, work),
        }
        found.append(Phase("critic's update", critic))
    return [Phase(phase.name, {name: count for name, count in phase.parts.items() if count}) for phase in found]


def in_transit(shape: ModelShape, work: Workload, offload: bool, trainable: int) -> int:
    """The largest gradient in the live type, before it is added to its sum: that of the embeddings."""
    if (work.element == 4 and not offload) or (work.shards > 1 and not work.cut):
        return 0  # the sum itself, or counted with the gathered weights
    return min(trainable, shape.vocabulary * shape.hidden) * work.element // work.shards


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
