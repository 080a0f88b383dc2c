"""PPO and its kin, as the loop needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.config import Config
from verl.dataflow import Dataflow
from verl.trainer.build import Plan, prepare
from verl.trainer.evaluation import Evaluation
from verl.trainer.ppo import ppo
from verl.trainer.recipe import Recipe, Source, Stateful
from verl.trainer.roles import Roles, build_roles


class PPO(Recipe):
    """Generate, score, advantage, update."""

    def __init__(self, config: Config, *, train_rows: Any = None):
        self.config = config

    def prepare(self, config: Config, *, train_rows: Any = None, validation_rows: Any = None) -> Plan:
        return prepare(config, train_rows=train_rows, validation_rows=validation_rows)

    def roles(self, plan: Plan) -> Roles:
        return build_roles(plan.config, plan.choice, plan.tokenizer, plan.prompt_columns, plan.total_steps)

    def flows(self, plan: Plan, roles: Roles, source: Source) -> Sequence[Dataflow]:
        return [ppo(roles, plan.config, source)]

    def evaluation(self, plan: Plan, roles: Roles) -> Evaluation:
        return Evaluation(plan.config, roles, plan.tokenizer, plan.validation)

    def trained(self, roles: Roles) -> dict[str, Any]:
        return {"actor": roles.actor, "critic": roles.critic}

    def memory(self, roles: Roles) -> dict[str, Stateful]:
        return {"kl_controller": roles.kl_controller}
