"""Supervised fine-tuning, as the loop needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.config import Config
from verl.data import SFTDataset, collate_sequences
from verl.dataflow import Dataflow
from verl.trainer.build import Plan
from verl.trainer.evaluation import Evaluation
from verl.trainer.learners import actor_alone
from verl.trainer.recipe import Recipe, Source
from verl.trainer.roles import Roles
from verl.trainer.sequences import LossEvaluation, prepare_sequences
from verl.trainer.sft import sft, sft_validation


class SFT(Recipe):
    """One role, the actor; rows of answers, of which the trained tokens are masked."""

    def __init__(self, config: Config, *, train_rows: Any = None):
        self.config = config

    def prepare(self, config: Config, *, train_rows: Any = None, validation_rows: Any = None) -> Plan:
        return prepare_sequences(
            config, SFTDataset, collate_sequences, train_rows=train_rows, validation_rows=validation_rows
        )

    def roles(self, plan: Plan) -> Roles:
        return actor_alone(plan)

    def flows(self, plan: Plan, roles: Roles, source: Source) -> Sequence[Dataflow]:
        return [sft(roles, plan.config)]

    def evaluation(self, plan: Plan, roles: Roles) -> Evaluation:
        flow = sft_validation(roles)
        return LossEvaluation(plan.config, roles, plan.tokenizer, plan.validation, flow, plan.loader.collate)
