"""What all trained roles share: their engine's state goes out and comes in through rank 0."""

from __future__ import annotations

import functools
import time

import numpy as np
import torch

from verl.metrics import Metrics
from verl.models.packing import computed_tokens, rows_of
from verl.protocol import DataProto
from verl.single_controller import Dispatch, Worker, register
from verl.train_engine.base import LossOf, StepReport
from verl.train_engine.torch_engine import TorchEngine
from verl.workers.fitting import TokenBudget, redo_until_it_fits
from verl.workers.forward import cut_rows
from verl.workers.settings import Cut
from verl.workers.utilisation import Utilisation


class TrainedWorker(Worker):
    """A worker with a training engine. ``role`` prefixes its metrics."""

    role: str
    engine: TorchEngine

    @functools.cached_property
    def utilisation(self) -> Utilisation:
        return Utilisation(self.engine.module)

    def budget(self, name: str, phase: str) -> TokenBudget:
        """The token budget of a phase: ``update`` or ``forward``; what it learns is saved with the engine's state."""
        device = next(self.engine.module.parameters()).device
        return TokenBudget(phase, name, self.engine.learned_tokens, device)

    def fit_step(
        self,
        batch: DataProto,
        rows: np.ndarray,
        cut: Cut,
        loss_of: LossOf[DataProto],
        columns: dict[str, torch.Tensor] | None = None,
    ) -> StepReport:
        """One optimizer step over ``rows``, taken again with smaller micro-batches if memory runs out.

        Args:
            columns: more tensors of the whole batch, by key, that the loss reads.
        """

        tokens = rows_of(batch)

        def attempt(parts: list[np.ndarray]) -> StepReport:
            micros, started = [], time.perf_counter()
            for part in parts:
                micro = batch.select_idxs(part)
                for key, values in (columns or {}).items():
                    micro.batch[key] = values[torch.from_numpy(part)]
                micros.append(micro)
            report = self.engine.train_step(micros, loss_of)
            for part in parts:
                self.utilisation.add(*computed_tokens([tokens[i] for i in part]))
            seconds = time.perf_counter() - started
            share = self.utilisation.of(seconds)
            if share is not None:
                report.metrics.add(f"perf/mfu/{self.role}", share, weight=seconds)
            return report

        budget = self.budget("update", f"the update of the {self.role}")
        lengths = np.array([row.packed_length for row in tokens], dtype=np.int64)
        return redo_until_it_fits(
            budget, cut, attempt, lambda smaller: cut_rows(batch, smaller, rows), lengths, self.comm
        )

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
