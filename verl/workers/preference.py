"""Preference losses on one rank: pairs, labelled answers; and a reference that can follow the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from verl.algorithms.masked import as_mask
from verl.algorithms.preference import (
    PairLogps,
    PairRows,
    PreferenceSettings,
    RunningMean,
    UnpairedLogps,
    get_preference_loss,
    pair_logps,
    pair_loss,
    prepare,
    sequence_logps,
    unpaired_loss,
    wpo_weights,
)
from verl.metrics import Metrics
from verl.models.loading import load_tokenizer, save_pretrained
from verl.models.squared_probs import log_probs_and_squares
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.train_engine.fsdp_export import gather_weights
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.plan import MiniBatch, MiniBatchPlan
from verl.train_engine.saved import StatePiece
from verl.workers.forward import over_micro_batches
from verl.workers.pairs import both, interleaved, log_prob_totals
from verl.workers.reference import Reference
from verl.workers.settings import ActorSettings, ReferenceSettings
from verl.workers.trained import TrainedWorker

Inputs = TypeVar("Inputs", PairLogps, UnpairedLogps)
_KL = {"responses": "kl_responses", "response_mask": "kl_mask", "attention_mask": "kl_attention"}


class PreferenceUpdates(TrainedWorker):
    """What an actor needs to learn from preferences. ``running_mean`` is BCO's, over all mini-batches so far."""

    settings: ActorSettings
    running_mean = RunningMean()

    def _log_probs(self, micro: DataProto, with_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError

    # ---- pairs -----------------------------------------------------------------------------------------------------

    @register(Dispatch.DP_PLAN, mode="train")
    def update_pairs(self, batch: DataProto, plan: MiniBatchPlan, settings: PreferenceSettings) -> Metrics:
        """Take every optimizer step of the plan, whose rows are pairs (:mod:`verl.workers.pairs`).

        Needs the pair keys, and ``ref_chosen`` and ``ref_rejected`` (B,) for a loss with a reference.
        """
        metrics, loss = Metrics(), get_preference_loss(settings.loss_type)
        rows = interleaved(batch)
        if "ref_chosen" in batch.batch.keys():
            rows.batch["ref"] = both(batch.batch, "ref_chosen", "ref_rejected")
        for mini in plan.mini_batches:
            sides = (2 * mini.rows[:, None] + np.arange(2)).reshape(-1)
            columns = {}
            if loss.prepare is not None:
                x = self._pair_inputs_of(rows.select_idxs(sides), settings)
                stats = self._statistics(x, batch.non_tensor_batch["pair_id"][mini.rows], settings)
                columns = {name: _spread(value, sides, len(rows), repeat=2) for name, value in stats.items()}
            report = self.fit_step(
                rows,
                sides,
                self.settings.update_cut,
                lambda micro, mini=mini: self._pair_loss(micro, mini, settings),
                columns,
                together=2,
            )
            self.record(metrics, report, len(plan.mini_batches))
        self.engine.schedule_step()
        return metrics

    def _pair_loss(self, micro: DataProto, mini: MiniBatch, s: PreferenceSettings) -> tuple[torch.Tensor, Metrics]:
        weights = None
        if s.use_weighting:
            log_prob, squares = log_probs_and_squares(self.model, micro, temperature=self.settings.temperature)
            each = wpo_weights(log_prob, squares, micro.batch["response_mask"].to(log_prob.device))
            weights = each[0::2] * each[1::2]
        else:
            log_prob, _ = self._log_probs(micro)
        tensors = micro.batch.to(log_prob.device)
        stats = {name: tensors[name][0::2] for name in get_preference_loss(s.loss_type).stats}
        x = _pair_inputs(tensors, log_prob, s)
        loss, metrics = pair_loss(x, s, stats, mini.counts.sequences, weights)
        metrics.add("train/loss", loss.detach(), reduce="sum")
        return loss, metrics

    def _pair_inputs_of(self, rows: DataProto, s: PreferenceSettings) -> PairLogps:
        """The inputs of the loss under the current weights, without gradient."""
        return _pair_inputs(rows.batch, self._grid(rows), s)

    # ---- labelled answers ------------------------------------------------------------------------------------------

    @register(Dispatch.DP_PLAN, mode="train")
    def update_labelled(self, batch: DataProto, plan: MiniBatchPlan, settings: PreferenceSettings) -> Metrics:
        """The same for answers with a label. Needs the sequence keys, ``label`` (B,) bool and ``ref`` (B,).

        For kto also ``kl_responses``, ``kl_mask``, ``kl_attention`` (another row's answer to each prompt) and
        ``ref_kl`` (B,).
        """
        metrics, loss = Metrics(), get_preference_loss(settings.loss_type)
        for mini in plan.mini_batches:
            columns = {}
            if loss.prepare is not None:
                rows = batch.select_idxs(mini.rows)
                x = self._labelled_inputs_of(rows, "kl" in loss.stats)
                stats = self._statistics(x, rows.non_tensor_batch["sample_id"], settings)
                columns = {name: _spread(value, mini.rows, len(batch)) for name, value in stats.items()}
            report = self.fit_step(
                batch,
                mini.rows,
                self.settings.update_cut,
                lambda micro, mini=mini: self._labelled_loss(micro, mini, settings),
                columns,
            )
            self.record(metrics, report, len(plan.mini_batches))
        self.engine.schedule_step()
        return metrics

    def _labelled_loss(self, micro: DataProto, mini: MiniBatch, s: PreferenceSettings) -> tuple[torch.Tensor, Metrics]:
        log_prob, _ = self._log_probs(micro)
        tensors = micro.batch.to(log_prob.device)
        mask = as_mask(tensors["response_mask"])
        x = UnpairedLogps(sequence_logps(log_prob, mask), tensors["ref"], tensors["label"].bool(), valid=mask.any(1))
        stats = {name: tensors[name] for name in get_preference_loss(s.loss_type).stats}
        loss, metrics = unpaired_loss(x, s, stats, mini.counts.sequences)
        metrics.add("train/loss", loss.detach(), reduce="sum")
        return loss, metrics

    def _labelled_inputs_of(self, rows: DataProto, with_kl: bool) -> UnpairedLogps:
        """The inputs of ``prepare``; where it reads the mismatched answers, the answers' own are not computed."""
        tensors = rows.batch
        mask = as_mask(tensors["response_mask"])
        if not with_kl:
            policy = log_prob_totals(self._grid(rows), mask)
            return UnpairedLogps(policy, tensors["ref"], tensors["label"].bool(), valid=mask.any(1))
        others = DataProto(
            batch=TensorDict(
                {"prompts": tensors["prompts"], **{name: tensors[key] for name, key in _KL.items()}},
                batch_size=[len(rows)],
            ),
            non_tensor_batch={name: rows.non_tensor_batch[name] for name in ("uid", "sample_id")},
            meta_info={},
        )
        kl = log_prob_totals(self._grid(others), tensors["kl_mask"])
        return UnpairedLogps(
            torch.zeros_like(tensors["ref"]),
            tensors["ref"],
            tensors["label"].bool(),
            policy_kl=kl,
            ref_kl=tensors["ref_kl"],
            valid=mask.any(1),
        )

    # ---- statistics over the whole mini-batch ----------------------------------------------------------------------

    def _grid(self, rows: DataProto) -> torch.Tensor:
        """(rows, R) log-probs without gradient, on the CPU."""
        found = over_micro_batches(
            rows,
            self.settings.update_cut,
            lambda micro: {"log_prob": self._log_probs(micro)[0]},
            self.budget("forward", "the actor's log-probs"),
            self.engine.lockstep,
        )
        return found.get("log_prob", torch.zeros(rows.batch["response_mask"].shape))

    def _statistics(self, mine: Inputs, ids: np.ndarray, s: PreferenceSettings) -> dict[str, torch.Tensor]:
        """The loss's statistics for this rank's rows, over the rows of all ranks in the order of their ids."""
        everybody = self.comm.all_gather_object((list(map(str, ids)), mine))
        names = np.array([name for part, _ in everybody for name in part])
        order = np.argsort(names, kind="stable")
        whole = _joined([inputs for _, inputs in everybody]).select(torch.from_numpy(order))
        stats, self.running_mean = prepare(whole, s, self.running_mean)
        place = torch.from_numpy(np.searchsorted(names[order], np.array(list(map(str, ids)), dtype=names.dtype)))
        return {name: value[place] for name, value in stats.items()}

    @register(Dispatch.RANK_ZERO)
    def preference_state(self) -> dict[str, float]:
        """What the next mini-batch needs to know of those before; equal on all ranks."""
        return self.running_mean.state_dict()

    @register(Dispatch.ONE_TO_ALL)
    def load_preference_state(self, state: dict[str, float]) -> None:
        self.running_mean = RunningMean.from_state(state)

    @register(Dispatch.ONE_TO_ALL)
    def live_weights(self) -> dict[str, torch.Tensor] | None:
        """The current weights by name, from rank 0; None from the others, which help to gather them."""
        if self.engine.lockstep is not None:
            return gather_weights(self.engine.lockstep)
        return None if self.rank else {name: p.detach() for name, p in self.engine.module.named_parameters()}


class SyncedReference(Reference):
    """A frozen model whose weights can be moved, saved and restored. Every rank holds all of them."""

    def __init__(self, settings: ReferenceSettings, **given: Any):
        super().__init__(replace(settings, parallel=ParallelSettings("torch")), **given)

    @register(Dispatch.ONE_TO_ALL)
    def mix(self, weights: Mapping[str, torch.Tensor], alpha: float) -> None:
        """own ← alpha · ``weights`` + (1 − alpha) · own, in fp32."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                other = weights[name].to(p.device)
                wide = torch.promote_types(p.dtype, torch.float32)
                p.copy_(torch.lerp(p.to(wide), other.to(wide), alpha))

    @register(Dispatch.RANK_ZERO)
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    @register(Dispatch.ONE_TO_ALL)
    def write_state(self, write: Callable[[int, int, dict[str, StatePiece]], None]) -> None:
        """As a trained role's: the first rank writes all weights."""
        whole = self.state_dict() if self.rank == 0 else {}
        write(self.rank, self.world_size, {name: StatePiece.whole(tensor) for name, tensor in whole.items()})

    @register(Dispatch.ONE_TO_ALL)
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.mix(state, 1.0)

    @register(Dispatch.RANK_ZERO)
    def save_pretrained(self, folder: str) -> None:
        """Write the HF folder."""
        model = self.settings.model
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        save_pretrained(self.model, tokenizer, folder)


def _pair_inputs(tensors: Any, log_prob: torch.Tensor, s: PreferenceSettings) -> PairLogps:
    """From (2b, R) log-probs of rows in turn; the rows' ``ref`` are sums already."""
    numbers = torch.arange(0, len(log_prob), 2)
    rows = PairRows([str(i) for i in numbers.tolist()], numbers, numbers + 1)
    x = pair_logps(log_prob, None, tensors["response_mask"], rows, s.ld_alpha)
    if "ref" not in tensors.keys():
        return x
    return replace(x, ref_chosen=tensors["ref"][0::2], ref_rejected=tensors["ref"][1::2])


def _joined(parts: Sequence[Inputs]) -> Inputs:
    """Inputs of several ranks as one."""
    first = parts[0]
    found = {}
    for item in fields(first):
        values = [getattr(part, item.name) for part in parts]
        found[item.name] = None if values[0] is None else torch.cat(values)
    return replace(first, **found)


def _spread(values: torch.Tensor, rows: np.ndarray, size: int, repeat: int = 1) -> torch.Tensor:
    """(size,) with the values at ``rows``, 0 elsewhere; each value stands for ``repeat`` rows."""
    column = torch.zeros(size, dtype=values.dtype)
    column[torch.from_numpy(rows)] = values.cpu().repeat_interleave(repeat)
    return column
