"""Roles of runs that learn from answers, pairs, labels or a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from verl.algorithms.preference import PreferenceSettings, with_margin
from verl.config import Config, family, micro_batching, needs_reference
from verl.errors import ConfigError, ModelError
from verl.hardware import Choice
from verl.metrics import Metrics
from verl.models.loading import load_config
from verl.protocol import DataProto
from verl.single_controller import WorkerGroup
from verl.trainer.build import Plan
from verl.trainer.groups import make_group
from verl.trainer.roles import Roles, build_roles
from verl.trainer.settings import model_of, parallel_of, planned_cut
from verl.workers.pairs import interleaved, log_prob_sums, log_prob_totals
from verl.workers.reference import Reference
from verl.workers.settings import ReferenceSettings

SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""What two models of one shape of weights have in common."""


@dataclass
class LearnerRoles(Roles):
    """``preference`` are the settings of the preference loss, ``teacher`` a frozen model that gives log-probs;
    ``reference_follows`` tells that the reference's weights change."""

    preference: PreferenceSettings | None = None
    teacher: WorkerGroup | None = None
    reference_follows: bool = False

    def update_sft(self, batch: DataProto) -> Metrics:
        with self._dumping(batch):
            return self.actor.update_sft(batch, batch.meta_info["plan"])

    # ---- pairs -------------------------------------------------------------------------------------------------

    def ref_pairs(self, batch: DataProto) -> DataProto:
        """``ref_chosen`` and ``ref_rejected`` (B,): summed log-probs of both sides under the reference."""
        return self._pair_sums(self.ref_log_prob(interleaved(batch)), batch, "ref_log_prob", "ref")

    def policy_pairs(self, batch: DataProto) -> DataProto:
        """``policy_chosen`` and ``policy_rejected`` (B,) under the current weights."""
        return self._pair_sums(self.old_log_prob(interleaved(batch)), batch, "old_log_probs", "policy")

    def _pair_sums(self, found: DataProto, batch: DataProto, key: str, name: str) -> DataProto:
        assert self.preference is not None
        chosen, rejected = log_prob_sums(found.batch[key], batch, self.preference.ld_alpha)
        return DataProto.from_dict(tensors={f"{name}_chosen": chosen, f"{name}_rejected": rejected})

    def update_pairs(self, batch: DataProto) -> Metrics:
        with self._dumping(batch):
            return self.actor.update_pairs(batch, batch.meta_info["plan"], self.preference)

    # ---- labelled answers --------------------------------------------------------------------------------------

    def ref_labelled(self, batch: DataProto) -> DataProto:
        """``ref`` (B,): summed log-probs of the answers under the reference."""
        return _totals(self.ref_log_prob(batch), "ref_log_prob", batch, "ref")

    def policy_labelled(self, batch: DataProto) -> DataProto:
        """``policy`` (B,): the same under the current weights."""
        return _totals(self.old_log_prob(batch), "old_log_probs", batch, "policy")

    def update_labelled(self, batch: DataProto) -> Metrics:
        with self._dumping(batch):
            found = self.actor.update_labelled(batch, batch.meta_info["plan"], self.preference)
        return with_margin(found)

    # ---- the reference follows, the teacher is asked -------------------------------------------------------------

    def sync_reference(self, batch: DataProto, *, alpha: float) -> Metrics:
        """reference ← alpha · policy + (1 − alpha) · reference (TR-DPO, arXiv:2404.09656)."""
        assert self.reference is not None
        self.reference.mix(self.actor.live_weights()[0], alpha)
        metrics = Metrics()
        metrics.add("ref/syncs", 1.0, reduce="sum")
        return metrics

    def teacher_log_prob(self, batch: DataProto) -> DataProto:
        """``teacher_log_prob`` (B, R) of the trained tokens."""
        assert self.teacher is not None
        found = self.teacher.compute_ref_log_prob(batch)
        return DataProto.from_dict(tensors={"teacher_log_prob": found.batch["ref_log_prob"]})


def _totals(found: DataProto, key: str, batch: DataProto, name: str) -> DataProto:
    return DataProto.from_dict(tensors={name: log_prob_totals(found.batch[key], batch.batch["response_mask"])})


def learner_roles(plan: Plan, *, prompt_columns: Sequence[str] | None = None) -> LearnerRoles:
    """Every model that the configuration asks for."""
    config, choice = plan.config, plan.choice
    columns = plan.prompt_columns if prompt_columns is None else prompt_columns
    if config.preference.ref_model_path is not None and needs_reference(config):
        check_reference(config)
    made = build_roles(config, choice, plan.tokenizer, columns, plan.total_steps)
    roles = with_learning(made)
    if family(config) in ("preference", "online_preference"):
        roles.preference = preference_settings(config)
        roles.reference_follows = config.preference.sync_ref_model
    if family(config) == "distillation":
        try:
            roles.teacher = make_teacher(config, choice, roles)
        except BaseException:
            roles.close()
            raise
    return roles


def check_reference(config: Config) -> None:
    """That ``preference.ref_model_path`` reads the policy's token ids, and can follow it where it is to.

    Raises:
        ModelError: it has another vocabulary, or with ``preference.sync_ref_model`` another architecture or size.
    """
    path, model = config.preference.ref_model_path, config.actor_rollout_ref.model
    mine, other = (
        load_config(each, trust_remote_code=model.trust_remote_code).get_text_config() for each in (model.path, path)
    )
    for name in ("vocab_size", *(SHAPE if config.preference.sync_ref_model else ())):
        has, needed = getattr(other, name, None), getattr(mine, name, None)
        if has != needed:
            reason = "it reads the policy's token ids" if name == "vocab_size" else "it takes over the policy's weights"
            raise ModelError(
                f"preference.ref_model_path={path} has {name}={has} and the policy {model.path} has {needed}: "
                f"{reason}, so take one of the same family" + ("" if name == "vocab_size" else " and size")
            )


def with_learning(roles: Roles) -> LearnerRoles:
    """The same roles, with what learning needs of them."""
    if isinstance(roles, LearnerRoles):
        return roles
    return LearnerRoles(**{item.name: getattr(roles, item.name) for item in fields(roles)})


def actor_alone(plan: Plan) -> LearnerRoles:
    """The policy and nothing else."""
    return learner_roles(plan, prompt_columns=())


def make_teacher(config: Config, choice: Choice, roles: Roles) -> WorkerGroup:
    """The frozen teacher; it reads the student's token ids, so its vocabulary must be the student's."""
    path, parts = config.distillation.teacher_path, config.actor_rollout_ref
    assert path is not None  # a rule of the configuration
    about = load_config(path, trust_remote_code=parts.model.trust_remote_code)
    sizes = {"student": roles.actor.describe()["vocabulary"], "teacher": int(about.get_text_config().vocab_size)}
    if sizes["student"] != sizes["teacher"]:
        raise ModelError(
            f"distillation.teacher_path={path} has a vocabulary of {sizes['teacher']} tokens and the student one of "
            f"{sizes['student']}: a teacher reads the student's token ids, so take one of the same family"
        )
    settings = ReferenceSettings(
        model=replace(model_of(parts.model, choice, config), path=path, gradient_checkpointing=False),
        temperature=parts.rollout.temperature or 1.0,
        cut=planned_cut(micro_batching(config, "ref"), config, choice),
        parallel=parallel_of(parts.ref, "actor_rollout_ref.ref"),
    )
    return make_group(config, "teacher", Reference, settings)


def preference_settings(config: Config) -> PreferenceSettings:
    """Raises ConfigError with every problem, each under its key."""
    given = {item.name: getattr(config.preference, item.name) for item in fields(PreferenceSettings)}
    try:
        return PreferenceSettings(**given)
    except ConfigError as error:
        raise ConfigError([f"preference.{problem}" for problem in error.problems]) from error
