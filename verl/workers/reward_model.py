"""Training a reward model on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from verl.algorithms.preference import reward_model_loss
from verl.metrics import Metrics
from verl.models.loading import load_tokenizer
from verl.models.score import at_the_end, load_score_model
from verl.models.settings import ModelSettings
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.train_engine.optimizers import OptimizerSettings
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.plan import MiniBatch, MiniBatchPlan
from verl.train_engine.registry import make_train_engine
from verl.workers.forward import over_micro_batches
from verl.workers.pairs import interleaved
from verl.workers.settings import Cut
from verl.workers.trained import TrainedWorker


@dataclass(frozen=True)
class RewardModelSettings:
    """``center``: weight of the term that keeps scores around 0."""

    model: ModelSettings
    optimizer: OptimizerSettings
    center: float = 0.0
    tokenizer_path: str | None = None
    chat_template: str | None = None
    update_cut: Cut = field(default_factory=Cut)
    forward_cut: Cut = field(default_factory=Cut)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)


class RewardModelLearner(TrainedWorker):
    """Bradley-Terry on pairs (:mod:`verl.workers.pairs`)."""

    role = "actor"  # the prefix of gradient norm and rate, as for every other model that is trained

    def __init__(self, settings: RewardModelSettings, *, model: nn.Module | None = None):
        self.settings = settings
        self.tokenizer = load_tokenizer(
            settings.tokenizer_path or settings.model.path,
            trust_remote_code=settings.model.trust_remote_code,
            chat_template=settings.chat_template,
        )
        self.pad_id = int(self.tokenizer.pad_token_id)
        self.model = load_score_model(settings.model, self.tokenizer) if model is None else model
        self.engine = make_train_engine(settings.optimizer, self.model, self.comm, settings.parallel)

    @register(Dispatch.DP_COMPUTE_PROTO, mode="train")
    def compute_scores(self, batch: DataProto) -> DataProto:
        """``scores`` (B, 1) of the rows of a sample batch."""
        grids = over_micro_batches(
            at_the_end(batch, self.pad_id),
            self.settings.forward_cut,
            lambda micro: {"scores": self._scores(micro)[:, None]},
            self.budget("forward", "the reward model's scores"),
            self.engine.lockstep,
        )
        return DataProto.from_dict(tensors=grids, non_tensors={"sample_id": batch.non_tensor_batch["sample_id"]})

    @register(Dispatch.DP_PLAN, mode="train")
    def update_reward_model(self, batch: DataProto, plan: MiniBatchPlan) -> Metrics:
        """Take every optimizer step of the plan. Needs the pair keys; ``margin`` (B,) is optional."""
        metrics = Metrics()
        rows = at_the_end(interleaved(batch), self.pad_id)
        if "margin" in batch.batch.keys():
            rows.batch["margin"] = batch.batch["margin"].repeat_interleave(2)
        for mini in plan.mini_batches:
            report = self.fit_step(
                rows,
                (2 * mini.rows[:, None] + np.arange(2)).reshape(-1),
                self.settings.update_cut,
                lambda micro, mini=mini: self._loss(micro, mini),
                together=2,
            )
            self.record(metrics, report, len(plan.mini_batches))
        self.engine.schedule_step()
        return metrics

    def _scores(self, micro: DataProto) -> torch.Tensor:
        """(B,) scores: the one trained position of each row."""
        return self.model(micro).sum(1)

    def _loss(self, micro: DataProto, mini: MiniBatch) -> tuple[torch.Tensor, Metrics]:
        scores = self._scores(micro)
        margin = micro.batch["margin"][0::2].to(scores.device) if "margin" in micro.batch.keys() else None
        loss, metrics = reward_model_loss(
            scores[0::2], scores[1::2], margin, self.settings.center, mini.counts.sequences
        )
        metrics.add("train/loss", loss.detach(), reduce="sum")
        return loss, metrics

    @register(Dispatch.ONE_TO_ALL)
    def save_pretrained(self, folder: str) -> None:
        """Write the folder that ``AutoModelForSequenceClassification`` loads, with its tokenizer."""
        self.export(self.tokenizer, folder, lambda: self.model.save_pretrained(folder, self.tokenizer))

    @register(Dispatch.RANK_ZERO)
    def describe(self) -> dict[str, object]:
        """What a run's record says about the model."""
        model = self.model.model
        return {
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(self.settings.model.torch_dtype).removeprefix("torch."),
            "device": self.settings.model.device,
            "attention": model.config._attn_implementation,
            "vocabulary": int(model.config.get_text_config().vocab_size),
        }
