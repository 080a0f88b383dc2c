"""Training engines behind one interface, the mini-batch plan, and micro-batches by tokens."""

from verl.train_engine.base import StepReport, TrainEngine
from verl.train_engine.plan import MiniBatch, MiniBatchPlan, make_plan

__all__ = ["MiniBatch", "MiniBatchPlan", "StepReport", "TrainEngine", "make_plan"]
