"""Nodes of preference steps that run on the controller: plans, mismatched answers, validation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from verl.algorithms.masked import as_mask
from verl.algorithms.preference import (
    PairLogps,
    PreferenceSettings,
    UnpairedLogps,
    get_preference_loss,
    pair_loss,
    prepare,
    unpaired_loss,
    with_margin,
)
from verl.config import Config
from verl.data import mismatched
from verl.metrics import Metrics
from verl.notices import notice
from verl.protocol import DataProto
from verl.train_engine.plan import MiniBatch, MiniBatchPlan, make_plan
from verl.trainer import nodes
from verl.workers.pairs import pair_lengths, pair_mask


def plan_pairs(batch: DataProto, *, config: Config) -> DataProto:
    """``step/plan``: the mini-batches of pairs. ``ppo_mini_batch_size`` counts pairs."""
    actor = config.actor_rollout_ref.actor
    plan = make_plan(
        pair_mask(batch).numpy(),
        batch.non_tensor_batch["pair_id"],
        pair_lengths(batch),
        mini_batch_prompts=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=actor.data_loader_seed + batch.meta_info["global_step"],
    )
    return DataProto(meta_info={"plan": plan})


def plan_labelled(batch: DataProto, *, config: Config) -> DataProto:
    """``step/plan``; a mini-batch of one row at the end, which has no other answer for KTO's KL, joins the one before.

    With several epochs every epoch has the same mini-batches, so that each row has one mismatched answer.
    """
    plan = nodes.make_plans(batch, config=config).meta_info["plan"]
    if config.preference.loss_type == "kto":
        plan = replace(plan, mini_batches=_without_singles(plan.mini_batches))
    return DataProto(meta_info={"plan": plan})


def _without_singles(minis: list[MiniBatch]) -> list[MiniBatch]:
    """Mini-batches of at least two rows each, as far as there are two rows."""
    kept: list[MiniBatch] = []
    for mini in minis:
        if len(mini.rows) > 1 or not kept:
            kept.append(mini)
            continue
        before, counts = kept[-1], kept[-1].counts
        both = replace(
            counts, tokens=counts.tokens + mini.counts.tokens, sequences=counts.sequences + mini.counts.sequences
        )
        kept[-1] = replace(before, rows=np.sort(np.concatenate([before.rows, mini.rows])), counts=both)
    return kept


def mismatch(batch: DataProto) -> DataProto:
    """For every row another row's answer of its mini-batch: ``kl_responses``, ``kl_mask``, ``kl_attention``.

    A batch of one row, such as the last of a data set, has no other: its masks are 0, and so is its KL.
    """
    plan: MiniBatchPlan = batch.meta_info["plan"]
    tensors, width = batch.batch, batch.batch["prompts"].shape[1]
    found = {
        "kl_responses": torch.zeros_like(tensors["responses"]),
        "kl_mask": torch.zeros_like(tensors["response_mask"]),
        "kl_attention": torch.zeros_like(tensors["attention_mask"]),
    }
    done = np.zeros(len(batch), dtype=bool)
    for mini in plan.mini_batches:
        if done[mini.rows].all():
            continue  # a later epoch
        rows = torch.from_numpy(mini.rows)
        if len(mini.rows) == 1:  # its own answer, of which no token counts
            notice("kto: a batch of one row has no other answer to estimate the KL with; it counts as 0 there")
            found["kl_responses"][rows] = tensors["responses"][rows]
            found["kl_attention"][rows] = tensors["attention_mask"][rows]
            done[mini.rows] = True
            continue
        others = mismatched(batch.select_idxs(mini.rows)).batch
        found["kl_responses"][rows] = others["responses"]
        found["kl_mask"][rows] = others["response_mask"]
        found["kl_attention"][rows] = others["attention_mask"]
        done[mini.rows] = True
    assert found["kl_attention"].shape[1] == width + found["kl_mask"].shape[1]
    return DataProto.from_dict(tensors=found)


# ---- validation ------------------------------------------------------------------------------------------------------


def evaluate_pairs(batch: DataProto, *, settings: PreferenceSettings) -> Metrics:
    """``val/loss`` and the losses' metrics under ``val/``, means over pairs. Weights of WPO are left out."""
    b = batch.batch
    real = pair_mask(batch).any(1)
    x = PairLogps(
        policy_chosen=b["policy_chosen"],
        policy_rejected=b["policy_rejected"],
        ref_chosen=b["ref_chosen"] if "ref_chosen" in b.keys() else None,
        ref_rejected=b["ref_rejected"] if "ref_rejected" in b.keys() else None,
        chosen_lengths=as_mask(b["chosen_mask"]).sum(1),
        rejected_lengths=as_mask(b["rejected_mask"]).sum(1),
        valid=real,
    )
    settings = replace(settings, use_weighting=False)
    stats, _ = prepare(x, settings)
    loss, metrics = pair_loss(x, settings, stats)
    return _validation(loss, metrics, int(real.sum()))


def evaluate_labelled(batch: DataProto, *, settings: PreferenceSettings) -> Metrics:
    """The same for labelled answers."""
    b = batch.batch
    real = as_mask(b["response_mask"]).any(1)
    x = UnpairedLogps(b["policy"], b["ref"], b["label"].bool(), valid=real)
    if "kl" in get_preference_loss(settings.loss_type).stats:
        x = replace(x, policy_kl=b["policy_kl"], ref_kl=b["ref_kl"])
    stats, _ = prepare(x, settings)
    loss, metrics = unpaired_loss(x, settings, stats)
    return _validation(loss, with_margin(metrics), int(real.sum()))


def _validation(loss: torch.Tensor, metrics: Metrics, rows: int) -> Metrics:
    found = metrics.prefixed("val/")
    found.add("val/loss", float(loss), weight=rows)
    return found
