"""Learning from pairs and from labelled answers, as the loop needs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from verl.config import Config
from verl.config.names import LABEL_LOSSES
from verl.data import PreferenceDataset, UnpairedDataset, collate_pairs, collate_unpaired, read_rows
from verl.data.rows import Row
from verl.dataflow import Dataflow
from verl.dataflow.executor import StepResult
from verl.errors import DataError
from verl.notices import notice
from verl.protocol import DataProto
from verl.trainer.build import Plan
from verl.trainer.evaluation import Evaluation
from verl.trainer.learners import LearnerRoles, learner_roles, preference_settings
from verl.trainer.preference import PAIR_REFERENCE, labelled, labelled_validation, pair_validation, pairs
from verl.trainer.preference.precomputed import collate_known, known_reference
from verl.trainer.recipe import Recipe, Source, Stateful
from verl.trainer.sequences import LossEvaluation, prepare_sequences
from verl.workers.pairs import pairs_of

PAIR_COLUMNS = ("chosen", "rejected")


def preference(config: Config, *, train_rows: Any = None) -> Recipe:
    """Pairs or labelled answers, as the loss says. Prompts without pairs, where something scores answers: pairs are
    made in training."""
    if config.preference.loss_type in LABEL_LOSSES:
        return Labelled()
    if _scores(config):
        columns = _columns(config, train_rows)
        if not set(PAIR_COLUMNS) <= set(columns):
            from verl.trainer.preference.online import OnlinePreference, as_online

            made = as_online(config)
            notice(
                f"the training data have no pairs (columns {', '.join(columns)}), and there is a reward function: "
                f"{config.algorithm.name} makes its pairs itself, of the best and the worst of "
                f"actor_rollout_ref.rollout.n={made.actor_rollout_ref.rollout.n} answers (online DPO)"
            )
            return OnlinePreference(made)
    return Pairs()


def _scores(config: Config) -> bool:
    reward = config.reward
    function = reward.reward_fn or reward.custom_reward_function.path
    return bool(function or reward.judge.url or config.reward_model.enable)


def _columns(config: Config, train_rows: Any) -> list[str]:
    files = train_rows if train_rows is not None else config.data.train_files
    return read_rows(files, "train").columns if files is not None else list(PAIR_COLUMNS)


class RunningMeanOf:
    """BCO's running mean, which lives with the actor."""

    def __init__(self, roles: LearnerRoles):
        self.actor = roles.actor

    def state_dict(self) -> dict[str, Any]:
        return self.actor.preference_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.actor.load_preference_state(state)


class PreferenceRecipe(Recipe):
    """What pairs and labelled answers share."""

    known: tuple[str, ...]  # what the reference gives for a row

    def roles(self, plan: Plan) -> LearnerRoles:
        roles = learner_roles(plan, prompt_columns=())
        if plan.config.preference.precompute_ref_log_probs:
            self._precompute(plan, roles)
        return roles

    def ask(self, roles: LearnerRoles, batch: DataProto) -> DataProto:
        """The reference's numbers for a batch."""
        raise NotImplementedError

    def _precompute(self, plan: Plan, roles: LearnerRoles) -> None:
        collate = plan.loader.collate
        ask = partial(self.ask, roles)
        plan.loader.dataset = known_reference(plan.train, collate, ask, self.known)
        if plan.validation is not None:
            plan.validation = known_reference(plan.validation, collate, ask, self.known)
        plan.loader.collate = partial(collate_known, collate, self.known)
        if roles.reference is not None:
            roles.reference.shutdown()
            roles.reference = None

    def trained(self, roles: LearnerRoles) -> dict[str, Any]:
        return {"actor": roles.actor, **({"reference": roles.reference} if roles.reference_follows else {})}

    def memory(self, roles: LearnerRoles) -> dict[str, Stateful]:
        return {"running_mean": RunningMeanOf(roles)}


class Pairs(PreferenceRecipe):
    """Rows of frame "pair" from columns prompt, chosen and rejected."""

    known = tuple(PAIR_REFERENCE)

    def prepare(self, config: Config, *, train_rows: Any = None, validation_rows: Any = None) -> Plan:
        preference_settings(config)
        try:
            return prepare_sequences(
                config, PreferenceDataset, collate, train_rows=train_rows, validation_rows=validation_rows
            )
        except DataError as error:
            if "has no column" not in str(error):
                raise
            raise DataError(
                f"{error}. With a reward function (reward.custom_reward_function.path) or a reward model, pairs are "
                "made of the policy's own answers"
            ) from error

    def ask(self, roles: LearnerRoles, batch: DataProto) -> DataProto:
        return roles.ref_pairs(batch)

    def flows(self, plan: Plan, roles: LearnerRoles, source: Source) -> Sequence[Dataflow]:
        return [pairs(roles, plan.config)]

    def evaluation(self, plan: Plan, roles: LearnerRoles) -> Evaluation:
        flow = pair_validation(roles, plan.config)
        return LossEvaluation(plan.config, roles, plan.tokenizer, plan.validation, flow, plan.loader.collate)

    def tokens(self, result: StepResult) -> tuple[int, int]:
        return pair_tokens(result)


def collate(rows: Sequence[Row], uids: Sequence[str], pad_id: int) -> DataProto:
    """Items of a `PreferenceDataset` as rows of frame "pair"."""
    return pairs_of(collate_pairs(rows, uids, pad_id))


def pair_tokens(result: StepResult) -> tuple[int, int]:
    """(response tokens, all tokens) of frame "pair"; a prompt counts once."""
    b = result.frames["pair"].batch
    response = int(b["chosen_attention"].sum() + b["rejected_attention"].sum())
    return response, response + int(b["prompt_attention"].sum())


class Labelled(PreferenceRecipe):
    """Rows of frame "sample" from columns prompt, completion and label."""

    known = ("ref",)

    def prepare(self, config: Config, *, train_rows: Any = None, validation_rows: Any = None) -> Plan:
        preference_settings(config)
        return prepare_sequences(
            config, UnpairedDataset, collate_unpaired, train_rows=train_rows, validation_rows=validation_rows
        )

    def flows(self, plan: Plan, roles: LearnerRoles, source: Source) -> Sequence[Dataflow]:
        return [labelled(roles, plan.config)]

    def ask(self, roles: LearnerRoles, batch: DataProto) -> DataProto:
        return roles.ref_labelled(batch)

    def evaluation(self, plan: Plan, roles: LearnerRoles) -> Evaluation:
        flow = labelled_validation(roles, plan.config)
        return LossEvaluation(plan.config, roles, plan.tokenizer, plan.validation, flow, plan.loader.collate)
