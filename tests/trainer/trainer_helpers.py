"""A training run small enough for a test: a tiny random model on sums, rows in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_rewards import digits_share

from verl.config import load_config
from verl.data import arithmetic_task
from verl.trainer.base import Trainer

SETTINGS: dict[str, Any] = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 32,
    "data.max_response_length": 5,
    "actor_rollout_ref.rollout.n": 3,
    "actor_rollout_ref.rollout.stop": ["\n"],
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.model.dtype": "float32",
    "critic.optim.lr": 1e-3,
    "trainer.total_training_steps": 2,
    "trainer.val_before_train": False,
    "trainer.save_final": False,
    "trainer.logger": [],
    "reward.num_workers": 1,
}


def make_trainer(model: Path, folder: Path, *, algorithm: str = "grpo", validation: bool = False, **changes) -> Trainer:
    """A trainer over the arithmetic task. ``changes`` are configuration values, with ``__`` for dots."""
    values = {
        **SETTINGS,
        "algorithm.name": algorithm,
        "actor_rollout_ref.model.path": str(model),
        "trainer.default_local_dir": str(folder),
        "reward.reward_fn": digits_share,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return Trainer(
        load_config(values=values),
        train_rows=arithmetic_task("train", 5),
        validation_rows=arithmetic_task("validation", 5) if validation else None,
    )


def weights(trainer: Trainer, role: str = "actor") -> dict[str, Any]:
    """A copy of the live weights."""
    state = getattr(trainer.roles, role).state_dict()
    return {name: value.clone() for name, value in state.items() if name.startswith("live/")}
