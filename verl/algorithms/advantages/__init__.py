"""Advantage estimators; importing the package registers them all.

Signature: ``fn(token_level_rewards (B, R), response_mask (B, R), *, ...) -> (advantages, returns)``, both (B, R). What
an estimator needs beyond the two (index, values, reward_baselines, config, ...) is found by name: `compute_advantage`.
"""

from verl.algorithms.advantages.compute import compute_advantage
from verl.algorithms.advantages.gae import gae, gae_unwhitened
from verl.algorithms.advantages.group_relative import gpg, grpo, grpo_passk, opo, rloo
from verl.algorithms.advantages.reinforce import reinforce_plus_plus, reinforce_plus_plus_baseline, remax

__all__ = [
    "compute_advantage",
    "gae",
    "gae_unwhitened",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
]
