"""From a YAML file, a dict and command-line overrides to one :class:`Config`.

Weakest first: defaults, preset, file, dict, overrides. A stronger layer wins whatever the spelling; within a layer two
spellings of one option must agree. Every problem is collected before anything is raised.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from verl.config import compat
from verl.config.coerce import Mismatch, coerce, did_you_mean
from verl.config.fields import Leaf, nest, put
from verl.config.names import REFERENCE_FREE
from verl.config.overrides import FILE, PRESET, VALUES, Setting, last_of_each, parse_overrides, spread
from verl.config.presets import FAMILIES, FAMILY_PRESETS, PRESETS
from verl.config.suggest import near_path
from verl.config.tree import LEAVES, Config
from verl.errors import ConfigError
from verl.notices import notice

_KL_PENALTY, _COEFFICIENT = "algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"
_MISSING = "???"
"""OmegaConf's mark for a value that somebody else must give."""


def load_config(
    overrides: Iterable[str] = (),
    *,
    file: str | os.PathLike[str] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration from everything the user gave.

    Args:
        overrides: Hydra overrides, for example ``["data.train_batch_size=8", "+critic.optim.lr=1e-5"]``.
        file: a YAML file with any part of the tree.
        values: a nested dict with any part of the tree (or an OmegaConf config); Python functions survive.

    Raises:
        ConfigError: with all problems of reading: syntax, unknown keys, wrong types, contradictions.
            Whether the values make sense together is :func:`verl.config.validate`'s business.
    """
    problems: list[str] = []
    settings = [*_from_file(file, problems), *_from_values(values, VALUES, problems)]
    parsed, unreadable = parse_overrides(overrides)
    settings += last_of_each(parsed)
    problems += unreadable
    settings = _interpolate([s for s in settings if not (isinstance(s.value, str) and s.value == _MISSING)], problems)
    translated = compat.translate(settings)
    problems += translated.problems
    chosen = _choose(_preset(translated.settings, problems) + translated.settings, problems)
    config = _build(chosen, problems)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    of_ppo = FAMILIES.get(config.algorithm.name or "", "ppo") == "ppo"
    for text in translated.notices:
        if of_ppo or not text.startswith(f"'{_KL_PENALTY}="):  # which tells what becomes of it in PPO
            notice(text)
    if of_ppo:
        _kl_follows_coefficient(config)
    else:
        _coefficient_without_ppo(config, translated.settings)
    return config


def _from_file(file: str | os.PathLike[str] | None, problems: list[str]) -> list[Setting]:
    if file is None:
        return []
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = os.path.expanduser(os.path.expandvars(os.fspath(file)))
    try:
        content = OmegaConf.load(path)
    except FileNotFoundError:
        near = near_path(path)
        problems.append(f"no such configuration file: {path}" + (f"; did you mean {near}?" if near else ""))
        return []
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        problems.append(f"configuration file {path} cannot be read: {' '.join(str(error).split())}")
        return []
    return _from_values(content, FILE, problems, where=f"configuration file {path}")


def _from_values(values: Any, layer: int, problems: list[str], where: str = "values") -> list[Setting]:
    if values is None:
        return []
    from omegaconf import OmegaConf

    if OmegaConf.is_config(values):
        values = OmegaConf.to_container(values, resolve=False)
    if not isinstance(values, Mapping):
        problems.append(f"{where} must be a mapping of configuration keys, got {type(values).__name__}")
        return []
    return [Setting(key, value, layer) for key, value in spread(values) if key]


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(_has_interpolation(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_has_interpolation(item) for item in value)


def _interpolate(settings: list[Setting], problems: list[str]) -> list[Setting]:
    """Replace ``${other.key}`` by its value: what was given under any spelling, else the default."""
    if not any(_has_interpolation(setting.value) for setting in settings):
        return settings
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    plain = compat.translate(s for s in settings if not _has_interpolation(s.value) and not s.delete)
    flat = {key: leaf.default for key, leaf in LEAVES.items()}
    flat |= {s.key: s.value for s in plain.settings}
    flat |= {s.key: s.value for s in settings if not s.delete}
    try:
        tree = OmegaConf.create(nest(flat), flags={"allow_objects": True})
    except OmegaConfBaseException as error:  # an interpolation that is not even one
        problems.append(f"{error.full_key}: the value with '${{' cannot be read: {str(error).splitlines()[0]}")
        return [setting for setting in settings if not _has_interpolation(setting.value)]
    resolved: list[Setting] = []
    for setting in settings:
        if not _has_interpolation(setting.value):
            resolved.append(setting)
            continue
        try:
            value = OmegaConf.select(tree, setting.key, throw_on_resolution_failure=True)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, ValueError) as error:
            problems.append(f"{setting.key}={setting.value}: {str(error).splitlines()[0]}")
            continue
        resolved.append(replace(setting, value=value, text=None))
    return resolved


def _preset(settings: list[Setting], problems: list[str]) -> list[Setting]:
    names = [s for s in settings if s.key == "algorithm.name" and not s.delete]
    if not names:
        return []
    top = max(setting.layer for setting in names)
    name = [setting for setting in names if setting.layer == top][-1].value
    if name is None:
        return []
    presets = {**PRESETS, **FAMILY_PRESETS}
    if not isinstance(name, str) or name not in presets:
        known = ", ".join(presets)
        problems.append(f"algorithm.name={name!r} is not a preset{did_you_mean(name, presets)}; there are {known}")
        return []
    return [Setting(key, value, PRESET) for key, value in presets[name].items()]


def _choose(settings: list[Setting], problems: list[str]) -> dict[str, list[Setting]]:
    """For each option, the settings that decide it: one, or several for an option that is a mapping."""
    alive: list[Setting] = []
    for setting in settings:
        if not setting.delete:
            alive.append(setting)
            continue
        if setting.value is not None and not any(s.key == setting.key and s.value == setting.value for s in alive):
            problems.append(f"'~{setting.key}={setting.value}' removes nothing: the key does not have that value")
        alive = [s for s in alive if not _covers(setting, s)]
    by_option: dict[str, list[Setting]] = {}
    for setting in alive:
        leaf = compat.leaf_of(setting.key)
        assert leaf is not None, setting.key
        by_option.setdefault(leaf.key, []).append(setting)
    for key, group in by_option.items():
        direct = [s for s in group if not s.weak]
        by_option[key] = direct or group
    return by_option


def _covers(delete: Setting, setting: Setting) -> bool:
    same = setting.key == delete.key or setting.key.startswith(f"{delete.key}.")
    return same or delete.key == setting.source


def _build(chosen: Mapping[str, list[Setting]], problems: list[str]) -> Config:
    config = Config(explicit=frozenset(key for key, group in chosen.items() if group[-1].layer != PRESET))
    for key, group in chosen.items():
        leaf = LEAVES[key]
        try:
            value = _merged(leaf, group) if leaf.is_mapping else _agreed(leaf, group)
        except Mismatch as error:
            problems.append(str(error))
        except ConfigError as error:
            problems.extend(f"{key}: {problem}" for problem in error.problems)
        else:
            put(config, key, value)
    return config


def _agreed(leaf: Leaf, group: list[Setting]) -> Any:
    """The value of the strongest layer, where its spellings agree."""
    top = max(setting.layer for setting in group)
    by_spelling = {s.source or s.key: s for s in group if s.layer == top}
    values = {spelling: coerce(leaf, s.value, s.text) for spelling, s in by_spelling.items()}
    (first, value), *others = values.items()
    for spelling, other in others:
        if other != value:
            raise Mismatch(
                f"'{first}' and '{spelling}' contradict each other: "
                f"they set {leaf.key} to {value!r} and {other!r}; give one"
            )
    return value


def _merged(leaf: Leaf, group: list[Setting]) -> dict[str, Any]:
    """An option that is a mapping takes what every layer adds to it."""
    merged = dict(leaf.default)
    for setting in sorted(group, key=lambda s: s.layer):
        below = setting.key.removeprefix(leaf.key).lstrip(".")
        if below:
            _merge(merged, nest({below: setting.value}))
        else:
            _merge(merged, coerce(leaf, setting.value if setting.value is not None else {}))
    return merged


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _kl_follows_coefficient(config: Config) -> None:
    """A KL coefficient that was asked for by number is used, unless the user said where (or that it is not)."""
    coefficient = config.algorithm.kl_ctrl.kl_coef
    if (
        config.given("algorithm.kl_ctrl.kl_coef")
        and coefficient > 0
        and not config.given("algorithm.use_kl_in_reward")
        and not config.actor_rollout_ref.actor.use_kl_loss
    ):
        config.algorithm.use_kl_in_reward = True
        notice(
            f"algorithm.kl_ctrl.kl_coef={coefficient:g} turns the KL in the reward on "
            "(algorithm.use_kl_in_reward=false keeps it off)"
        )


def _coefficient_without_ppo(config: Config, settings: list[Setting]) -> None:
    """The KL coefficient of a PPO script is the ``beta`` of a preference loss, and nothing to other families."""
    name, beta = config.algorithm.name or "", config.preference.beta
    numbers = {s.key: s.value for s in settings if s.source == _KL_PENALTY}  # a number in place of an estimator
    typed = _KL_PENALTY if numbers else _COEFFICIENT
    if not numbers and not config.given(_COEFFICIENT):
        config.algorithm.use_kl_in_reward = False
        return
    given = {s.key for s in settings if s.source != _KL_PENALTY}
    config.explicit = config.explicit - (set(numbers) - given)
    config.algorithm.use_kl_in_reward = False
    coefficient = config.algorithm.kl_ctrl.kl_coef if _COEFFICIENT in given or _COEFFICIENT in numbers else 0.0
    if "preference" not in FAMILIES[name]:
        notice(f"{typed} is given and not used by {name}")
    elif coefficient == 0:
        if config.preference.loss_type not in REFERENCE_FREE:
            notice(
                f"{typed}=0 switches nothing off in {name}: its pull to the reference is preference.beta, which is "
                f"{beta:g}; {', '.join(sorted(REFERENCE_FREE))} learn without a reference"
            )
    elif not config.given("preference.beta"):
        config.preference.beta = coefficient
        notice(f"the KL coefficient {coefficient:g} is the beta of {name}: preference.beta")
    elif beta != coefficient:
        raise ConfigError(
            f"algorithm.kl_ctrl.kl_coef={coefficient:g} (algorithm.kl_penalty) and preference.beta={beta:g} both set "
            "the pull to the reference: give one"
        )
