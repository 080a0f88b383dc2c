"""The tree of options, one file for each top-level key; :class:`Config` is the root."""

from __future__ import annotations

from verl.config.fields import Leaf, groups, walk
from verl.config.tree.actor_rollout import (
    Actor,
    ActorRolloutRef,
    Model,
    Optim,
    PolicyLoss,
    Ref,
    Rollout,
    ValKwargs,
)
from verl.config.tree.algorithm import Algorithm, FilterGroups, KLControl, RolloutCorrection
from verl.config.tree.critic import Critic, CriticModel, CriticOptim
from verl.config.tree.data import CustomClass, Data
from verl.config.tree.megatron import MegatronConfig, MegatronSplit
from verl.config.tree.preference import SFT, Distillation, Preference
from verl.config.tree.reward import CustomRewardFunction, OverlongBuffer, Reward
from verl.config.tree.reward_model import RewardModel, RewardModelModel
from verl.config.tree.root import Config
from verl.config.tree.trainer import Trainer

LEAVES: dict[str, Leaf] = {leaf.key: leaf for leaf in walk(Config)}
"""Every option by its dotted key."""

GROUPS: dict[str, str] = dict(groups(Config))
"""Every group by its dotted key, with what it is."""

__all__ = [
    "GROUPS",
    "LEAVES",
    "SFT",
    "Actor",
    "ActorRolloutRef",
    "Algorithm",
    "Config",
    "Critic",
    "CriticModel",
    "CriticOptim",
    "CustomClass",
    "CustomRewardFunction",
    "Data",
    "Distillation",
    "FilterGroups",
    "KLControl",
    "MegatronConfig",
    "MegatronSplit",
    "Model",
    "Optim",
    "OverlongBuffer",
    "PolicyLoss",
    "Preference",
    "Ref",
    "Reward",
    "RewardModel",
    "RewardModelModel",
    "Rollout",
    "RolloutCorrection",
    "Trainer",
    "ValKwargs",
]
