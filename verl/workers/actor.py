"""The policy on one rank: generate, log-probs, update, save."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.algorithms.aggregation import use_counts
from verl.algorithms.entropy import entropy_loss
from verl.algorithms.kl import kl_loss
from verl.algorithms.registry import get_policy_loss_fn
from verl.hybrid import make_hybrid
from verl.metrics import Metrics
from verl.models.loading import load_tokenizer, save_pretrained
from verl.models.lora import adapters_off
from verl.models.policy import load_policy, log_probs
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.train_engine.plan import MiniBatch, MiniBatchPlan
from verl.train_engine.registry import make_train_engine, reads_rows
from verl.train_engine.spread import sent_weights
from verl.workers.forward import over_micro_batches
from verl.workers.generating import Generates
from verl.workers.preference import PreferenceUpdates
from verl.workers.probs_diff import probs_difference
from verl.workers.selection import prepare_selection
from verl.workers.settings import ActorSettings
from verl.workers.sft import SFTUpdates


class Actor(Generates, SFTUpdates, PreferenceUpdates):
    """The trained policy. The rollout engine works on the same weights.

    Args:
        model, tokenizer: made ready already (:func:`verl.models.policy.prepare_policy`), in place of loading them.
    """

    role = "actor"

    def __init__(
        self,
        settings: ActorSettings,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.settings = settings
        self.tokenizer = tokenizer or load_tokenizer(
            settings.tokenizer_path or settings.model.path,
            trust_remote_code=settings.model.trust_remote_code,
            chat_template=settings.chat_template,
        )
        spread = reads_rows(settings.parallel, self.comm, settings.optimizer)
        self.model = load_policy(settings.model, spread=spread) if model is None else model
        self.engine = make_train_engine(settings.optimizer, self.model, self.comm, settings.parallel)
        self.hybrid = None
        if settings.generates:
            size = settings.rollout.tensor_size
            self.hybrid = make_hybrid(self.model, self.engine, self._make_rollout_engine, size)
        self.conversations = self._make_conversations()
        self.loss = settings.loss
        self.policy_loss = get_policy_loss_fn(self.loss.policy_loss.loss_mode)

    @register(Dispatch.ONE_TO_ALL, streaming=True)
    def weights(self) -> Iterator[dict[str, torch.Tensor]]:
        """The trained weights in the type that computes, in pieces, from rank 0; all ranks gather them together."""
        yield from sent_weights(self.engine, self.rank)

    @register(Dispatch.DP_COMPUTE_PROTO, mode="train")
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """``old_log_probs`` of the trained tokens under the current weights."""
        grids = over_micro_batches(
            batch,
            self.settings.log_prob_cut,
            lambda micro: {"old_log_probs": self._log_probs(micro)[0]},
            self.budget("forward", "the actor's log-probs"),
            self.engine.lockstep,
        )
        return DataProto.from_dict(tensors=grids, non_tensors={"sample_id": batch.non_tensor_batch["sample_id"]})

    @register(Dispatch.DP_COMPUTE_PROTO, mode="train")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """``ref_log_prob`` under the base weights. For training with adapters, where they are the reference."""
        with adapters_off(self.model):
            grids = over_micro_batches(
                batch,
                self.settings.log_prob_cut,
                lambda micro: {"ref_log_prob": self._log_probs(micro)[0]},
                self.budget("forward", "the reference's log-probs"),
                self.engine.lockstep,
            )
        return DataProto.from_dict(tensors=grids, non_tensors={"sample_id": batch.non_tensor_batch["sample_id"]})

    def _log_probs(self, micro: DataProto, with_entropy: bool = False):
        return log_probs(
            self.model,
            micro,
            temperature=self.settings.temperature,
            with_entropy=with_entropy,
            entropy_gradient=self.loss.entropy_coeff != 0,
        )

    @register(Dispatch.DP_PLAN, mode="train")
    def update(self, batch: DataProto, plan: MiniBatchPlan) -> Metrics:
        """Take every optimizer step of the plan.

        Needs responses, response_mask, advantages, rollout_log_probs; old_log_probs unless the update's own log-probs
        serve; ref_log_prob for a KL loss; rollout_is_weights where off-policy correction is on.
        """
        metrics = Metrics()
        for mini in plan.mini_batches:
            selection = self._prepare(batch, mini)
            rows = self._moving_rows(batch, mini)
            columns = {} if selection is None else {"selection": selection}
            report = self.fit_step(
                batch, rows, self.settings.update_cut, lambda micro, mini=mini: self._loss(micro, mini), columns
            )
            self.record(metrics, report, len(plan.mini_batches))
            metrics.add("actor/skipped_rows", float(len(mini.rows) - len(rows)), reduce="sum")
            if not len(rows):  # every advantage is zero, and so are the losses
                for name in ("actor/pg_loss", "actor/loss"):
                    metrics.add(name, 0.0, reduce="sum")
        self.engine.schedule_step()
        return metrics

    def _moving_rows(self, batch: DataProto, mini: MiniBatch) -> np.ndarray:
        """The rows of the mini-batch that have a gradient. The others still count in its denominators."""
        if self._every_row_has_a_gradient():
            return mini.rows
        mask = batch.batch["response_mask"].bool()
        moving = (batch.batch["advantages"].masked_fill(~mask, 0) != 0).any(1).cpu().numpy()
        return mini.rows[moving[mini.rows]]

    def _every_row_has_a_gradient(self) -> bool:
        loss = self.loss
        custom = self.policy_loss.prepare is not None or not self.policy_loss.fn.__module__.startswith(
            "verl.algorithms"
        )
        return custom or loss.use_kl_loss or loss.entropy_coeff != 0 or loss.calculate_entropy

    def _prepare(self, batch: DataProto, mini: MiniBatch) -> torch.Tensor | None:
        """(B, R) selection of losses that look at all tokens of a mini-batch; None for the others."""
        if self.policy_loss.prepare is None:
            return None
        rows = batch.select_idxs(mini.rows)
        now = over_micro_batches(
            rows,
            self.settings.update_cut,
            lambda micro: {"log_prob": self._log_probs(micro)[0]},
            self.budget("forward", "the actor's log-probs"),
            self.engine.lockstep,
        )
        grid = now.get("log_prob", torch.zeros(rows.batch["response_mask"].shape))
        chosen = prepare_selection(self.policy_loss, rows, grid, mini, self.comm, self.loss)
        selection = torch.zeros(batch.batch["response_mask"].shape, dtype=chosen.dtype)
        selection[torch.from_numpy(mini.rows)] = chosen
        return selection

    def _loss(self, micro: DataProto, mini: MiniBatch) -> tuple[torch.Tensor, Metrics]:
        """The micro-batch's share of the mini-batch's loss."""
        config = self.loss
        tensors = micro.batch.to(next(self.model.parameters()).device)
        mask = tensors["response_mask"]
        with_entropy = config.entropy_coeff != 0 or config.calculate_entropy
        log_prob, entropy = self._log_probs(micro, with_entropy)
        old = self._old_log_probs(tensors, log_prob)
        optional = {key: tensors[key] for key in ("selection", "rollout_is_weights") if key in tensors.keys()}
        with use_counts(mini.counts):
            loss, metrics = self.policy_loss(
                old, log_prob, tensors["advantages"], mask, config.loss_agg_mode, config, **optional
            )
            metrics.add("actor/pg_loss", loss, reduce="sum")
            if entropy is not None:
                term, more = entropy_loss(
                    entropy, mask, config.loss_agg_mode, loss_scale_factor=config.loss_scale_factor
                )
                if config.entropy_coeff != 0:
                    loss = loss - config.entropy_coeff * term
                metrics.merge(more)
            if config.use_kl_loss:
                term, more = kl_loss(
                    log_prob,
                    tensors["ref_log_prob"],
                    mask,
                    config.loss_agg_mode,
                    config.kl_loss_type,
                    loss_scale_factor=config.loss_scale_factor,
                )
                loss = loss + config.kl_loss_coef * term
                metrics.merge(more)
                metrics.add("actor/kl_coef", config.kl_loss_coef, reduce="last")
        metrics.add("actor/loss", loss, reduce="sum")
        if "old_log_probs" not in tensors.keys():
            # before the first step these are the weights that sampled, so this is the engines' disagreement
            metrics.merge(probs_difference(tensors["rollout_log_probs"], log_prob.detach(), mask))
        return loss, metrics

    def _old_log_probs(self, tensors, log_prob: torch.Tensor) -> torch.Tensor:
        if self.settings.use_rollout_log_probs:
            return tensors["rollout_log_probs"]
        return tensors["old_log_probs"] if "old_log_probs" in tensors.keys() else log_prob.detach()

    @register(Dispatch.ONE_TO_ALL)
    def save_pretrained(self, folder: str) -> None:
        """Write the HF folder (weights, config, tokenizer, generation config)."""
        self.export(self.tokenizer, folder, lambda: save_pretrained(self.model, self.tokenizer, folder))

    @register(Dispatch.RANK_ZERO)
    def describe(self) -> dict[str, object]:
        """What a run's record says about the model."""
        return {
            "model": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "dtype": str(self.settings.model.torch_dtype).removeprefix("torch."),
            "device": self.settings.model.device,
            "attention": self.model.config._attn_implementation,
            "rollout_engine": None if self.hybrid is None else self.hybrid.engine_name,
            "vocabulary": int(np.int64(self.model.config.get_text_config().vocab_size)),
        }
