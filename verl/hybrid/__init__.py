"""One set of weights for training and for rollout: the twin, and switching between the two uses."""

from verl.hybrid.switch import OneDeviceHybrid, ShardedHybrid, SplitHybrid, make_hybrid
from verl.hybrid.twin import make_twin

__all__ = ["OneDeviceHybrid", "ShardedHybrid", "SplitHybrid", "make_hybrid", "make_twin"]
