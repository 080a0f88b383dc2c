"""What makes a run fit, in the order of its price: first what leaves every number as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from verl.hardware.memory import (
    ModelShape,
    Phase,
    Workload,
    fits,
    host_bytes,
    lora,
    lora_parameters,
    peak,
    phases,
    usable_bytes,
)

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
REFERENCE_AWAY = "actor_rollout_ref.ref.param_offload"
CRITIC_AWAY = "critic.param_offload"
OFFLOAD, CRITIC_OFFLOAD = f"{ACTOR}.optim.offload", "critic.optim.offload"
NEUTRAL = (TOKENS, CHECKPOINTING, REFERENCE_AWAY, CRITIC_AWAY, OFFLOAD, CRITIC_OFFLOAD)
"""Keys that change speed and memory, and no number beyond rounding."""

GOOD_TOKENS = 4096  # smaller micro-batches leave a GPU waiting
HOST_SHARE = 0.85  # of the machine's memory that may hold what was moved off the GPU


@dataclass(frozen=True)
class Change:
    """One thing to change, as configuration values, and the memory that is then needed."""

    values: dict[str, Any]
    work: Workload
    peak: Phase


def changes_until_it_fits(
    shape: ModelShape, work: Workload, longest: int, *, fixed: Collection[str] = (), neutral_only: bool = False
) -> list[Change]:
    """The cheapest changes, one upon the other, until the run fits; the last may still not fit.

    Args:
        longest: tokens of the longest sequence, below which a micro-batch cannot go.
        fixed: keys that must stay as they are.
        neutral_only: none that changes what is learned.
    """
    done: list[Change] = []
    while not fits(shape, work):
        before = peak(shape, work).total
        found = None
        for values, changed in _possible(shape, work, longest):
            allowed = not any(key in fixed or (neutral_only and key not in NEUTRAL) for key in values)
            if allowed and changed != work and peak(shape, changed).total < before and _host_fits(shape, changed):
                found = values, changed
                break
        if found is None:
            break
        values, work = found
        done.append(Change(values, work, peak(shape, work)))
    return done


def _host_fits(shape: ModelShape, work: Workload) -> bool:
    return host_bytes(shape, work) <= work.host_bytes * HOST_SHARE


def _possible(shape: ModelShape, work: Workload, longest: int) -> Iterator[tuple[dict[str, Any], Workload]]:
    """Changes in the order of their price. Those that do nothing for this run are skipped by whoever asks."""
    yield _smaller(shape, work, max(longest, GOOD_TOKENS))
    if work.cuda:
        if work.reference:
            yield {REFERENCE_AWAY: True}, replace(work, reference_away=True)
        if work.critic:
            yield {CRITIC_AWAY: True}, replace(work, critic_away=True)
    yield {CHECKPOINTING: True}, replace(work, checkpointing=True)
    if work.cuda:
        if work.critic:
            yield {CRITIC_OFFLOAD: True}, replace(work, critic_offload=True)
        yield {OFFLOAD: True}, replace(work, offload=True)
        if work.critic and not (work.offload or work.critic_offload):  # one alone may not lower the peak
            yield {OFFLOAD: True, CRITIC_OFFLOAD: True}, replace(work, offload=True, critic_offload=True)
    yield _smaller(shape, work, longest)
    if work.optimizer == "adamw" and not work.offload:
        critic = "adamw8bit" if work.critic else work.critic_optimizer
        values = {f"{ACTOR}.optim.optimizer": "AdamW8bit"}
        values |= {f"{CRITIC}.optim.optimizer": "AdamW8bit"} if work.critic else {}
        yield values, replace(work, optimizer="adamw8bit", critic_optimizer=critic)
    if not lora(shape, work):
        adapters = replace(work, trainable=lora_parameters(shape, 16), reference=False, offload=False)
        yield {"actor_rollout_ref.model.lora_rank": 16}, adapters
    elif work.quantised is None:
        yield {"actor_rollout_ref.model.quantization": "nf4"}, replace(work, quantised="nf4")
    rows = work.rollout_rows
    while rows > 1 and _total(shape, replace(work, rollout_rows=rows), "rollout") > usable_bytes(work):
        rows //= 2
    yield {"actor_rollout_ref.rollout.max_num_seqs": rows}, replace(work, rollout_rows=rows)


def _smaller(shape: ModelShape, work: Workload, least: int) -> tuple[dict[str, Any], Workload]:
    """Halve the micro-batches of the phase at the peak until it fits, not below ``least`` tokens."""
    phase = peak(shape, work).name
    tokens, smaller = max(work.micro_tokens, work.forward_tokens), work
    while tokens // 2 >= least and _total(shape, smaller, phase) > usable_bytes(work):
        tokens //= 2
        smaller = replace(
            work, micro_tokens=min(work.micro_tokens, tokens), forward_tokens=min(work.forward_tokens, tokens)
        )
    return {TOKENS: tokens}, smaller


def _total(shape: ModelShape, work: Workload, name: str) -> int:
    return next(phase.total for phase in phases(shape, work) if phase.name == name)
