"""On-policy distillation: the student answers, and the teacher's log-probs say how good each token is.

The loss is the reverse KL on the student's own samples (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543), by its
policy gradient: the advantage of a token is log p_teacher - log p_student, so the update is the policy's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from verl.algorithms.masked import as_mask, clean
from verl.config import Config
from verl.dataflow import Dataflow, Node
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.trainer import nodes
from verl.trainer.build import Plan, prepare
from verl.trainer.evaluation import Evaluation
from verl.trainer.learners import LearnerRoles, learner_roles
from verl.trainer.ppo.keys import ROLLOUT, SEQUENCE
from verl.trainer.ppo.rollouts import prompt_inputs, rollout_nodes
from verl.trainer.recipe import Recipe, Source
from verl.trainer.roles import Roles
from verl.trainer.settings import train_sampling

STATE = ("actor.weights", "teacher.weights")


def distillation(roles: LearnerRoles, config: Config) -> Dataflow:
    """The training step."""
    generate, _ = rollout_nodes(roles, (), config.actor_rollout_ref.rollout.n, train_sampling(config))
    old, teacher = ["old_log_probs"], ["teacher_log_prob"]
    update = [*SEQUENCE, "advantages", "rollout_log_probs", *old, "step/plan"]
    return Dataflow(
        generate,
        Node("old_logp", roles.old_log_prob, SEQUENCE, old, reads=["actor.weights"], pool="actor"),
        Node("teacher_logp", roles.teacher_log_prob, SEQUENCE, teacher, reads=["teacher.weights"], pool="actor"),
        Node("advantage", reverse_kl, ["response_mask", *old, *teacher], ["advantages"]),
        Node("plan", partial(nodes.make_plans, config=config), SEQUENCE, ["step/plan"]),
        Node("update_actor", roles.update_actor, update, writes=["actor.weights"], pool="actor"),
        inputs=prompt_inputs(roles.prompt_columns),
        state=STATE,
        outputs=ROLLOUT,
    )


def reverse_kl(batch: DataProto) -> DataProto:
    """``advantages`` (B, R): log p_teacher - log p_student of each trained token; the KL is -mean."""
    b, metrics = batch.batch, Metrics()
    mask = as_mask(b["response_mask"])
    found = clean(b["teacher_log_prob"].float(), mask) - clean(b["old_log_probs"].float(), mask)
    count = float(mask.sum())
    metrics.add("distillation/reverse_kl", float(-found.double().sum()) / max(count, 1), weight=count)
    metrics.add("response_length/mean", float(mask.sum(1).double().mean()), weight=len(mask))
    return nodes.result(metrics, advantages=found)


class Distillation(Recipe):
    """Prompts as for reinforcement learning, a frozen teacher, no reward."""

    def __init__(self, config: Config, *, train_rows: Any = None):
        self.config = config

    def prepare(self, config: Config, *, train_rows: Any = None, validation_rows: Any = None) -> Plan:
        return prepare(config, train_rows=train_rows, validation_rows=validation_rows)

    def roles(self, plan: Plan) -> LearnerRoles:
        return learner_roles(plan)

    def flows(self, plan: Plan, roles: LearnerRoles, source: Source) -> Sequence[Dataflow]:
        return [distillation(roles, plan.config)]

    def evaluation(self, plan: Plan, roles: Roles) -> Evaluation:
        return Evaluation(plan.config, roles, plan.tokenizer, plan.validation)
