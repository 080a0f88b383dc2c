"""Supervised fine-tuning on one rank: the likelihood of given answers."""

from __future__ import annotations

from typing import Any

import torch

from verl.algorithms.aggregation import agg_loss, use_counts
from verl.algorithms.masked import as_mask
from verl.metrics import Metrics
from verl.models.policy import log_probs
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.train_engine.plan import MiniBatch, MiniBatchPlan
from verl.workers.settings import ActorSettings
from verl.workers.trained import TrainedWorker


class SFTUpdates(TrainedWorker):
    """What an actor needs to learn from answers."""

    settings: ActorSettings
    loss: Any

    @register(Dispatch.DP_PLAN, mode="train")
    def update_sft(self, batch: DataProto, plan: MiniBatchPlan) -> Metrics:
        """Take every optimizer step of the plan. Needs the sequence keys; trained tokens have ``response_mask`` 1."""
        metrics = Metrics()
        for mini in plan.mini_batches:
            report = self.fit_step(
                batch, mini.rows, self.settings.update_cut, lambda micro, mini=mini: self._sft_loss(micro, mini)
            )
            self.record(metrics, report, len(plan.mini_batches))
            learned = as_mask(batch.batch["response_mask"])[torch.from_numpy(mini.rows)]
            metrics.add("train/tokens", float(learned.sum()), reduce="sum")
        self.engine.schedule_step()
        return metrics

    def _sft_loss(self, micro: DataProto, mini: MiniBatch) -> tuple[torch.Tensor, Metrics]:
        # 1 between steps of reinforcement learning too: these answers are not samples of the rollout's temperature
        log_prob, _ = log_probs(self.model, micro, temperature=1.0)
        mask = micro.batch["response_mask"].to(log_prob.device)
        metrics = Metrics()
        with use_counts(mini.counts):
            loss = agg_loss(-log_prob, mask, self.loss.loss_agg_mode, loss_scale_factor=self.loss.loss_scale_factor)
        metrics.add("train/loss", loss.detach(), reduce="sum")
        return loss, metrics
