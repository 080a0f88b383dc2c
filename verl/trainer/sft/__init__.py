"""Supervised fine-tuning as a table: one node that plans, one that learns."""

from __future__ import annotations

from functools import partial

import torch

from verl.algorithms.masked import as_mask, clean
from verl.config import Config
from verl.dataflow import Dataflow, Node
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.trainer import nodes
from verl.trainer.ppo.keys import SEQUENCE
from verl.trainer.roles import Roles

STATE = ("actor.weights",)


def sft(roles: Roles, config: Config) -> Dataflow:
    """The training step."""
    return Dataflow(
        Node("plan", partial(nodes.make_plans, config=config), SEQUENCE, ["step/plan"]),
        Node("update_actor", roles.update_sft, [*SEQUENCE, "step/plan"], writes=["actor.weights"], pool="actor"),
        inputs={"sample": SEQUENCE},
        state=STATE,
    )


def sft_validation(roles: Roles) -> Dataflow:
    """The loss of the validation rows."""
    return Dataflow(
        Node("logp", roles.old_log_prob, SEQUENCE, ["old_log_probs"], reads=["actor.weights"], pool="actor"),
        Node("evaluate", evaluate, ["old_log_probs", "response_mask"]),
        inputs={"sample": SEQUENCE},
        state=STATE,
        name="validate",
    )


def evaluate(batch: DataProto) -> Metrics:
    """``val/loss``, the mean over trained tokens."""
    mask = as_mask(batch.batch["response_mask"])
    total, count = float(-clean(batch.batch["old_log_probs"].double(), mask).sum()), float(torch.sum(mask))
    metrics = Metrics()
    metrics.add("val/loss", total / max(count, 1), weight=count)
    metrics.add("val/tokens", count, reduce="sum")
    return metrics
