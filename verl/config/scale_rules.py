"""Rules of runs with more than one process."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.derived import needs_critic, needs_reference, processes
from verl.config.tree import Config


def scale_contradictions(config: Config) -> Iterator[str]:
    """A sentence for each contradiction."""
    if processes(config) > 1 and config.trainer.device == "mps":
        yield "trainer.device=mps is one device: set trainer.n_gpus_per_node=1, or trainer.device=cpu for CPU processes"
    adapters = config.actor_rollout_ref.model.lora_rank > 0 or config.actor_rollout_ref.model.lora_adapter_path
    if config.actor_rollout_ref.ref.enable_resource_pool and needs_reference(config) and adapters:
        yield (
            "actor_rollout_ref.ref.enable_resource_pool=true: with adapters the frozen base of the policy is the "
            "reference, and it lives where the policy does"
        )


def scale_advice(config: Config) -> Iterator[str]:
    """A sentence for each thing that works and is probably not meant."""
    for key, role, used in (
        ("actor_rollout_ref.ref", config.actor_rollout_ref.ref, needs_reference(config)),
        ("critic", config.critic, needs_critic(config)),
    ):
        if role.enable_resource_pool and not used:
            yield f"{key}.enable_resource_pool=true has no effect: this run has no such model"
        for name in ("n_gpus_per_node", "nnodes"):
            if config.given(f"{key}.{name}") and not role.enable_resource_pool:
                yield f"{key}.{name} is read only with {key}.enable_resource_pool=true"
    prompts, ranks = config.data.train_batch_size, config.trainer.n_gpus_per_node * config.trainer.nnodes
    if prompts < ranks:
        yield f"data.train_batch_size={prompts} prompts for {ranks} processes: some of them generate nothing"
    if config.trainer.max_restarts and processes(config) == 1:
        yield "trainer.max_restarts has no effect in one process: nothing is left to restart it"
