"""What Megatron-Core will make of the models of a run, from their configs alone."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import Config, needs_critic, needs_reference
from verl.errors import ConfigError
from verl.models.loading import load_config
from verl.train_engine.megatron_model import require_megatron, why_not_split


def megatron_roles(config: Config) -> Iterator[tuple[str, str, int, bool]]:
    """(key, model folder or name, size of the split, trust_remote_code) of every role that Megatron computes."""
    policy, critic = config.actor_rollout_ref, config.critic
    path, trust = policy.model.path, policy.model.trust_remote_code
    for key, role, used, own in (
        ("actor_rollout_ref.actor", policy.actor, True, None),
        ("actor_rollout_ref.ref", policy.ref, needs_reference(config), config.preference.ref_model_path),
        ("critic", critic, needs_critic(config), critic.model.path),
    ):
        if used and role.strategy == "megatron" and (own or path):
            yield key, own or path, role.megatron.tensor_model_parallel_size, trust


def check_megatron(config: Config, *, need_package: bool = True) -> None:
    """Find what makes Megatron impossible before a model loads. ``config`` must be resolved.

    Raises:
        MissingDependencyError: Megatron-Core is needed and not installed.
        ConfigError: with a sentence for every role whose model cannot be cut as asked for.
    """
    problems = []
    for key, path, size, trust in megatron_roles(config):
        if need_package:
            require_megatron()
        reason = why_not_split(load_config(path, trust_remote_code=trust), size)
        if reason is not None:
            problems.append(
                f"{key}.strategy=megatron with tensor_model_parallel_size={size} is not possible for {path}: {reason}"
            )
    if problems:
        raise ConfigError(problems)


def layout_lines(config: Config) -> Iterator[str]:
    """For people: how each model lies over the processes."""
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for key, _, size, _ in megatron_roles(config):
        copies = f"{ranks // size} {'copy' if ranks == size else 'copies'}" if ranks % size == 0 else "copies"
        yield f"  {key}: Megatron-Core, {copies} of the weights, each over {size} of {ranks} processes"
