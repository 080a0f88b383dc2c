"""The value model on one rank."""

from __future__ import annotations

import torch
from torch import nn

from verl.algorithms.aggregation import use_counts
from verl.algorithms.value_loss import value_loss
from verl.metrics import Metrics
from verl.models.offload import HostWeights
from verl.models.value import load_value_model
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.train_engine.plan import MiniBatch, MiniBatchPlan
from verl.train_engine.registry import make_train_engine
from verl.workers.forward import over_micro_batches
from verl.workers.settings import CriticSettings
from verl.workers.trained import TrainedWorker


class Critic(TrainedWorker):
    """Values for GAE and their regression to the returns."""

    role = "critic"

    def __init__(self, settings: CriticSettings, *, model: nn.Module | None = None):
        self.settings = settings
        self.model = load_value_model(settings.model) if model is None else model
        self.engine = make_train_engine(settings.optimizer, self.model, self.comm, settings.parallel)
        if settings.model.param_offload and self.engine.lockstep is None:
            self.host_weights = HostWeights(self.model, frozen=False)

    @register(Dispatch.DP_COMPUTE_PROTO, mode="train")
    def compute_values(self, batch: DataProto) -> DataProto:
        """``values`` (B, R) of the states before each trained token."""
        with self.weights_here():
            grids = over_micro_batches(
                batch,
                self.settings.forward_cut,
                lambda micro: {"values": self.model(micro)},
                self.budget("forward", "the critic's values"),
                self.engine.lockstep,
            )
        return DataProto.from_dict(tensors=grids, non_tensors={"sample_id": batch.non_tensor_batch["sample_id"]})

    @register(Dispatch.DP_PLAN, mode="train")
    def update(self, batch: DataProto, plan: MiniBatchPlan) -> Metrics:
        """Take every optimizer step of the plan. Needs responses, response_mask, values, returns."""
        metrics = Metrics()
        with self.weights_here():
            for mini in plan.mini_batches:
                report = self.fit_step(
                    batch, mini.rows, self.settings.update_cut, lambda micro, mini=mini: self._loss(micro, mini)
                )
                self.record(metrics, report, len(plan.mini_batches))
        self.engine.schedule_step()
        return metrics

    def _loss(self, micro: DataProto, mini: MiniBatch) -> tuple[torch.Tensor, Metrics]:
        predicted = self.model(micro)
        tensors = micro.batch.to(predicted.device)
        with use_counts(mini.counts):
            loss, metrics = value_loss(
                predicted,
                tensors["returns"],
                tensors["values"],
                tensors["response_mask"],
                self.settings.cliprange_value,
                self.settings.loss_agg_mode,
                loss_scale_factor=self.settings.loss_scale_factor,
            )
        metrics.add("critic/vf_loss", loss, reduce="sum")
        return loss, metrics

    @register(Dispatch.ONE_TO_ALL)
    def save_pretrained(self, folder: str) -> None:
        self.export(None, folder, lambda: self.model.save_pretrained(folder))
