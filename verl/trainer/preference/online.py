"""Online DPO: the policy's own answers are scored, and the best and the worst of a prompt make a pair.

Online DPO as in arXiv:2402.04792, with a scorer in place of a judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.algorithms.masked import as_mask
from verl.config import Config
from verl.config.fields import copy_tree
from verl.dataflow import Dataflow, Node, pair
from verl.metrics import Metrics
from verl.protocol import DataProto, object_column
from verl.trainer.build import Plan, prepare
from verl.trainer.evaluation import Evaluation
from verl.trainer.learners import LearnerRoles, learner_roles, preference_settings
from verl.trainer.ppo.keys import ROLLOUT, SCORES, SEQUENCE
from verl.trainer.ppo.rollouts import prompt_inputs, rollout_nodes
from verl.trainer.preference import STATE, pair_update
from verl.trainer.preference.recipe import PreferenceRecipe
from verl.trainer.recipe import Source
from verl.trainer.roles import Roles
from verl.trainer.settings import train_sampling
from verl.workers.pairs import PAIR, SIDES


def online(roles: LearnerRoles, config: Config) -> Dataflow:
    """The training step: generate, score, pair, then as for pairs that are given."""
    judged = [*SEQUENCE, "token_level_scores", "score_valid"]
    return Dataflow(
        *rollout_nodes(roles, roles.prompt_columns, config.actor_rollout_ref.rollout.n, train_sampling(config)),
        Node("pair", make_pairs, judged, PAIR, relation=pair),
        *pair_update(roles, config),
        inputs=prompt_inputs(roles.prompt_columns),
        state=STATE,
        outputs=[*ROLLOUT, *SCORES],
    )


def make_pairs(batch: DataProto) -> DataProto:
    """One pair for each prompt: its best and its worst answer by score, the first ones where several are equal.

    A prompt whose valid answers score all the same, or that has fewer than two, gives a pair with masks of 0, which
    has no loss and counts nowhere.
    """
    b, metrics = batch.batch, Metrics()
    mask = as_mask(b["response_mask"])
    scores = b["token_level_scores"].masked_fill(~mask, 0).sum(1).double().numpy()
    valid = as_mask(b["score_valid"]).numpy() & mask.any(1).numpy()
    uids = batch.non_tensor_batch["uid"]
    width = b["prompts"].shape[1]
    rows: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        rows.setdefault(uid, []).append(row)
    chosen, rejected, real = [], [], []
    for members in rows.values():
        good = [row for row in members if valid[row]] or members
        best, worst = max(good, key=lambda row: scores[row]), min(good, key=lambda row: scores[row])
        chosen.append(best)
        rejected.append(worst)
        real.append(bool(valid[best] and valid[worst] and scores[best] > scores[worst]))
    keep = torch.tensor(real)
    found = {"prompts": b["prompts"][chosen], "prompt_attention": b["attention_mask"][chosen, :width]}
    for side, picked in zip(SIDES, (chosen, rejected), strict=True):
        found[f"{side}_responses"] = b["responses"][picked]
        found[f"{side}_attention"] = b["attention_mask"][picked, width:]
        found[f"{side}_mask"] = b["response_mask"][picked] * keep[:, None]
    answered = valid.nonzero()[0]
    if len(answered):
        metrics.add("critic/score/mean", float(scores[answered].mean()), weight=len(answered))
    metrics.add("pairs/equal", float(len(real) - sum(real)), reduce="sum")
    metrics.add("response_length/mean", float(mask.sum(1).double().mean()), weight=len(mask))
    if any(real):
        gaps = scores[np.array(chosen)[real]] - scores[np.array(rejected)[real]]
        metrics.add("pairs/score_gap", float(gaps.mean()), weight=len(gaps))
    names = object_column(list(rows))
    made = DataProto.from_dict(tensors=found, non_tensors={"uid": names, "pair_id": names})
    made.meta_info["metrics"] = metrics
    return made


def as_online(config: Config) -> Config:
    """The configuration of a run over pairs, for a run that makes them: at least two answers a prompt."""
    config = copy_tree(config)
    config.algorithm.name = "online_dpo"
    rollout = config.actor_rollout_ref.rollout
    rollout.n = max(rollout.n, 2)
    return config


class OnlinePreference(PreferenceRecipe):
    """Prompts as for reinforcement learning; the loss of ``preference.loss_type``."""

    def __init__(self, config: Config, *, train_rows: Any = None):
        self.config = config

    def prepare(self, config: Config, *, train_rows: Any = None, validation_rows: Any = None) -> Plan:
        preference_settings(config)
        return prepare(self.config, train_rows=train_rows, validation_rows=validation_rows)

    def roles(self, plan: Plan) -> LearnerRoles:
        return learner_roles(plan)

    def flows(self, plan: Plan, roles: LearnerRoles, source: Source) -> Sequence[Dataflow]:
        return [online(roles, plan.config)]

    def evaluation(self, plan: Plan, roles: Roles) -> Evaluation:
        return Evaluation(plan.config, roles, plan.tokenizer, plan.validation)
