"""Supervised fine-tuning on one rank: the likelihood of given answers."""

from __future__ import annotations

from typing import Any

import torch

from verl.algorithms.aggregation import agg_loss, use_counts
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.train_engine.plan import MiniBatch, MiniBatchPlan
from verl.workers.settings import ActorSettings
from verl.workers.trained import TrainedWorker


class SFTUpdates(TrainedWorker):
    """What an actor needs to learn from answers."""

    settings: ActorSettings
    loss: Any

    def _log_probs(self, micro: DataProto, with_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError

    @register(Dispatch.DP_PLAN, mode="train")
    def update_sft(self, batch: DataProto, plan: MiniBatchPlan) -> Metrics:
        """Take every optimizer step of the plan. Needs the sequence keys; trained tokens have ``response_mask`` 1."""
        metrics = Metrics()
        for mini in plan.mini_batches:
            report = self.fit_step(
                batch, mini.rows, self.settings.update_cut, lambda micro, mini=mini: self._sft_loss(micro, mini)
            )
            self.record(metrics, report, len(plan.mini_batches))
        self.engine.schedule_step()
        return metrics

    def _sft_loss(self, micro: DataProto, mini: MiniBatch) -> tuple[torch.Tensor, Metrics]:
        log_prob, _ = self._log_probs(micro)
        mask = micro.batch["response_mask"].to(log_prob.device)
        metrics = Metrics()
        with use_counts(mini.counts):
            loss = agg_loss(-log_prob, mask, self.loss.loss_agg_mode, loss_scale_factor=self.loss.loss_scale_factor)
        metrics.add("train/loss", loss.detach(), reduce="sum")
        metrics.add("train/tokens", mask.sum(), reduce="sum")
        return loss, metrics
