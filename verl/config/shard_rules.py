"""Rules of sharded training."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.derived import needs_critic, needs_reference
from verl.config.tree import Config

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"


def shard_contradictions(config: Config) -> Iterator[str]:
    """A sentence for each contradiction."""
    policy = config.actor_rollout_ref
    for key, role, used, ranks in (
        (_ACTOR, policy.actor, True, ranks_of(config.trainer, config.trainer)),
        (_REF, policy.ref, needs_reference(config), ranks_of(policy.ref, config.trainer)),
        ("critic", config.critic, needs_critic(config), ranks_of(config.critic, config.trainer)),
    ):
        size = role.fsdp_config.fsdp_size
        if (
            used
            and ranks > 1
            and role.strategy not in ("torch", "megatron")
            and size != -1
            and (size < 1 or ranks % size)
        ):
            yield f"{key}.fsdp_config.fsdp_size={size} does not divide its {ranks} processes: use -1 or a divisor"
        split = role.ulysses_sequence_parallel_size
        if used and role.strategy != "megatron" and split > 1 and (role.strategy == "torch" or ranks % split):
            problem = (
                "needs sharded weights" if role.strategy == "torch" else f"does not divide its {ranks} process(es)"
            )
            yield f"{key}.ulysses_sequence_parallel_size={split} {problem}: use 1, or {_advice(role, ranks)}"
    for key, role, used in ((_ACTOR, policy.actor, True), ("critic", config.critic, needs_critic(config))):
        optimizer = role.optim.optimizer
        if used and role.strategy == "fsdp" and optimizer not in ("AdamW", "SGD"):
            yield (
                f"{key}.optim.optimizer={optimizer} does not treat each weight by itself, so it cannot work on shards: "
                f"use AdamW or SGD, or {key}.strategy=torch"
            )
    yield from _rollout_split(config)


def _rollout_split(config: Config) -> Iterator[str]:
    """What is wrong with a rollout in which several processes share the model, or nothing where vLLM shares it."""
    policy, ranks = config.actor_rollout_ref, ranks_of(config.trainer, config.trainer)
    size, engine, actor = policy.rollout.tensor_model_parallel_size, policy.rollout.name, policy.actor
    if size == 1 or engine not in ("auto", "native", "hf") or config.trainer.schedule == "one_step_off":
        return
    key = f"{_ROLLOUT}.tensor_model_parallel_size={size}"
    if engine == "hf":
        yield f"{key} with {_ROLLOUT}.name=hf: that engine splits no model, so use 1, or {_ROLLOUT}.name=native"
    elif ranks == 1:
        yield f"{key} needs more processes that share the model: set trainer.n_gpus_per_node, or use 1"
    elif ranks % size:
        yield f"{key} does not divide the {ranks} processes of the policy: use a divisor"
    elif actor.strategy == "torch":
        yield f"{key} needs weights that are spread over the processes: set {_ACTOR}.strategy=auto, or use 1"
    elif actor.strategy == "auto" and (actor.optim.optimizer not in ("AdamW", "SGD") or policy.model.quantization):
        kept = (
            f"{_ACTOR}.optim.optimizer={actor.optim.optimizer}"
            if not policy.model.quantization
            else f"actor_rollout_ref.model.quantization={policy.model.quantization}"
        )
        yield f"{key} needs weights that are spread over the processes, and {kept} keeps them whole: use 1, or leave it"


def _advice(role, ranks: int) -> str:
    if role.strategy == "torch":
        return "strategy=auto"
    return "more processes (trainer.n_gpus_per_node)" if ranks == 1 else "a divisor"


def ranks_of(role, trainer) -> int:
    """Processes of a role."""
    if getattr(role, "enable_resource_pool", False):
        return (role.n_gpus_per_node or trainer.n_gpus_per_node) * role.nnodes
    return trainer.n_gpus_per_node * trainer.nnodes
