"""The name under which reward models are given to the Python face."""

from verl.workers.reward_scorer import RewardModel

__all__ = ["RewardModel"]
