"""What all trained roles share: their engine's state goes out and comes in through rank 0."""

from __future__ import annotations

import torch

from verl.metrics import Metrics
from verl.single_controller import Dispatch, Worker, register
from verl.train_engine.base import StepReport
from verl.train_engine.torch_engine import TorchEngine


class TrainedWorker(Worker):
    """A worker with a training engine. ``role`` prefixes its metrics."""

    role: str
    engine: TorchEngine

    def record(self, metrics: Metrics, report: StepReport, optimizer_steps: int) -> None:
        """Take one optimizer step of an update into ``metrics``.

        Losses are summed over the micro-batches of a step and averaged over the steps of the update.
        """
        metrics.merge(report.metrics.with_scaled_sums(1 / optimizer_steps))
        metrics.add(f"{self.role}/grad_norm", report.grad_norm)
        metrics.add(f"{self.role}/lr", report.lr, reduce="last")
        metrics.add(f"{self.role}/skipped_steps", float(report.skipped), reduce="sum")

    @register(Dispatch.RANK_ZERO)
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Live weights, masters, moments and counters by name."""
        return self.engine.state_dict()

    @register(Dispatch.ONE_TO_ALL)
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Write a state of :meth:`state_dict` into the existing weights."""
        self.engine.load_state_dict(state)
