"""Does a configuration make sense? Every problem is found before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from verl.config import names
from verl.config.coerce import Mismatch, coerce, did_you_mean, out_of_bounds
from verl.config.derived import resolve
from verl.config.fields import Leaf, get
from verl.config.files import missing_files
from verl.config.rules import advice, contradictions
from verl.config.tree import LEAVES, Config
from verl.errors import ConfigError
from verl.notices import notice

_CUSTOM = ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode")
"""Options that also take names which a user's file registers."""


def validate(
    config: Config,
    *,
    need_data: bool = True,
    need_model: bool = True,
    custom_names: Collection[str] = (),
    has_validation: bool | None = None,
) -> None:
    """Raise if the configuration cannot work; tell the user what is odd but allowed.

    Args:
        need_data: ``data.train_files`` must be set (False: the caller brings the data).
        need_model: ``actor_rollout_ref.model.path`` must be set (False: the caller brings the model).
        custom_names: estimators and losses registered besides the built-in ones.
        has_validation: there are validation rows; None: if ``data.val_files`` names some.

    Raises:
        ConfigError: with ALL problems: types, names, bounds, contradictions, missing files.
    """
    if has_validation is None:
        has_validation = bool(config.data.val_files)
    problems = list(_each_option(config, custom_names))
    if not problems:  # the rules below compare numbers, so types and names come first ...
        problems += contradictions(resolve(config), has_validation=has_validation)
    problems += missing_files(config, need_data=need_data, need_model=need_model)
    if problems:
        raise ConfigError(problems)
    for text in advice(config, has_validation=has_validation):
        notice(text)


def _each_option(config: Config, custom_names: Collection[str]) -> Iterator[str]:
    for key, leaf in LEAVES.items():
        value = get(config, key)
        if (problem := _wrong_type(leaf, value)) is not None:
            yield problem
        elif key in _CUSTOM:
            yield from _custom_name(config, leaf, value, custom_names)
        elif (problem := out_of_bounds(leaf, value)) is not None:
            reason = names.UNAVAILABLE.get(value) if isinstance(value, str) else None
            yield f"{key}={value} is not available here: {reason}" if reason else problem
    yield from _betas(config)


def _wrong_type(leaf: Leaf, value: Any) -> str | None:
    """What Python code put where it does not belong."""
    try:
        coerce(leaf, value)
    except Mismatch as error:
        return str(error)
    except ConfigError as error:
        return f"{leaf.key}: {error}"
    return None


def _custom_name(config: Config, leaf: Leaf, value: str, custom_names: Collection[str]) -> Iterator[str]:
    known = leaf.about.choices or ()
    if value in known or value in custom_names:
        return
    if config.algorithm.custom_path is not None and not custom_names:
        return  # the user's file registers names when it is loaded; they are looked up then
    if value in names.UNAVAILABLE:
        yield f"{leaf.key}={value} is not available here: {names.UNAVAILABLE[value]}"
        return
    there = ", ".join([*known, *custom_names])
    yield (
        f"{leaf.key}={value!r} does not exist{did_you_mean(value, [*known, *custom_names])}; there are {there} "
        "(algorithm.custom_path names a file that registers your own)"
    )


def _betas(config: Config) -> Iterator[str]:
    for prefix in ("actor_rollout_ref.actor.optim", "critic.optim"):
        betas = get(config, f"{prefix}.betas")
        if not (
            isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, float) and 0 <= b < 1 for b in betas)
        ):
            yield f"{prefix}.betas={betas}: expected two numbers from 0 to below 1"
