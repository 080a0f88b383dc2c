"""Rollouts of the native engine in which several processes share the model: what can be said before anything loads."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import Config, generates
from verl.errors import ConfigError
from verl.hardware import Choice
from verl.models.cuts import why_not_cut
from verl.models.loading import load_config

KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def splits_here(config: Config, choice: Choice) -> bool:
    """Whether the native engine was asked for. Where it stands in for another engine, no model is split."""
    return choice.rollout_engine == "native" and config.actor_rollout_ref.rollout.name in ("auto", "native")


def rollout_split(config: Config, choice: Choice) -> int:
    """Processes that generate together with the native engine, each with its part of the weights."""
    return config.actor_rollout_ref.rollout.tensor_model_parallel_size if splits_here(config, choice) else 1


def check_rollout_split(config: Config, choice: Choice) -> None:
    """Find out from the model's config alone that it cannot be split so. ``config`` must be resolved.

    Raises:
        ConfigError: it cannot, and why.
    """
    size, model = rollout_split(config, choice), config.actor_rollout_ref.model
    if size == 1 or model.path is None or not generates(config):
        return
    reason = why_not_cut(load_config(model.path, trust_remote_code=model.trust_remote_code), size)
    if reason is not None:
        raise ConfigError(f"{KEY}={size} is not possible for {model.path}: {reason}")


def split_lines(config: Config, choice: Choice) -> Iterator[str]:
    """For people: how the rollout lies over the processes."""
    size, ranks = rollout_split(config, choice), config.trainer.n_gpus_per_node * config.trainer.nnodes
    if size > 1:
        yield f"  rollout: each {size} of {ranks} processes generate together, each with 1/{size} of the weights"
