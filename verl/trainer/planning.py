"""The memory plan of a run: its configuration and its model's shape, put to :mod:`verl.hardware.memory`.

Only the model's config is read; no weight is loaded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from verl.config import (
    Config,
    generates,
    max_sequence_length,
    micro_batching,
    needs_critic,
    needs_old_log_probs,
    needs_reference,
    optimizer_steps_per_rollout,
    processes,
    samples_per_step,
)
from verl.config.tree import Actor
from verl.errors import ConfigError
from verl.hardware import Choice, Device, choose, machine_memory_bytes
from verl.hardware.cards import CARDS, Card
from verl.hardware.memory import (
    GIB,
    ModelShape,
    Workload,
    fits,
    host_bytes,
    lora_parameters,
    peak,
    phases,
    usable_bytes,
)
from verl.hardware.remedies import (
    CHECKPOINTING,
    CRITIC_AWAY,
    CRITIC_OFFLOAD,
    OFFLOAD,
    REFERENCE_AWAY,
    TOKENS,
    Change,
    changes_until_it_fits,
)
from verl.hardware.seconds import StepWork, step_seconds
from verl.models.loading import building_models, load_config
from verl.trainer.megatron_plan import check_megatron, layout_lines
from verl.trainer.rollout_split import check_rollout_split, rollout_split, split_lines

IMAGINED_HOST = 64 * GIB  # of a machine of which only the GPU's name is known


@functools.lru_cache(maxsize=8)
def model_shape(path: str, trust_remote_code: bool = False) -> ModelShape:
    """The shape of a model folder or hub name, from its config; the parameters are counted on the meta device."""
    full = load_config(path, trust_remote_code=trust_remote_code)
    with building_models(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(full, trust_remote_code=trust_remote_code)
    config = full.get_text_config()
    heads, width = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or width // heads
    inner = next((v for n in ("intermediate_size", "ffn_dim", "n_inner") if (v := getattr(config, n, None))), 4 * width)
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=config.num_hidden_layers,
        hidden=width,
        intermediate=inner,
        query=heads * size,
        key=(getattr(config, "num_key_value_heads", None) or heads) * size,
        vocabulary=config.vocab_size,
    )


def workload(config: Config, choice: Choice, shape: ModelShape) -> Workload:
    """What the run does on the device of ``choice`` by its configuration alone. ``config`` must be resolved."""
    parts, on_gpu = config.actor_rollout_ref, choice.device.kind == "cuda"
    longest = max_sequence_length(config)
    rank = parts.model.lora_rank
    trainable = lora_parameters(shape, rank) if rank else shape.parameters
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    whole = -(-computed_tokens(config) // ranks)

    def tokens(step: Any) -> int:
        batching = micro_batching(config, step)
        return min(whole, batching.rows * longest if batching.rows is not None else max(batching.tokens, longest))

    half, split = choice.dtype in ("bfloat16", "float16"), rollout_split(config, choice)
    return Workload(
        element=2 if half else 4,
        device_bytes=choice.device.memory_bytes,
        host_bytes=IMAGINED_HOST if is_imagined(choice) else machine_memory_bytes(),
        cuda=on_gpu,
        kernels=half and choice.triton,
        micro_tokens=tokens("actor"),
        forward_tokens=tokens("old_log_prob"),
        trained_share=_trained_share(config),
        trainable=trainable,
        rollout_rows=min(parts.rollout.max_num_seqs, -(-samples_per_step(config) * split // ranks)),
        rollout_split=split,
        rollout_tokens=longest,
        cache_share=parts.rollout.gpu_memory_utilization if on_gpu else 1.0,
        optimizer=parts.actor.optim.optimizer.lower(),
        critic_optimizer=config.critic.optim.optimizer.lower(),
        reference=needs_reference(config) and not rank,
        critic=needs_critic(config),
        checkpointing=bool(parts.model.enable_gradient_checkpointing) or _recomputes(parts.actor),
        checkpointed=1 / parts.model.gradient_checkpointing_every,
        compiled=parts.model.compile_layers and choice.triton,
        offload=bool(parts.actor.optim.offload) and on_gpu,
        critic_offload=bool(config.critic.optim.offload) and on_gpu,
        reference_away=bool(parts.ref.param_offload) and on_gpu,
        critic_away=bool(config.critic.param_offload) and on_gpu,
        quantised=parts.model.quantization,
        shards=_shards(config, ranks),
        **_megatron(config, ranks),
        flash=choice.attention in ("varlen", "flash_attn"),
    )


def _recomputes(actor: Actor) -> bool:
    """Megatron-Core is told to compute whole layers again."""
    override = actor.megatron.override_transformer_config
    return actor.strategy == "megatron" and override.recompute_granularity == "full"


def _megatron(config: Config, ranks: int) -> dict[str, Any]:
    """What Megatron-Core makes of the policy."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy != "megatron":
        return {}
    split = actor.megatron
    stages = split.pipeline_model_parallel_size or 1
    copies = max(1, ranks // (stages * (split.tensor_model_parallel_size or 1)))
    return {"cut": True, "stages": stages, "sharers": copies if split.use_distributed_optimizer else 1}


def _shards(config: Config, ranks: int) -> int:
    """Devices that a copy of the policy's weights is spread over, as shards or as parts of matrices."""
    actor = config.actor_rollout_ref.actor
    if ranks == 1 or actor.strategy == "torch":
        return 1
    if actor.strategy == "megatron":
        return (actor.megatron.tensor_model_parallel_size or 1) * (actor.megatron.pipeline_model_parallel_size or 1)
    return ranks if actor.fsdp_config.fsdp_size < 1 else actor.fsdp_config.fsdp_size


def computed_tokens(config: Config) -> int:
    """Tokens that an update computes if every prompt and response is as long as allowed; prompts count once."""
    if not generates(config):
        return samples_per_step(config) * max_sequence_length(config)
    data = config.data
    responses = samples_per_step(config) * data.max_response_length
    return data.train_batch_size * data.max_prompt_length + responses


def _trained_share(config: Config) -> float:
    if not generates(config):
        return 1.0
    return samples_per_step(config) * config.data.max_response_length / computed_tokens(config)


def is_imagined(choice: Choice) -> bool:
    """The device is a card by its name: nothing else is known of the machine around it."""
    return choice.device.count == 0


@dataclass(frozen=True)
class Automatic:
    """What is switched on because the plan needs it, where the configuration leaves it open. No number changes by it.

    Attributes:
        tokens: of a micro-batch at most; None: as configured.
        checkpointing: recompute activations.
        reference_away, critic_away: weights lie in host memory outside the role's phases.
        offload, critic_offload: optimizer in host memory.
        changes: the same, one by one.
    """

    tokens: int | None = None
    checkpointing: bool = False
    reference_away: bool = False
    critic_away: bool = False
    offload: bool = False
    critic_offload: bool = False
    changes: tuple[Change, ...] = ()


def automatic(config: Config, choice: Choice) -> Automatic:
    """What the plan switches on. Nothing outside CUDA GPUs, nor where the devices share the weights."""
    model = config.actor_rollout_ref.model
    if choice.device.kind != "cuda" or model.path is None:
        return Automatic()
    shape = model_shape(model.path, model.trust_remote_code)
    work = workload(config, choice, shape)
    changes = changes_until_it_fits(shape, work, max_sequence_length(config), fixed=_decided(config), neutral_only=True)
    values = {key: value for change in changes for key, value in change.values.items()}
    return Automatic(
        tokens=values.get(TOKENS),
        checkpointing=CHECKPOINTING in values,
        reference_away=REFERENCE_AWAY in values,
        critic_away=CRITIC_AWAY in values,
        offload=OFFLOAD in values,
        critic_offload=CRITIC_OFFLOAD in values,
        changes=tuple(changes),
    )


def _decided(config: Config) -> set[str]:
    """Keys that the user has set, so that the plan may only propose to change them."""
    parts, critic = config.actor_rollout_ref, config.critic
    given = {
        TOKENS: TOKENS in config.explicit or micro_batching(config, "actor").by != "memory",
        CHECKPOINTING: parts.model.enable_gradient_checkpointing is not None,
        REFERENCE_AWAY: parts.ref.param_offload is not None,
        CRITIC_AWAY: critic.param_offload is not None,
        OFFLOAD: parts.actor.optim.offload is not None,
        CRITIC_OFFLOAD: critic.optim.offload is not None,
    }
    if processes(config) > 1:  # weights may be spread over the ranks, which this plan of one device does not see
        given |= dict.fromkeys((REFERENCE_AWAY, CRITIC_AWAY, OFFLOAD, CRITIC_OFFLOAD), True)
    return {key for key, decided in given.items() if decided}


def checkpointing_needed(config: Config, choice: Choice) -> bool:
    """Whether activations must be recomputed for the update to fit: never assumed outside CUDA GPUs."""
    return automatic(config, choice).checkpointing


def card(name: str) -> Card:
    """A known GPU by (part of) its name.

    Raises:
        ConfigError: it is not known, or several have that name.
    """
    wanted = " ".join(re.split(r"[\s_-]+", name.lower().replace("nvidia", "").replace("geforce", ""))).strip()
    exact = [c for c in CARDS if c.name.lower() == wanted]
    found = exact or [c for c in CARDS if wanted and all(word in c.name.lower() for word in wanted.split())]
    if len(found) != 1:
        what = "is not known" if not found else "means several"
        raise ConfigError(f"--gpu '{name}' {what}; there are {', '.join(c.name for c in found or CARDS)}")
    return found[0]


def card_of(choice: Choice) -> Card | None:
    """The card of this machine, if it is known."""
    lowered = choice.device.name.lower()
    found = [c for c in CARDS if all(word in lowered for word in c.name.lower().split())]
    return max(found, key=lambda c: len(c.name)) if found and choice.device.kind == "cuda" else None


def imagined(found: Card) -> Choice:
    """What verl would choose on that card, with this torch and with Triton."""
    device = Device("cuda", found.name, found.capability, int(found.memory_gib * GIB), count=0)
    return choose(device, torch.__version__, {"triton"})


def plan_lines(config: Config, choice: Choice, found: Card | None = None) -> Iterator[str]:
    """The plan for people: memory by phase, whether it fits, and what would make it fit. ``config`` is resolved.

    Args:
        found: the card, for seconds; None: they are left out.
    """
    model = config.actor_rollout_ref.model
    if model.path is None:
        return
    shape = model_shape(model.path, model.trust_remote_code)
    chosen = automatic(config, choice)
    work = chosen.changes[-1].work if chosen.changes else workload(config, choice, shape)
    device = choice.device.described if choice.device.capability else f"{choice.device.kind} '{choice.device.name}'"
    yield f"Memory plan for {device} with {_gib(work.device_bytes)}: {shape.parameters / 1e9:.2f} B parameters"
    yield f"  in {choice.dtype}, attention {choice.attention}, micro-batches of {work.micro_tokens:,} computed tokens"
    check_megatron(config, need_package=False)
    check_rollout_split(config, choice)
    yield from layout_lines(config)
    yield from split_lines(config, choice)
    for change in chosen.changes:
        yield f"  chosen by this plan: {_shown(change)}"
    for phase in phases(shape, work):
        parts = ", ".join(f"{name} {_gib(count)}" for name, count in phase.parts.items())
        yield f"  {phase.name}: {_gib(phase.total)} ({parts})"
    most = peak(shape, work)
    verdict = "fits" if fits(shape, work) else "does not fit"
    yield f"  peak: {_gib(most.total)} in {most.name}; {_gib(usable_bytes(work))} can be used: it {verdict}"
    if moved := host_bytes(shape, work):
        of = "are taken to be there" if is_imagined(choice) else "are there"
        yield f"  host memory: {_gib(moved)} for what is moved off the GPU; {_gib(work.host_bytes)} {of}"
    if found is not None and fits(shape, work):
        yield _seconds_line(config, shape, work, found)
    if fits(shape, work):
        return
    changes = changes_until_it_fits(shape, work, max_sequence_length(config))
    for change in changes:
        yield f"  set {_shown(change)}"
    if not changes or not fits(shape, changes[-1].work):
        yield "  even so it does not fit: take a smaller model, shorter sequences or a larger device"


def _shown(change: Change) -> str:
    values = " ".join(
        f"{key}={value if isinstance(value, str) else str(value).lower()}" for key, value in change.values.items()
    )
    return f"{values}: peak {_gib(change.peak.total)}"


def expected_seconds(config: Config, choice: Choice, found: Card) -> dict[str, float]:
    """Seconds of a step by the name of its node, as far as the plan knows them. ``config`` is resolved."""
    model = config.actor_rollout_ref.model
    shape = model_shape(str(model.path), model.trust_remote_code)
    changes = automatic(config, choice).changes
    seconds = _phase_seconds(config, shape, changes[-1].work if changes else workload(config, choice, shape), found)
    passes = {"old_logp": needs_old_log_probs(config), "ref_logp": needs_reference(config)}
    passes["values"] = needs_critic(config)
    each = seconds["log-probs"] / max(1, sum(passes.values()))
    nodes = {"generate": seconds["rollout"], "update_actor": seconds["update"]}
    nodes |= {name: each for name, needed in passes.items() if needed}
    return nodes | ({"update_critic": seconds["critic's update"]} if passes["values"] else {})


def _seconds_line(config: Config, shape: ModelShape, work: Workload, found: Card) -> str:
    seconds = _phase_seconds(config, shape, work, found)
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if value)
    return f"  a step: about {sum(seconds.values()):.1f} s if every response is full ({parts})"


def _phase_seconds(config: Config, shape: ModelShape, work: Workload, found: Card) -> dict[str, float]:
    data, actor = config.data, config.actor_rollout_ref.actor
    steps = optimizer_steps_per_rollout(config) if generates(config) else 1
    passes = sum((needs_old_log_probs(config), needs_reference(config), needs_critic(config)))
    tokens = StepWork(
        samples=samples_per_step(config) if generates(config) else 0,
        response=data.max_response_length,
        computed=computed_tokens(config),
        epochs=actor.ppo_epochs,
        forwards=passes,
        optimizer_steps=steps,
    )
    return step_seconds(shape, work, tokens, found)


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
