"""Rules of runs with more than one process."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.derived import family, needs_critic, needs_reference, processes
from verl.config.tree import Config

_ROLLOUT = "actor_rollout_ref.rollout"


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


def schedule_contradictions(config: Config) -> Iterator[str]:
    """A sentence for each thing that ``trainer.schedule=one_step_off`` cannot go with."""
    if config.trainer.schedule != "one_step_off":
        return
    key, correction = "trainer.schedule=one_step_off", config.algorithm.rollout_correction
    if family(config) != "ppo":
        yield f"{key} is for PPO and its kin, not for algorithm.name={config.algorithm.name}: leave it at sync"
    if config.sft.train_files:
        yield f"{key} has no SFT steps in between: leave sft.train_files out, or the schedule at sync"
    filters = config.algorithm.filter_groups
    if filters.enable and filters.carry:
        yield f"{key} makes samples one step old, and algorithm.filter_groups.carry=true would make them two: leave it"
    if not (correction.rollout_is or correction.rollout_rs or correction.bypass_mode):
        yield (
            f"{key} trains on samples of older weights: set algorithm.rollout_correction.rollout_is to token or "
            "sequence, or bypass_mode=true"
        )
    if processes(config) > 1 and config.actor_rollout_ref.rollout.nnodes == 0:
        yield (
            f"{key} needs devices of the rollout's own where there is more than one process: set {_ROLLOUT}.nnodes and "
            f"{_ROLLOUT}.n_gpus_per_node"
        )
    parallel = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if parallel > 1 and config.actor_rollout_ref.rollout.name not in ("vllm", "vllm_server", "sglang"):
        yield (
            f"{key}: each process of the rollout has all weights, so {_ROLLOUT}.tensor_model_parallel_size={parallel} "
            f"needs {_ROLLOUT}.name=vllm"
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
    for name in ("nnodes", "n_gpus_per_node"):
        if config.given(f"{_ROLLOUT}.{name}") and config.trainer.schedule == "sync":
            yield f"{_ROLLOUT}.{name} is read only with trainer.schedule=one_step_off"
    prompts, ranks = config.data.train_batch_size, config.trainer.n_gpus_per_node * config.trainer.nnodes
    if prompts < ranks:
        yield f"data.train_batch_size={prompts} prompts for {ranks} processes: some of them generate nothing"
    if config.trainer.max_restarts and processes(config) == 1:
        yield "trainer.max_restarts has no effect in one process: nothing is left to restart it"
