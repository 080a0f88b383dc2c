"""The native rollout engine: continuous batching over a paged cache, on the live weights."""

from verl.rollout.native.engine import NativeEngine
from verl.rollout.native.settings import NativeSettings

__all__ = ["NativeEngine", "NativeSettings"]
