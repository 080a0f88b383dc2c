"""RLTrainer's parameters as configuration keys. Nothing here imports torch."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verl.config import PRESETS, Config, load_config, resolve
from verl.config.compat import translate
from verl.config.overrides import VALUES, Setting, spread
from verl.errors import ConfigError
from verl.notices import notice

OUTPUT = "./output/rl_checkpoint"
SAMPLES = 8
SEQUENCE_LENGTH = 1024
NO_END = 1_000_000
"""``trainer.total_training_steps`` of a trainer whose steps are asked for one by one."""

_AR = "actor_rollout_ref"
_PAIRS = ("dpo", "kto", "ipo", "simpo", "orpo", "cpo", "rdpo")
_KL_KEYS = (
    "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.kl_coef",
    f"{_AR}.actor.use_kl_loss",
    f"{_AR}.actor.kl_loss_coef",
)


def rl_config(
    *,
    model_name: str | None,
    reward_fn: Callable[..., Any] | None,
    algorithm: str,
    num_rollout_samples: int | None,
    rollout_batch_size: int | None,
    batch_size_per_device: int | None,
    max_seq_len: int,
    max_prompt_length: int | None,
    kv_cache_max_len: int | None,
    rl_dataset_path: str | list[str] | None,
    builtin_prompts: bool,
    output_dir: str,
    resume: bool,
    config: Mapping[str, Any] | None,
) -> Config:
    """The configuration of an RLTrainer. ``config`` holds further keys; they win over defaults, not over parameters.

    Raises:
        ConfigError: a parameter is wrong, contradicts another one, or belongs to another version.
    """
    _check_algorithm(algorithm)
    more = {key: value for key, value in spread(config or {}) if key}
    given = {setting.key: setting.value for setting in _settings(more)}
    samples = _samples(num_rollout_samples, rollout_batch_size)
    n = _group_size(samples, algorithm, given.get(f"{_AR}.rollout.n"))
    prompt, response = _lengths(max_seq_len, max_prompt_length)
    sized = num_rollout_samples is not None or rollout_batch_size is not None
    measured = max_seq_len != SEQUENCE_LENGTH or max_prompt_length is not None
    # (key, value, whether the user asked for it)
    wanted: list[tuple[str, Any, bool]] = [
        ("algorithm.name", algorithm, algorithm != "ppo"),
        ("data.train_batch_size", samples // n, sized),
        (f"{_AR}.rollout.n", n, False),
        ("data.max_prompt_length", prompt, measured),
        ("data.max_response_length", response, measured),
        ("data.train_files", rl_dataset_path, True),
        (f"{_AR}.model.path", model_name, True),
        # built-in prompts that are too long for a small max_seq_len are nobody's mistake
        ("data.filter_overlong_prompts", True if builtin_prompts and rl_dataset_path is None else None, False),
        ("reward.reward_fn", reward_fn, True),
        *((key, batch_size_per_device, True) for key in _micro_batch_keys(batch_size_per_device)),
        (f"{_AR}.rollout.max_num_seqs", _sequences_at_once(kv_cache_max_len, max_seq_len), True),
        ("trainer.default_local_dir", output_dir, output_dir != OUTPUT),
        ("trainer.project_name", "rl_trainer", False),
        ("trainer.experiment_name", algorithm, False),
        ("trainer.total_training_steps", NO_END, False),
        ("trainer.resume_mode", "auto" if resume else "disable", resume),
    ]
    if not any(key in given for key in _KL_KEYS):
        wanted.append((_kl_switch(algorithm), True, False))
    problems = [
        f"the parameters of RLTrainer make {key}={value}, and config says {given[key]}: give one of them"
        for key, value, asked in wanted
        if asked and value is not None and key in given and given[key] != value
    ]
    if problems:
        raise ConfigError(problems)
    return load_config(values={**{k: v for k, v, _ in wanted if v is not None and k not in given}, **more})


def world_size() -> int:
    """Processes that a trainer made now trains in. This version trains in one process, on one device."""
    return 1


def refuse_mixture(sft_dataset_path: Any, mixed_training_ratio: Any) -> None:
    """Raise ConfigError if a mixture of SFT and RL is asked for."""
    asked = {"sft_dataset_path": sft_dataset_path, "mixed_training_ratio": mixed_training_ratio}
    for name, value in asked.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r}: a mixture of SFT and RL steps is not part of this version of verl; leave it out, "
                "and name the RL data in rl_dataset_path"
            )


def tell_workers(num_rollout_workers: int | None) -> None:
    """A notice where more rollout replicas are asked for than there are devices to train on."""
    if num_rollout_workers is None:
        return
    _positive("num_rollout_workers", num_rollout_workers)
    if num_rollout_workers > world_size():
        notice(
            f"num_rollout_workers={num_rollout_workers}: this version generates in one process on one device, with all "
            "responses of a step decoded together"
        )


def is_reward_model(reward: Any) -> bool:
    """Whether it is a reward model (folder, hub name or torch module) rather than a function."""
    torch = sys.modules.get("torch")  # a module exists only where torch is loaded
    return isinstance(reward, (str, os.PathLike)) or (torch is not None and isinstance(reward, torch.nn.Module))


def _settings(more: Mapping[str, Any]) -> list[Setting]:
    """The canonical settings of the further keys; what is wrong with them is for load_config to say."""
    return translate(Setting(key, value, VALUES) for key, value in spread(more) if key).settings


def _check_algorithm(name: str) -> None:
    if name in _PAIRS:
        raise ConfigError(f"algorithm={name!r} trains on pairs, which RLTrainer does not do in this version of verl")
    if name not in PRESETS:
        raise ConfigError(f"algorithm={name!r} does not exist; there are {', '.join(PRESETS)}")


def _samples(num_rollout_samples: int | None, rollout_batch_size: int | None) -> int:
    given = {
        name: value
        for name, value in (("num_rollout_samples", num_rollout_samples), ("rollout_batch_size", rollout_batch_size))
        if value is not None
    }
    for name, value in given.items():
        _positive(name, value)
    if len(set(given.values())) > 1:
        raise ConfigError(
            f"num_rollout_samples={num_rollout_samples} and rollout_batch_size={rollout_batch_size} are two names for "
            "the responses of one training step: give one of them"
        )
    return next(iter(given.values()), SAMPLES)


def _group_size(samples: int, algorithm: str, asked: Any) -> int:
    """Responses to one prompt: as asked, else the largest divisor of ``samples`` up to the preset's group."""
    if asked is not None:
        _positive(f"{_AR}.rollout.n", asked)
        if samples % asked:
            raise ConfigError(
                f"{samples} responses a step cannot be split into groups of {_AR}.rollout.n={asked}: "
                "give num_rollout_samples a multiple of it"
            )
        return asked
    preset = PRESETS[algorithm].get(f"{_AR}.rollout.n", 1)
    n = next(size for size in range(min(preset, samples), 0, -1) if samples % size == 0)
    if preset > 1 and n == 1:
        raise ConfigError(
            f"algorithm={algorithm!r} compares responses to one prompt, and num_rollout_samples={samples} cannot be "
            f"split into groups of 2 to {preset}: use a multiple of {preset}"
        )
    return n


def _lengths(max_seq_len: int, max_prompt_length: int | None) -> tuple[int, int]:
    """(prompt, response) tokens: the prompt may use up to half, unless its length is given."""
    _positive("max_seq_len", max_seq_len)
    if max_prompt_length is None:
        max_prompt_length = max_seq_len // 2
    if max_seq_len < 2 or not 0 < max_prompt_length < max_seq_len:
        raise ConfigError(
            f"max_seq_len={max_seq_len} is prompt and response together, so max_prompt_length={max_prompt_length} must "
            "be above 0 and below it"
        )
    return max_prompt_length, max_seq_len - max_prompt_length


def _micro_batch_keys(rows: int | None) -> tuple[str, ...]:
    if rows is not None:
        _positive("batch_size_per_device", rows)
    return (
        f"{_AR}.actor.ppo_micro_batch_size_per_gpu",
        f"{_AR}.ref.log_prob_micro_batch_size_per_gpu",
        f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
    )


def _sequences_at_once(kv_cache_max_len: int | None, max_seq_len: int) -> int | None:
    """Sequences that the cache holds: as many slots of ``kv_cache_max_len`` tokens as by default; the others queue."""
    if kv_cache_max_len is None:
        return None
    _positive("kv_cache_max_len", kv_cache_max_len)
    slots = resolve(Config()).actor_rollout_ref.rollout.max_num_seqs
    return max(1, min(slots, slots * kv_cache_max_len // max_seq_len))


def _kl_switch(algorithm: str) -> str:
    """Where the KL against the reference goes: into the loss for groups (GRPO style), else into the reward (PPO)."""
    grouped = PRESETS[algorithm].get(f"{_AR}.rollout.n", 1) > 1
    return f"{_AR}.actor.use_kl_loss" if grouped else "algorithm.use_kl_in_reward"


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")


def whole_batches(rows: list[dict[str, Any]], batch_size: int) -> list[dict[str, Any]]:
    """``rows``, repeated until they are whole batches: a few prompts in memory serve a batch of any size."""
    return rows * (batch_size // math.gcd(len(rows), batch_size))
