"""SFT steps between the steps of another algorithm: two tables, two loaders, an exact and even schedule."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from verl.config import Config
from verl.data import PromptLoader, SFTDataset, build_train_loader, collate_sequences
from verl.data.loader import Collate, RowSource
from verl.dataflow import Dataflow
from verl.dataflow.executor import StepResult
from verl.errors import CheckpointError
from verl.protocol import DataProto
from verl.trainer.build import Plan
from verl.trainer.evaluation import Evaluation
from verl.trainer.learners import LearnerRoles, with_learning
from verl.trainer.recipe import Recipe, Source, Stateful
from verl.trainer.roles import Roles
from verl.trainer.sequences import read_sequences
from verl.trainer.sft import sft


def sft_steps(step: int, ratio: float) -> int:
    """How many of the first ``step`` steps are SFT steps: the whole part of step · ratio, exactly."""
    return int(step * Fraction(str(ratio)).limit_denominator(1_000_000))


def is_sft(step: int, ratio: float) -> bool:
    """Whether step ``step`` (from 1) is an SFT step. With a ratio of 0.3 these are 4, 7, 10, 14, ..."""
    return sft_steps(step, ratio) > sft_steps(step - 1, ratio)


def steps_in_all(others: int, ratio: float) -> int:
    """The steps of a run in which ``others`` are no SFT steps, the last of them one of these."""
    step = others
    while step - sft_steps(step, ratio) < others:
        step += 1
    return step


class MixedLoader:
    """Batches of two loaders by the schedule; the position of both, and the number of the step, are its state."""

    def __init__(self, main: PromptLoader, answers: PromptLoader, ratio: float):
        self.main, self.answers, self.ratio = main, answers, ratio
        self.drawn = 0

    @property
    def epoch(self) -> int:
        """Of the other algorithm's data."""
        return self.main.epoch

    @property
    def dataset(self) -> RowSource:
        """Of the other algorithm, as its collate function is."""
        return self.main.dataset

    @dataset.setter
    def dataset(self, dataset: RowSource) -> None:
        self.main.dataset = dataset

    @property
    def collate(self) -> Collate:
        return self.main.collate

    @collate.setter
    def collate(self, collate: Collate) -> None:
        self.main.collate = collate

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_all(self.main.steps_per_epoch, self.ratio)

    def next_batch(self) -> DataProto:
        """The batch of the next step."""
        self.drawn += 1
        return (self.answers if is_sft(self.drawn, self.ratio) else self.main).next_batch()

    def draw(self, count: int) -> DataProto:
        """More prompts for a step that fills its batch as it goes."""
        return self.main.draw(count)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "main": self.main.state_dict(), "answers": self.answers.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError for the state of a run without SFT steps."""
        if "answers" not in state:
            raise CheckpointError(
                "the checkpoint was made by a run without SFT steps (sft.train_files): start anew with "
                "trainer.resume_mode=disable, or give this run a folder of its own with trainer.default_local_dir"
            )
        self.drawn = int(state["drawn"])
        self.main.load_state_dict(state["main"])
        self.answers.load_state_dict(state["answers"])


class Mixed(Recipe):
    """``inner``'s steps, and SFT steps on ``sft.train_files``, which have neither reward nor KL."""

    def __init__(self, inner: Recipe, config: Config):
        self.inner, self.ratio = inner, config.sft.ratio

    def prepare(self, config: Config, *, train_rows: Any = None, validation_rows: Any = None) -> Plan:
        plan = self.inner.prepare(config, train_rows=train_rows, validation_rows=validation_rows)
        settled = plan.config
        answers = read_sequences(SFTDataset, settled, plan.tokenizer, "train", settled.sft.train_files)
        size = settled.sft.train_batch_size or settled.data.train_batch_size
        loader = build_train_loader(
            answers,
            settled.data,
            batch_size=min(size, len(answers)),
            seed=settled.trainer.seed,
            collate=partial(collate_sequences, pad_id=int(plan.tokenizer.pad_token_id)),
        )
        if settled.trainer.total_training_steps is None:
            plan.total_steps = steps_in_all(plan.total_steps, self.ratio)
        plan.loader = MixedLoader(plan.loader, loader, self.ratio)
        return plan

    def roles(self, plan: Plan) -> LearnerRoles:
        return with_learning(self.inner.roles(plan))

    def flows(self, plan: Plan, roles: Roles, source: Source) -> Sequence[Dataflow]:
        assert isinstance(roles, LearnerRoles)
        return [*self.inner.flows(plan, roles, source), sft(roles, plan.config)]

    def choose(self, step: int) -> int:
        return int(is_sft(step, self.ratio))

    def evaluation(self, plan: Plan, roles: Roles) -> Evaluation:
        return self.inner.evaluation(plan, roles)

    def tokens(self, result: StepResult) -> tuple[int, int]:
        return super().tokens(result) if self.choose(result.step) else self.inner.tokens(result)

    def trained(self, roles: Roles) -> dict[str, Any]:
        return self.inner.trained(roles)

    def memory(self, roles: Roles) -> dict[str, Stateful]:
        return self.inner.memory(roles)
