"""Keys of other versions and of verl's documents: what each becomes here.

Three kinds, each a table: a key that moved (:data:`RENAMES`, :data:`MOVED_GROUPS`), a key that stands for several
(:data:`SPREADS`), and, in :mod:`verl.config.compat_inert`, keys that need no counterpart or have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from verl.config.compat_inert import Inert, find_inert
from verl.config.fields import Leaf
from verl.config.overrides import Setting
from verl.config.suggest import near_keys
from verl.config.tree import GROUPS, LEAVES

_AR = "actor_rollout_ref"

MOVED_GROUPS: dict[str, str] = {
    "actor_rollout": _AR,
    "model": f"{_AR}.model",
    "optim": f"{_AR}.actor.optim",
    "custom_reward_function": "reward.custom_reward_function",
    "critic.fsdp": "critic.fsdp_config",
    "critic.model.fsdp_config": "critic.fsdp_config",
    "reward_model.overlong_buffer": "reward.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
    "reward.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
    "reward.reward_model": "reward_model",
    "ray_init": "ray_kwargs.ray_init",
}
"""Old group → where its keys are now."""

RENAMES: dict[str, str] = {
    "preset": "algorithm.name",
    "reward_fn": "reward.reward_fn",
    "use_vllm": "trainer.use_vllm",
    "max_colocate_count": "trainer.max_colocate_count",
    "rollout.nnodes": f"{_AR}.rollout.nnodes",
    "rollout.n_gpus_per_node": f"{_AR}.rollout.n_gpus_per_node",
    "torch_dtype": f"{_AR}.model.dtype",
    "device_map": f"{_AR}.model.device_map",
    f"{_AR}.model_name": f"{_AR}.model.path",
    f"{_AR}.model_path": f"{_AR}.model.path",
    f"{_AR}.torch_dtype": f"{_AR}.model.dtype",
    f"{_AR}.device_map": f"{_AR}.model.device_map",
    f"{_AR}.model.torch_dtype": f"{_AR}.model.dtype",
    f"{_AR}.model.override_config.torch_dtype": f"{_AR}.model.dtype",
    f"{_AR}.model.override_config.attn_implementation": f"{_AR}.model.attn_implementation",
    f"{_AR}.actor.fsdp_config.dtype": f"{_AR}.model.dtype",
    f"{_AR}.actor.fsdp_config.optimizer_offload": f"{_AR}.actor.optim.offload",
    "critic.fsdp_config.optimizer_offload": "critic.optim.offload",
    f"{_AR}.actor.fsdp_config.ulysses_sequence_parallel_size": f"{_AR}.actor.ulysses_sequence_parallel_size",
    f"{_AR}.ref.fsdp_config.ulysses_sequence_parallel_size": f"{_AR}.ref.ulysses_sequence_parallel_size",
    "critic.fsdp_config.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
    "critic.model.fsdp_config.optimizer_offload": "critic.optim.offload",
    f"{_AR}.ref.fsdp_config.param_offload": f"{_AR}.ref.param_offload",
    "critic.fsdp_config.param_offload": "critic.param_offload",
    "critic.model.fsdp_config.param_offload": "critic.param_offload",
    f"{_AR}.actor.ppo_micro_batch_size": f"{_AR}.actor.ppo_micro_batch_size_per_gpu",
    f"{_AR}.actor.optim.clip_grad": f"{_AR}.actor.grad_clip",
    f"{_AR}.actor.optim.warmup_style": f"{_AR}.actor.optim.lr_scheduler_type",
    f"{_AR}.ref.log_prob_micro_batch_size": f"{_AR}.ref.log_prob_micro_batch_size_per_gpu",
    f"{_AR}.rollout.log_prob_micro_batch_size": f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu",
    f"{_AR}.rollout.prompt_length": "data.max_prompt_length",
    f"{_AR}.rollout.response_length": "data.max_response_length",
    "critic.model_name": "critic.model.path",
    "critic.model.override_config.attn_implementation": "critic.model.attn_implementation",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "reward_model.num_workers": "reward.num_workers",
    "global_profiler.steps": "trainer.profile_steps",
    "global_profiler.save_path": "trainer.profile_dir",
    "reward_model.model_path": "reward_model.model.path",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
    "data.truncation_mode": "data.truncation",
    "data.micro_batch_size_per_gpu": f"{_AR}.actor.ppo_micro_batch_size_per_gpu",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    f"{_AR}.model.partial_pretrain": f"{_AR}.model.path",
    f"{_AR}.actor.optim.lr_scheduler": f"{_AR}.actor.optim.lr_scheduler_type",
    f"{_AR}.actor.optim.warmup_steps_ratio": f"{_AR}.actor.optim.lr_warmup_steps_ratio",
    "data.tool_config_path": f"{_AR}.rollout.multi_turn.tool_config_path",
}
"""Old key → new key, same value. A new key may itself be old: the tables are followed to the end."""

SHORT_FORMS = ("preset", "reward_fn")
"""Renames that are a convenience, not an old name: no notice."""


@dataclass(frozen=True)
class Spread:
    """A key that stands for several, or for another meaning.

    ``become(value)`` gives the settings that replace it, or None where the key keeps its own meaning for this value.
    With ``weak`` each of them gives way to a setting of its own.
    """

    become: Callable[[Any], dict[str, Any] | None]
    why: str
    weak: bool = False


def _number(value: Any) -> float | None:
    """A number, also when spelled as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _flag(value: Any) -> bool | None:
    """True or false, also when spelled as text; None for anything else, which the option itself then refuses."""
    return {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }.get(str(value).lower())


def _micro_batch(value: Any) -> dict[str, Any]:
    return {
        f"{_AR}.actor.ppo_micro_batch_size_per_gpu": value,
        f"{_AR}.ref.log_prob_micro_batch_size_per_gpu": value,
        f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu": value,
        "critic.ppo_micro_batch_size_per_gpu": value,
    }


def _kl_penalty(value: Any) -> dict[str, Any] | None:
    number = _number(value)
    if number is None:
        return None
    if number > 0:
        return {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": number}
    if number == 0:
        return {"algorithm.use_kl_in_reward": False, f"{_AR}.actor.use_kl_loss": False}
    return {"algorithm.kl_ctrl.kl_coef": number}  # a negative coefficient is reported by its bound


def _use_vllm(value: Any) -> dict[str, Any]:
    flag = _flag(value)
    return {f"{_AR}.rollout.name": value if flag is None else "vllm" if flag else "native"}


def _cpu_offload(value: Any) -> dict[str, Any]:
    return {f"{_AR}.actor.optim.offload": value, f"{_AR}.ref.param_offload": value}


def _offload_params(value: Any) -> dict[str, Any]:
    return {f"{_AR}.ref.param_offload": value}


def _quantised(value: Any, kind: str) -> dict[str, Any]:
    flag = _flag(value)
    return {f"{_AR}.model.quantization": value if flag is None else kind if flag else None}


_STAYS = "the policy's weights serve rollout and update, so they stay on their device"


def _algorithm(value: Any) -> dict[str, Any] | None:
    return {"algorithm.name": value} if isinstance(value, str) else None


SPREADS: dict[str, Spread] = {
    f"{_AR}.fsdp_config.cpu_offload": Spread(_cpu_offload, _STAYS),
    f"{_AR}.model.load_in_4bit": Spread(lambda value: _quantised(value, "nf4"), "the type of the frozen base"),
    f"{_AR}.model.load_in_8bit": Spread(lambda value: _quantised(value, "int8"), "the type of the frozen base"),
    f"{_AR}.fsdp_config.offload_params": Spread(_offload_params, _STAYS),
    "algorithm": Spread(_algorithm, "a name is a preset"),
    "trainer.micro_batch_size": Spread(
        _micro_batch, "the micro-batch of actor, critic, reference and log-probs; a *_per_gpu key wins", weak=True
    ),
    "trainer.use_vllm": Spread(_use_vllm, "true is vllm, false is native"),
    "algorithm.kl_penalty": Spread(
        _kl_penalty, "a number is the coefficient of the KL in the reward, 0 means no KL and no reference model"
    ),
}


@dataclass
class Translation:
    """Settings with canonical keys only, the notices that say what changed, and the problems."""

    settings: list[Setting]
    notices: list[str]
    problems: list[str]


def leaf_of(key: str) -> Leaf | None:
    """The option that ``key`` names or, for an option that is a mapping, lies in."""
    if key in LEAVES:
        return LEAVES[key]
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        leaf = LEAVES.get(".".join(parts[:end]))
        if leaf is not None:
            return leaf if leaf.is_mapping else None
    return None


def known_keys() -> list[str]:
    """Every key that is understood, old ones included: what suggestions are drawn from."""
    return [*LEAVES, *RENAMES, *(key for key in SPREADS if key not in LEAVES)]


def translate(settings: Iterable[Setting]) -> Translation:
    """Every setting under its canonical key; order is kept."""
    done = Translation([], [], [])
    for setting in settings:
        _translate_one(setting, done)
    return done


def _translate_one(setting: Setting, done: Translation) -> None:
    key = _follow(setting.key)
    moved = replace(setting, key=key, source=setting.source or (setting.key if key != setting.key else None))
    if (spread := SPREADS.get(key)) and not setting.delete and (became := spread.become(setting.value)) is not None:
        _spread(moved, became, spread, done)
    elif (inert := find_inert(key)) is not None:
        _inert(setting, inert, done)
    elif setting.delete and key in SPREADS and key not in LEAVES:
        done.settings.append(moved)
    elif leaf_of(key) is not None:
        if key != setting.key and setting.key not in SHORT_FORMS:
            done.notices.append(f"'{setting.key}' is now '{key}'")
        done.settings.append(moved)
    elif key in GROUPS:
        _whole_group(setting, key, done)
    else:
        near = near_keys(key, known_keys())
        hint = f"; did you mean {' or '.join(near)}?" if near else "; docs/config.md lists them all"
        done.problems.append(f"'{setting.key}' is not a configuration key{hint}")


def _follow(key: str) -> str:
    """``key`` under its newest name."""
    for _ in range(8):
        if key in RENAMES:
            key = RENAMES[key]
            continue
        group = next((old for old in MOVED_GROUPS if key.startswith(f"{old}.") or key == old), None)
        if group is None or find_inert(key) is not None:
            return key
        key = MOVED_GROUPS[group] + key[len(group) :]
    raise AssertionError(f"the rename tables go round in a circle at {key}")


def _spread(setting: Setting, became: dict[str, Any], spread: Spread, done: Translation) -> None:
    shown = ", ".join(f"{key}={str(value).lower()}" for key, value in became.items()) or "nothing to change"
    done.notices.append(f"'{setting.source or setting.key}={setting.value}' becomes {shown} ({spread.why})")
    source = setting.source or setting.key
    done.settings.extend(
        replace(setting, key=key, value=value, text=None, weak=spread.weak, source=source)
        for key, value in became.items()
    )


def _inert(setting: Setting, inert: Inert, done: Translation) -> None:
    if setting.delete or setting.value is None or inert.accepts(setting.value):
        done.notices.append(f"'{setting.key}' has no effect here: {inert.why}")
    else:
        done.problems.append(f"{setting.key}={setting.value} is not available here: {inert.why}")


def _whole_group(setting: Setting, key: str, done: Translation) -> None:
    if setting.delete or setting.value in (None, {}):
        done.settings.append(replace(setting, key=key, delete=True, value=None))
        return
    names = [leaf.removeprefix(f"{key}.") for leaf in LEAVES if leaf.startswith(f"{key}.")]
    done.problems.append(
        f"{setting.key}={setting.value!r}: '{key}' is a group, set its keys: {', '.join(names[:8])}"
        + (" …" if len(names) > 8 else "")
    )
