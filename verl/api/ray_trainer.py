"""RayPPOTrainer: a config dict and ``fit()``, as short verl scripts write it. Only several processes need Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from verl.api.reward_models import RewardModel
from verl.api.settings import is_reward_model
from verl.config import load_config, processes
from verl.config.compat import RENAMES
from verl.config.overrides import spread
from verl.errors import ConfigError
from verl.notices import notice
from verl.trainer.base import Trainer

RUNS = "runs"
_REWARD_KEYS = ("reward_fn", "reward.reward_fn")


class RayPPOTrainer(Trainer):
    """A :class:`verl.Trainer` made from a nested dict.

    Args:
        config: configuration keys (docs/config.md), with the short names of verl's introductions too:
            ``actor_rollout.model_name``, ``trainer.micro_batch_size``, ``algorithm.kl_penalty`` as a number,
            ``use_vllm``, ``reward_fn`` (a function, or a reward model's folder, hub name or object), ...
        step_callback: called with this trainer after every step; its ``global_steps`` and ``metrics`` are the step's.
        train_rows, validation_rows: rows in memory in place of ``data.train_files`` and ``data.val_files``.

    Without ``trainer.default_local_dir`` every run has a new folder, ``runs/ppo-1``, ``runs/ppo-2``, ..., and the link
    ``./actor`` leads to the models of the last one, so that ``./actor/global_step_50`` can be loaded.

    Raises:
        ConfigError: with everything that is wrong with ``config``, before a model is loaded.
    """

    defaults: ClassVar[dict[str, object]] = {}
    """Keys below those of the config."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        step_callback: Callable[[RayPPOTrainer], object] | None = None,
        train_rows: list[dict[str, Any]] | None = None,
        validation_rows: list[dict[str, Any]] | None = None,
    ):
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"{type(self).__name__}(config=...) takes a nested dict of keys, got {type(config).__name__}"
            )
        given = _with_reward_models(config)
        named = {RENAMES.get(key, key) for key, value in given.items() if key != "algorithm" or isinstance(value, str)}
        below = {} if {"algorithm", "algorithm.name"} & named else self.defaults
        emptied = {key: value for key, value in given.items() if value == {}}  # resets a group, so it comes first
        tree = load_config(values={**emptied, **below, **{k: v for k, v in given.items() if k not in emptied}})
        self._has_own_folder = tree.trainer.default_local_dir is None
        if self._has_own_folder:
            tree.trainer.default_local_dir = str(_new_folder(tree.algorithm.name or "ppo"))
        self._step_callback = step_callback
        super().__init__(
            tree,
            train_rows=train_rows,
            validation_rows=validation_rows,
            style="verl_steps",
            callbacks=(_after_step,),  # type: ignore[arg-type]
            stays_open=True,
        )
        if tree.given("trainer.n_gpus_per_node") and self.plan.choice.device.kind == "cpu":
            count = processes(self.config)
            who = "one CPU process trains" if count == 1 else f"{count} CPU processes train"
            notice(
                f"trainer.n_gpus_per_node={tree.trainer.n_gpus_per_node}: there is no GPU that torch can use here, so "
                f"{who}"
            )

    def save(self) -> Path:
        """Write a checkpoint of the steps done; returns its folder, with the model in ``actor``."""
        path = super().save()
        if self._has_own_folder:
            _link(Path("actor"), self.run_dir.path / "actor")
        return path


def _after_step(trainer: RayPPOTrainer, _: dict[str, float]) -> None:
    if trainer._step_callback is not None:
        trainer._step_callback(trainer)


def _with_reward_models(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by dotted key, reward models loaded."""
    flat = {key: value for key, value in spread(config) if key}
    return {
        key: RewardModel(value) if key in _REWARD_KEYS and is_reward_model(value) else value
        for key, value in flat.items()
    }


def _new_folder(name: str) -> Path:
    """``runs/ppo-1``, or the first number after those that are there."""
    numbers = [path.name.rpartition("-")[2] for path in Path(RUNS).glob(f"{name}-*")]
    return Path(RUNS) / f"{name}-{1 + max((int(n) for n in numbers if n.isdecimal()), default=0)}"


def _link(place: Path, target: Path) -> None:
    """Let ``place`` lead to ``target``; what stands there and is not a link of ours stays, with a notice."""
    relative = os.path.relpath(target, place.absolute().parent)
    try:
        if place.is_symlink() and Path(os.readlink(place)).parts[:1] == (RUNS,):
            if os.readlink(place) == relative:
                return
            place.unlink()
        place.symlink_to(relative, target_is_directory=True)
    except OSError as error:
        notice(
            f"./{place} could not be linked to the trained models ({error.strerror or error}): load them from {target}."
        )
