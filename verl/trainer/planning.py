"""The memory plan of a run: its configuration and its model's shape, put to :mod:`verl.hardware.memory`.

Only the model's config is read; no weight is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from verl.config import Config, max_sequence_length, micro_batching, needs_critic, needs_reference, samples_per_step
from verl.errors import ConfigError
from verl.hardware import Choice, Device, choose
from verl.hardware.memory import (
    CARDS,
    GIB,
    Card,
    ModelShape,
    Workload,
    changes_until_it_fits,
    fits,
    lora_parameters,
    peak,
    phases,
    usable_bytes,
)
from verl.models.loading import building_models, load_config

REACHED = 0.4  # of a card's matrix rate, what an update usually reaches


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
    """What the run does on the device of ``choice``. ``config`` must be resolved."""
    parts = config.actor_rollout_ref
    longest = max_sequence_length(config)
    rank = parts.model.lora_rank
    trainable = lora_parameters(shape, rank) if rank else shape.parameters

    def tokens(step: Any) -> int:
        batching = micro_batching(config, step)
        most = samples_per_step(config) * longest
        return min(most, batching.rows * longest if batching.rows is not None else max(batching.tokens, longest))

    half = choice.dtype in ("bfloat16", "float16")
    return Workload(
        element=2 if half else 4,
        device_bytes=choice.device.memory_bytes,
        cuda=choice.device.kind == "cuda",
        kernels=half and choice.triton,
        micro_tokens=tokens("actor"),
        forward_tokens=tokens("old_log_prob"),
        trained_share=config.data.max_response_length / longest,
        trainable=trainable,
        rollout_rows=min(parts.rollout.max_num_seqs, samples_per_step(config)),
        rollout_tokens=longest,
        optimizer=parts.actor.optim.optimizer.lower(),
        reference=needs_reference(config) and not rank,
        critic=needs_critic(config),
        checkpointing=bool(parts.model.enable_gradient_checkpointing),
        compiled=parts.model.compile_layers and choice.triton,
        offload=parts.actor.optim.offload and choice.device.kind == "cuda",
        flash=choice.attention in ("varlen", "flash_attn"),
    )


def checkpointing_needed(config: Config, choice: Choice) -> bool:
    """Whether activations must be recomputed for the update to fit: never assumed outside CUDA GPUs."""
    model = config.actor_rollout_ref.model
    if choice.device.kind != "cuda" or model.path is None:
        return False
    shape = model_shape(model.path, model.trust_remote_code)
    return not fits(shape, workload(config, choice, shape))


def card(name: str) -> Card:
    """A known GPU by (part of) its name.

    Raises:
        ConfigError: it is not known, or several have that name.
    """
    wanted = name.lower().replace("nvidia", "").replace("geforce", "").strip()
    exact = [c for c in CARDS if c.name.lower() == wanted]
    found = exact or [c for c in CARDS if wanted and all(word in c.name.lower() for word in wanted.split())]
    if len(found) != 1:
        what = "is not known" if not found else "means several"
        raise ConfigError(f"--gpu '{name}' {what}; there are {', '.join(c.name for c in found or CARDS)}")
    return found[0]


def imagined(found: Card) -> Choice:
    """What verl would choose on that card, with this torch and with Triton."""
    device = Device("cuda", found.name, found.capability, int(found.memory_gib * GIB))
    return choose(device, torch.__version__, {"triton"})


def plan_lines(config: Config, choice: Choice, tflops: float | None = None) -> Iterator[str]:
    """The plan for people: memory by phase, whether it fits, and what would make it fit. ``config`` is resolved."""
    model = config.actor_rollout_ref.model
    if model.path is None:
        return
    shape = model_shape(model.path, model.trust_remote_code)
    work = workload(config, choice, shape)
    device = choice.device.described if choice.device.capability else f"{choice.device.kind} '{choice.device.name}'"
    yield f"Memory plan for {device} with {_gib(work.device_bytes)}: {shape.parameters / 1e9:.2f} B parameters"
    yield f"  in {choice.dtype}, attention {choice.attention}, micro-batches of {work.micro_tokens:,} tokens"
    for phase in phases(shape, work):
        parts = ", ".join(f"{name} {_gib(count)}" for name, count in phase.parts.items())
        yield f"  {phase.name}: {_gib(phase.total)} ({parts})"
    most = peak(shape, work)
    verdict = "fits" if fits(shape, work) else "does not fit"
    yield f"  peak: {_gib(most.total)} in {most.name}; {_gib(usable_bytes(work))} can be used: it {verdict}"
    if tflops is not None:
        tokens = samples_per_step(config) * max_sequence_length(config)
        seconds = 6 * shape.parameters * tokens / (tflops * 1e12 * REACHED)
        yield f"  update: about {seconds:.1f} s a step at {tflops:g} TFLOP/s and {REACHED:.0%} of it, if all is full"
    if fits(shape, work):
        return
    changes = changes_until_it_fits(shape, work, max_sequence_length(config))
    for change in changes:
        values = " ".join(f"{key}={str(value).lower()}" for key, value in change.values.items())
        yield f"  set {values}: peak {_gib(change.peak.total)}"
    if not changes or not fits(shape, changes[-1].work):
        yield "  even so it does not fit: take a smaller model, shorter sequences or a larger device"


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
