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
from verl.config.presets import FAMILIES, FAMILY_PRESETS
from verl.errors import ConfigError
from verl.notices import notice

OUTPUT = "./output/rl_checkpoint"
SAMPLES = 8
SEQUENCE_LENGTH = 1024
NO_END = 1_000_000
"""``trainer.total_training_steps`` of a trainer whose steps are asked for one by one."""

_AR = "actor_rollout_ref"
_NAMES = {**PRESETS, **FAMILY_PRESETS}
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
    sft_dataset_path: str | list[str] | None,
    mixed_training_ratio: float | None,
    builtin_prompts: bool,
    output_dir: str,
    resume: bool,
    config: Mapping[str, Any] | None,
    actor: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration of an RLTrainer. ``config`` holds further keys; they win over defaults, not over parameters.

    Raises:
        ConfigError: a parameter is wrong, contradicts another one, or belongs to another version.
    """
    _check_algorithm(algorithm)
    rl_dataset_path, sft_dataset_path = _data_of(algorithm, rl_dataset_path, sft_dataset_path, mixed_training_ratio)
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
        *_length_keys(algorithm, reward_fn, (prompt, response), measured),
        ("data.max_length", max_seq_len if _learns(algorithm) or sft_dataset_path else None, measured),
        ("sft.train_files", sft_dataset_path, True),
        ("sft.ratio", mixed_training_ratio, True),
        ("data.train_files", rl_dataset_path, True),
        *((key, value, True) for key, value in (actor or {}).items()),
        *(() if actor else ((f"{_AR}.model.path", model_name, True),)),
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
    if not _learns(algorithm) and not any(key in given for key in _KL_KEYS):
        wanted.append((_kl_switch(algorithm), True, False))
    return _loaded(wanted, given, more)


def _loaded(wanted: list[tuple[str, Any, bool]], given: Mapping[str, Any], more: Mapping[str, Any]) -> Config:
    """What the parameters make, below the further keys; an error where they contradict each other."""
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


def _learns(algorithm: str) -> bool:
    """Whether it is not reinforcement learning of the PPO kind."""
    return algorithm in FAMILIES


def _data_of(
    algorithm: str,
    rl_dataset_path: str | list[str] | None,
    sft_dataset_path: str | list[str] | None,
    mixed_training_ratio: float | None,
) -> tuple[str | list[str] | None, str | list[str] | None]:
    """(data of the algorithm, data of SFT steps in between)."""
    if mixed_training_ratio is not None and (sft_dataset_path is None or algorithm == "sft"):
        raise ConfigError(
            f"mixed_training_ratio={mixed_training_ratio} is the share of SFT steps between those of another algorithm"
            ": give sft_dataset_path, their data, and such an algorithm"
        )
    if algorithm != "sft" or sft_dataset_path is None:
        return rl_dataset_path, sft_dataset_path
    if rl_dataset_path is not None:
        raise ConfigError("algorithm='sft' has no use for rl_dataset_path: leave it out, or take another algorithm")
    return sft_dataset_path, None


def _length_keys(
    algorithm: str, reward_fn: Any, lengths: tuple[int, int], measured: bool
) -> list[tuple[str, Any, bool]]:
    """Lengths of prompt and response, where answers are sampled: a preference run makes pairs if it has a reward."""
    if FAMILIES.get(algorithm, "ppo") in ("sft", "reward_model") or (_offline(algorithm) and reward_fn is None):
        return []
    return [("data.max_prompt_length", lengths[0], measured), ("data.max_response_length", lengths[1], measured)]


def _offline(algorithm: str) -> bool:
    return FAMILIES.get(algorithm) == "preference"


def needs_data(algorithm: str, reward: Any) -> str | None:
    """What kind of rows the algorithm cannot do without; None where built-in prompts serve."""
    kind = FAMILIES.get(algorithm, "ppo")
    if kind == "sft":
        return "answers to learn (prompt and response, or messages)"
    if kind == "reward_model" or (kind == "preference" and reward is None):
        return "labelled answers" if algorithm in ("kto", "bco") else "pairs (prompt, chosen, rejected)"
    return None


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
    if name not in _NAMES:
        raise ConfigError(f"algorithm={name!r} does not exist; there are {', '.join(_NAMES)}")


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
    preset = _NAMES[algorithm].get(f"{_AR}.rollout.n", 1)
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
    grouped = _NAMES[algorithm].get(f"{_AR}.rollout.n", 1) > 1
    return f"{_AR}.actor.use_kl_loss" if grouped else "algorithm.use_kl_in_reward"


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")


def whole_batches(rows: list[dict[str, Any]], batch_size: int) -> list[dict[str, Any]]:
    """``rows``, repeated until they are whole batches: a few prompts in memory serve a batch of any size."""
    return rows * (batch_size // math.gcd(len(rows), batch_size))
