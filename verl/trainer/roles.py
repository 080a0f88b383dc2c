"""Building the roles of a run: worker groups, the reward runner, the KL controller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl.algorithms.kl_controller import FixedKLController, get_kl_controller
from verl.config import Config, generates
from verl.errors import ModelError, TrainingError
from verl.hardware import Choice
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.rewards import RewardRunner, load_reward_function
from verl.rewards.judge import PROMPT, Judge
from verl.rollout.base import SamplingParams
from verl.single_controller import Worker, WorkerGroup
from verl.trainer.groups import external_libraries, import_libraries, make_group
from verl.trainer.placement import MAIN, Placement, placement_of
from verl.trainer.settings import actor_settings, critic_settings, reference_settings
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.preference import SyncedReference
from verl.workers.reference import Reference
from verl.workers.reward_scorer import ROWS, RewardModel
from verl.workers.rollout import Rollout


@dataclass
class Roles:
    """Everything that a dataflow's nodes call. What nothing asks for is None."""

    actor: WorkerGroup
    reference: WorkerGroup | None
    critic: WorkerGroup | None
    reward: RewardRunner | None
    kl_controller: FixedKLController
    prompt_columns: Sequence[str]
    dump_folder: Path
    placement: Placement | None = None
    rollout: WorkerGroup | None = None  # generates with weights of its own; None: the actor does
    sent_version: int | None = None  # of the weights that the rollout has

    def generate(self, batch: DataProto, *, n: int, sampling: SamplingParams):
        """Stream the n responses of every prompt.

        Raises:
            ModelError: a prompt has token ids that the model does not know.
        """
        prompts = batch.non_tensor_batch["prompt_ids"]
        width = max(len(ids) for ids in prompts)
        sampler = self.rollout or self.actor
        highest, vocabulary = max(int(ids.max()) for ids in prompts), sampler.describe()["vocabulary"]
        if highest >= vocabulary:
            raise ModelError(
                f"A prompt has the token id {highest}, but the model's vocabulary has {vocabulary} entries: the "
                "tokenizer is another model's; set actor_rollout_ref.model.tokenizer_path to the right one."
            )
        return sampler.generate(batch, n=n, sampling=sampling, prompt_width=width)

    def send_weights(self, version: int) -> None:
        """Copy the actor's weights, which are of this version, into the rollout's own."""
        assert self.rollout is not None
        for piece in self.actor.weights():
            self.rollout.load_weights(piece)
        self.rollout.weights_changed()
        self.sent_version = version

    def describe(self) -> dict[str, Any]:
        """The policy, and the engine that generates."""
        engine = {} if self.rollout is None else {"rollout_engine": self.rollout.describe()["rollout_engine"]}
        return {**self.actor.describe(), **engine}

    def generate_greedy(self, batch: DataProto, *, sampling: SamplingParams) -> DataProto:
        """One response a prompt, as rows of the prompts themselves."""
        pieces = DataProto.concat(list(self.generate(batch, n=1, sampling=sampling)))
        place = {uid: i for i, uid in enumerate(pieces.non_tensor_batch["uid"])}
        rows = pieces.select_idxs(np.array([place[uid] for uid in batch.non_tensor_batch["uid"]]))
        for column in ("sample_id", "finish_reason"):
            rows.non_tensor_batch.pop(column)
        return rows

    def score(self, batch: DataProto):
        """A future of the scored rows."""
        assert self.reward is not None
        return self.reward.score(batch)

    def old_log_prob(self, batch: DataProto) -> DataProto:
        return self.actor.compute_log_prob(batch)

    def ref_log_prob(self, batch: DataProto) -> DataProto:
        """From the reference, or from the policy with its adapters off."""
        return (self.reference or self.actor).compute_ref_log_prob(batch)

    def values(self, batch: DataProto) -> DataProto:
        assert self.critic is not None
        return self.critic.compute_values(batch)

    def update_actor(self, batch: DataProto) -> Metrics:
        with self._dumping(batch):
            return self.actor.update(batch, batch.meta_info["plan"])

    def update_critic(self, batch: DataProto) -> Metrics:
        assert self.critic is not None
        with self._dumping(batch):
            return self.critic.update(batch, batch.meta_info["critic_plan"])

    def _dumping(self, batch: DataProto) -> contextlib.AbstractContextManager[None]:
        return dumping(batch, self.dump_folder)

    def begin_step(self) -> None:
        """A step begins whose scores are counted together."""
        if self.reward is not None:
            self.reward.begin_step()

    def end_step(self) -> None:
        if self.reward is not None:
            self.reward.end_step()

    def pool_of(self, role: str) -> str:
        """The pool of a role's nodes in a dataflow: nodes on one pool take turns, those on several run together."""
        if role == "rollout" and self.rollout is not None:
            return "rollout"  # also where it has no devices of its own: it never waits for the policy
        return MAIN if self.placement is None else self.placement.pool_of(role)

    def groups(self) -> list[WorkerGroup]:
        """The worker groups that there are."""
        return [group for group in vars(self).values() if isinstance(group, WorkerGroup)]

    def close(self) -> None:
        """End the workers, wherever they are."""
        if self.reward is not None:
            self.reward.close()
        for group in self.groups():
            group.shutdown()


@contextlib.contextmanager
def dumping(batch: DataProto, folder: Path) -> Iterator[None]:
    """If the update gives up, keep the batch that made it do so."""
    try:
        yield
    except TrainingError as error:
        kept = DataProto(batch=batch.batch, non_tensor_batch=batch.non_tensor_batch)
        path = folder / "failed_batch"
        kept.save_to_disk(path)
        raise TrainingError(f"{error} The batch is in {path} (verl.DataProto.load_from_disk).") from error


def build_roles(
    config: Config, choice: Choice, tokenizer: PreTrainedTokenizerBase, prompt_columns: Sequence[str], total_steps: int
) -> Roles:
    """Load every model that the configuration asks for. ``config`` must be resolved and valid."""
    import_libraries(external_libraries(config))
    reference = reference_settings(config, choice)
    reference_cls = SyncedReference if config.preference.sync_ref_model else Reference
    policy, critic = actor_settings(config, choice, total_steps), critic_settings(config, choice, total_steps)
    reward = build_reward(config, tokenizer) if generates(config) else None
    made: list[WorkerGroup] = []

    def group(role: str, worker_cls: type[Worker], settings: Any) -> WorkerGroup:
        made.append(make_group(config, role, worker_cls, settings))
        return made[-1]

    try:
        return Roles(
            actor=group("actor", Actor, policy),
            reference=group("reference", reference_cls, reference) if reference else None,
            critic=group("critic", Critic, critic) if critic else None,
            reward=reward,
            kl_controller=get_kl_controller(config.algorithm.kl_ctrl),
            prompt_columns=tuple(prompt_columns),
            dump_folder=Path(config.trainer.default_local_dir),
            placement=placement_of(config),
            rollout=group("rollout", Rollout, policy) if config.trainer.schedule == "one_step_off" else None,
        )
    except BaseException:
        for built in made:
            built.shutdown()
        if reward is not None:
            reward.close()
        raise


def build_reward(config: Config, tokenizer: PreTrainedTokenizerBase) -> RewardRunner:
    """The runner for the user's function (from Python, or from a file), model or judge, else for each row's rule."""
    reward = config.reward
    custom = reward.custom_reward_function
    function: Any = reward.reward_fn
    if function is None and custom.path is not None:
        function = load_reward_function(custom.path, custom.name, custom.reward_kwargs)
    if config.reward_model.enable:
        function = make_scorer(config)
    if reward.judge.url is not None:
        function = make_judge(config)
    timeout: dict[str, Any] = {} if reward.timeout_s is None else {"timeout_s": reward.timeout_s}
    if reward.judge.url is not None:
        timeout = {"timeout_s": None}  # each call to the judge has its own limit
    return RewardRunner(function, tokenizer, num_workers=reward.num_workers, on_error=reward.on_error, **timeout)


def make_scorer(config: Config) -> RewardModel:
    """The reward model of ``reward_model.*``, loaded where the controller is."""
    scorer = config.reward_model
    assert scorer.model.path is not None
    return RewardModel(
        scorer.model.path,
        normalize=scorer.normalize,  # type: ignore[arg-type]
        device=None if config.trainer.device == "auto" else config.trainer.device,
        trust_remote_code=scorer.model.trust_remote_code,
        rows=scorer.micro_batch_size_per_gpu or ROWS,
        max_length=scorer.max_length,
        template_texts=config.data.apply_chat_template == "true",
    )


def make_judge(config: Config) -> Judge:
    """The generative judge of ``reward.judge.*``."""
    given = config.reward.judge
    assert given.url is not None
    return Judge(
        given.url,
        given.model,
        given.prompt or PROMPT,
        scale=given.scale,
        concurrency=given.concurrency,
        api_key_variable=given.api_key_variable,
        timeout_s=config.reward.timeout_s or 60.0,
    )
