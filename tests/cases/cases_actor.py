"""A policy on one rank, and a recorded batch for it."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import sample_batch

from verl.config.tree import Actor as ActorConfig
from verl.config.tree import PolicyLoss
from verl.models.packing import packed_lengths
from verl.models.settings import ModelSettings
from verl.protocol import DataProto
from verl.single_controller import LocalWorkerGroup
from verl.train_engine.plan import MiniBatchPlan, plan_for
from verl.train_engine.torch_engine import OptimizerSettings
from verl.workers.actor import Actor
from verl.workers.settings import ActorSettings, Cut, RolloutSettings

ROWS = [
    ([7, 8, 9], [10, 11, 12, 1], [1, 1, 1, 1]),
    ([7, 8, 9], [20, 21, 1], [1, 1, 1]),
    ([30, 31], [12, 13], [1, 1]),
    ([30, 31], [14, 15, 16, 17], [1, 0, 1, 1]),
]


def make_actor(model: Path, *, lr: float = 1e-2, update_rows=None, log_prob_rows=None, mode="vanilla", **loss):
    """A worker group with one actor; ``loss`` are keys of ``actor_rollout_ref.actor``."""
    settings = ActorSettings(
        model=ModelSettings(str(model)),
        optimizer=OptimizerSettings(lr=lr, kind="sgd", weight_decay=0.0),
        rollout=RolloutSettings(response_width=8),
        loss=ActorConfig(policy_loss=PolicyLoss(loss_mode=mode), **loss),
        update_cut=Cut(max_rows=update_rows),
        log_prob_cut=Cut(max_rows=log_prob_rows),
    )
    return LocalWorkerGroup(Actor, settings)


def recorded(advantages: tuple[float, ...] = (1.0, -1.0, 0.5, -0.5)) -> DataProto:
    """Four recorded rows of two prompts with one advantage a row."""
    batch = sample_batch(ROWS)
    mask = batch.batch["response_mask"].bool()
    grid = torch.tensor(advantages)[:, None].expand(mask.shape)
    batch.batch["advantages"] = grid.masked_fill(~mask, float("nan"))
    batch.batch["rollout_log_probs"] = torch.full(mask.shape, -1.0)
    return batch


def plan_of(batch: DataProto, prompts: int = 2, epochs: int = 1) -> MiniBatchPlan:
    return plan_for(batch, packed_lengths(batch), mini_batch_prompts=prompts, epochs=epochs)


def live(group) -> dict[str, torch.Tensor]:
    """A copy of the weights."""
    return {name: value.clone() for name, value in group.state_dict().items() if name.startswith("live/")}


def moved(before: dict[str, torch.Tensor], group) -> float:
    """The largest change of any weight."""
    return max(float((before[name] - now).abs().max()) for name, now in live(group).items())
