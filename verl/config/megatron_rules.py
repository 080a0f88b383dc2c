"""Rules of training with Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Iterator

from verl.config.derived import needs_critic, needs_reference
from verl.config.shard_rules import ranks_of
from verl.config.tree import Actor, Config, Critic, MegatronConfig, MegatronSplit, Ref

_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"


def megatron_contradictions(config: Config) -> Iterator[str]:
    """A sentence for each contradiction in a resolved configuration."""
    policy = config.actor_rollout_ref
    roles = [
        (_ACTOR, policy.actor, True, ranks_of(config.trainer, config.trainer)),
        (_REF, policy.ref, needs_reference(config), ranks_of(policy.ref, config.trainer)),
        ("critic", config.critic, needs_critic(config), ranks_of(config.critic, config.trainer)),
    ]
    for key, role, used, ranks in roles:
        if used and role.strategy == "megatron":
            yield from _split_of(key, role, ranks)
        elif used:
            for name, size in sizes_of(role.megatron).items():
                if size > 1:
                    yield (
                        f"{key}.megatron.{name}={size} needs {key}.strategy=megatron, which is {role.strategy}: set "
                        "it, or leave the size out"
                    )
    if any(used and role.strategy == "megatron" for _, role, used, _ in roles):
        yield from _not_with_megatron(config)


def sizes_of(megatron: MegatronSplit) -> dict[str, int]:
    """The sizes of a resolved split, by key."""
    return {
        name: getattr(megatron, name) or 1
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "virtual_pipeline_model_parallel_size",
        )
    }


def ranks_of_copy(megatron: MegatronSplit) -> int:
    """Processes that one copy of the weights lies over."""
    sizes = sizes_of(megatron)
    return math.prod(size for name, size in sizes.items() if not name.startswith("virtual"))


def _split_of(key: str, role: Actor | Ref | Critic, ranks: int) -> Iterator[str]:
    """What is wrong with the split of a role that Megatron computes."""
    copy, sizes = ranks_of_copy(role.megatron), sizes_of(role.megatron)
    if ranks == 1:
        yield (
            f"{key}.strategy=megatron needs more than one process, and there is 1: set trainer.n_gpus_per_node, or "
            f"{key}.strategy=auto"
        )
    elif ranks % copy:
        used = [f"{n}={s}" for n, s in sizes.items() if s > 1 and not n.startswith("virtual")]
        yield f"{key}.megatron.{' times '.join(used)} does not divide its {ranks} processes: use a divisor"
    runs = sizes["virtual_pipeline_model_parallel_size"]
    if runs > 1 and sizes["pipeline_model_parallel_size"] == 1:
        yield (
            f"{key}.megatron.virtual_pipeline_model_parallel_size={runs} needs "
            f"{key}.megatron.pipeline_model_parallel_size above 1: set it, or leave the virtual size out"
        )
    if (role.ulysses_sequence_parallel_size or 1) > 1:
        yield (
            f"{key}.ulysses_sequence_parallel_size={role.ulysses_sequence_parallel_size} is for sharded weights: with "
            f"{key}.strategy=megatron it is {key}.megatron.context_parallel_size"
        )
    if isinstance(role.megatron, MegatronConfig):
        override = role.megatron.override_transformer_config
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(override, name) is not None and override.recompute_granularity != "full":
                yield (
                    f"{key}.megatron.override_transformer_config.{name}={getattr(override, name)} is of whole layers: "
                    "set recompute_granularity=full beside it, or leave it out"
                )


def _not_with_megatron(config: Config) -> Iterator[str]:
    """What Megatron's models here cannot do."""
    policy, critic = config.actor_rollout_ref, config.critic
    model = policy.model
    megatron = {
        _ACTOR: policy.actor.strategy == "megatron",
        _REF: needs_reference(config) and policy.ref.strategy == "megatron",
        "critic": needs_critic(config) and critic.strategy == "megatron",
    }
    some = next(key for key, used in megatron.items() if used)
    for key, on in (
        ("lora_rank", model.lora_rank > 0),
        ("lora_adapter_path", model.lora_adapter_path is not None),
        ("quantization", model.quantization is not None),
    ):
        if on:
            yield (
                f"actor_rollout_ref.model.{key}={getattr(model, key)} is not possible with {some}.strategy=megatron, "
                "which trains whole weights only: leave it out, or use strategy=torch"
            )
    if model.compile_layers:
        yield (
            f"actor_rollout_ref.model.compile_layers=true is not possible with {some}.strategy=megatron, whose layers "
            "are Megatron's: leave it out, or use strategy=fsdp"
        )
    for key, role in ((_ACTOR, policy.actor), ("critic", critic)):
        if megatron[key] and role.optim.optimizer not in ("AdamW", "SGD"):
            yield (
                f"{key}.optim.optimizer={role.optim.optimizer} does not treat each weight by itself, so it cannot work "
                f"on parts of matrices: use AdamW or SGD, or {key}.strategy=torch"
            )
    for key, role in ((_REF, policy.ref), ("critic", critic)):
        if megatron[key] and role.param_offload:
            yield (
                f"{key}.param_offload=true is not possible with {key}.strategy=megatron: leave it out, or use "
                f"{key}.strategy=fsdp"
            )
    if megatron["critic"] and critic.model.custom_cls.path is not None:
        yield (
            f"critic.model.custom_cls.path={critic.model.custom_cls.path} is not possible with "
            "critic.strategy=megatron: nothing is known of a class of your own; use critic.strategy=torch"
        )
    if megatron[_ACTOR] and config.preference.use_weighting:
        yield (
            f"preference.use_weighting=true needs the whole output layer, which {_ACTOR}.strategy=megatron cuts over "
            f"processes: leave it out, or use {_ACTOR}.strategy=fsdp"
        )
