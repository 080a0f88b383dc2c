"""The root of the tree."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from verl.config.fields import group
from verl.config.tree.actor_rollout import ActorRolloutRef
from verl.config.tree.algorithm import Algorithm
from verl.config.tree.cluster import RayKwargs
from verl.config.tree.critic import Critic
from verl.config.tree.data import Data
from verl.config.tree.preference import SFT, Distillation, Preference
from verl.config.tree.reward import Reward
from verl.config.tree.reward_model import RewardModel
from verl.config.tree.trainer import Trainer


@dataclass(slots=True)
class Config:
    """The whole configuration. ``explicit`` records which keys the user gave; it is not an option."""

    data: Data = group(Data, "Data sets and batches.")
    actor_rollout_ref: ActorRolloutRef = group(ActorRolloutRef, "Policy, reference and generation.")
    critic: Critic = group(Critic, "The value model of PPO.")
    reward: Reward = group(Reward, "Scoring.")
    reward_model: RewardModel = group(RewardModel, "Scoring with a model, and training one.")
    preference: Preference = group(Preference, "Learning from pairs and labels.")
    sft: SFT = group(SFT, "SFT steps in between (mixed training).")
    distillation: Distillation = group(Distillation, "Learning from a teacher.")
    algorithm: Algorithm = group(Algorithm, "What is optimised.")
    trainer: Trainer = group(Trainer, "The run.")
    ray_kwargs: RayKwargs = group(RayKwargs, "Ray, where a run has more than one process.")
    explicit: frozenset[str] = frozenset()

    def given(self, key: str) -> bool:
        """Whether the user set this dotted key (a preset does not count)."""
        return key in self.explicit
