"""What a family of algorithms puts into the one loop: its data, its roles, its tables, and what a checkpoint keeps."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from verl.config import Config, family
from verl.dataflow import Dataflow
from verl.dataflow.executor import StepResult
from verl.protocol import DataProto

if TYPE_CHECKING:
    from verl.trainer.build import Plan
    from verl.trainer.evaluation import Evaluation
    from verl.trainer.roles import Roles

Source = Callable[[int], DataProto | None]
"""``source(k)`` draws more prompts, for steps that fill their batch as they go."""

HOMES = {
    "ppo": "verl.trainer.ppo.recipe:PPO",
    "sft": "verl.trainer.sft.recipe:SFT",
    "preference": "verl.trainer.preference.recipe:preference",
    "reward_model": "verl.trainer.reward_model.recipe:RewardModels",
    "online_preference": "verl.trainer.preference.online:OnlinePreference",
    "distillation": "verl.trainer.preference.distillation:Distillation",
}
"""Family of ``algorithm.name`` → ``module:maker``; a maker is called as :func:`recipe_of` is."""


class Stateful(Protocol):
    """Something small that is remembered from step to step."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Recipe(ABC):
    """One family. It holds no state of the run; what it makes is given back to it."""

    @abstractmethod
    def prepare(self, config: Config, *, train_rows: Any = None, validation_rows: Any = None) -> Plan:
        """Check the configuration, look at the machine, read the data; no model is loaded."""

    @abstractmethod
    def roles(self, plan: Plan) -> Roles:
        """Load the models."""

    @abstractmethod
    def flows(self, plan: Plan, roles: Roles, source: Source) -> Sequence[Dataflow]:
        """The tables of the training steps; with more than one, :meth:`choose` says which is whose."""

    @abstractmethod
    def evaluation(self, plan: Plan, roles: Roles) -> Evaluation:
        """Validation and previews."""

    def choose(self, step: int) -> int:
        """Number of the table of this step: a pure function of the step."""
        return 0

    def tokens(self, result: StepResult) -> tuple[int, int]:
        """(response tokens, all tokens) of a step."""
        batch = result.frames["sample"].batch
        attention = batch["attention_mask"]
        return int(attention[:, batch["prompts"].shape[1] :].sum()), int(attention.sum())

    def sampled(self, result: StepResult) -> bool:
        """Whether the rows of frame sample were generated, so that they are worth showing."""
        return "sample" in result.frames and "finish_reason" in result.frames["sample"].non_tensor_batch

    def trained(self, roles: Roles) -> dict[str, Any]:
        """Worker groups whose weights and optimizer a checkpoint holds, by name; None: the run has no such role."""
        return {"actor": roles.actor}

    def memory(self, roles: Roles) -> dict[str, Stateful]:
        """What else a checkpoint holds, by name."""
        return {}


def recipe_of(config: Config, *, train_rows: Any = None) -> Recipe:
    """The recipe that ``algorithm.name`` asks for; rows in memory take part where the data decide."""
    recipe = _made(family(config), config, train_rows)
    if config.sft.train_files:
        from verl.trainer.sft.mixed import Mixed

        return Mixed(recipe, config)
    return recipe


def _made(name: str, config: Config, train_rows: Any) -> Recipe:
    module, _, maker = HOMES[name].partition(":")
    return getattr(importlib.import_module(module), maker)(config, train_rows=train_rows)
