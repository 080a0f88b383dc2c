"""Runs over pairs, labels and answers, small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl.config import load_config
from verl.trainer.base import Trainer

SETTINGS: dict[str, Any] = {
    "data.train_batch_size": 4,
    "data.max_length": 96,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.model.dtype": "float32",
    "trainer.total_training_steps": 3,
    "trainer.val_before_train": False,
    "trainer.save_final": False,
    "trainer.logger": [],
}


def pairs(count: int = 8) -> list[dict[str, Any]]:
    """Right and wrong sums, of unequal lengths."""
    rows = []
    for a in range(count):
        b = (a * 3) % 7
        rows.append({"prompt": f"{a}+{b}=", "chosen": f"{a + b}" + "." * (a % 3), "rejected": f"{a + b + 1}, or so"})
    return rows


def labelled(count: int = 8) -> list[dict[str, Any]]:
    rows = []
    for pair in pairs(count):
        rows.append({"prompt": pair["prompt"], "completion": pair["chosen"], "label": True})
        rows.append({"prompt": pair["prompt"], "completion": pair["rejected"], "label": False})
    return rows


def answers(count: int = 8) -> list[dict[str, Any]]:
    return [{"prompt": pair["prompt"], "response": pair["chosen"]} for pair in pairs(count)]


def make_learner(model: Path, folder: Path, algorithm: str, rows: Any, *, validation=None, stays_open=False, **changes):
    """A trainer. ``changes`` are configuration values, with ``__`` for dots."""
    values = {
        **SETTINGS,
        "algorithm.name": algorithm,
        "actor_rollout_ref.model.path": str(model),
        "trainer.default_local_dir": str(folder),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return Trainer(load_config(values=values), train_rows=rows, validation_rows=validation, stays_open=stays_open)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = trainer.roles.actor.state_dict()
    return {name: value.clone() for name, value in state.items() if name.startswith("live/")}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        difference = float((a[name] - b[name]).abs().max())
        assert difference <= tolerance, f"{name} differs by {difference}"


def two_ranks(monkeypatch) -> None:
    """From now on every worker group has two ranks, threads of this process, through the same split and collect."""
    from verl.single_controller import LocalWorkerGroup
    from verl.trainer import groups, roles

    def group(worker_cls, *args, **kwargs):
        return LocalWorkerGroup(worker_cls, *args, world_size=2, **kwargs)

    for module in (groups, roles):
        monkeypatch.setattr(module, "LocalWorkerGroup", group, raising=False)
