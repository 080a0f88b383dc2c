"""Rollout engines behind one interface: submit, poll, abort, and a batch call on top."""

from verl.rollout.base import Completion, Request, RolloutEngine, SamplingParams

__all__ = ["Completion", "Request", "RolloutEngine", "SamplingParams"]
