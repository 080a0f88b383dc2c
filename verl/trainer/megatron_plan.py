"""What Megatron-Core will make of the models of a run, from their configs alone."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import Config, needs_critic, needs_reference
from verl.config.megatron_rules import ranks_of_copy, sizes_of
from verl.config.tree import MegatronSplit
from verl.errors import ConfigError
from verl.models.loading import load_config
from verl.train_engine.megatron_model import require_megatron, why_not_split


def megatron_roles(config: Config) -> Iterator[tuple[str, str, MegatronSplit, bool]]:
    """(key, model folder or name, split, trust_remote_code) of every role that Megatron computes."""
    policy, critic = config.actor_rollout_ref, config.critic
    path, trust = policy.model.path, policy.model.trust_remote_code
    for key, role, used, own in (
        ("actor_rollout_ref.actor", policy.actor, True, None),
        ("actor_rollout_ref.ref", policy.ref, needs_reference(config), config.preference.ref_model_path),
        ("critic", critic, needs_critic(config), critic.model.path),
    ):
        if used and role.strategy == "megatron" and (own or path):
            yield key, own or path, role.megatron, trust


def check_megatron(config: Config, *, need_package: bool = True) -> None:
    """Find what makes Megatron impossible before a model loads. ``config`` must be resolved.

    Raises:
        MissingDependencyError: Megatron-Core is needed and not installed.
        ConfigError: with a sentence for every role whose model cannot be cut as asked for.
    """
    problems = []
    for key, path, split, trust in megatron_roles(config):
        if need_package:
            require_megatron()
        sizes = sizes_of(split)
        tensor, context = sizes["tensor_model_parallel_size"], sizes["context_parallel_size"]
        stages = sizes["pipeline_model_parallel_size"] * sizes["virtual_pipeline_model_parallel_size"]
        reason = why_not_split(load_config(path, trust_remote_code=trust), tensor, context=context, stages=stages)
        if reason is not None:
            shown = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
            shown = f" with {shown}" if shown else ""
            problems.append(f"{key}.strategy=megatron{shown} is not possible for {path}: {reason}")
    if problems:
        raise ConfigError(problems)


def layout_lines(config: Config) -> Iterator[str]:
    """For people: how each model lies over the processes."""
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for key, _, split, _ in megatron_roles(config):
        size, sizes = ranks_of_copy(split), sizes_of(split)
        copies = f"{ranks // size} {'copy' if ranks == size else 'copies'}" if ranks % size == 0 else "copies"
        runs = sizes["virtual_pipeline_model_parallel_size"]
        words = {
            "tensor_model_parallel_size": "matrices cut over {}",
            "pipeline_model_parallel_size": "layers over {}" + (f" in {runs} runs each" if runs > 1 else ""),
            "context_parallel_size": "tokens over {}",
        }
        how = ", ".join(text.format(sizes[name]) for name, text in words.items() if sizes[name] > 1)
        how = f" ({how})" if how else ""
        yield f"  {key}: Megatron-Core, {copies} of the weights, each over {size} of {ranks} processes{how}"
