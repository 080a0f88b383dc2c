"""Building the roles of a run: worker groups, the reward runner, the KL controller."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl.algorithms.kl_controller import FixedKLController, get_kl_controller
from verl.config import Config
from verl.errors import ConfigError, ModelError, TrainingError
from verl.hardware import Choice
from verl.metrics import Metrics
from verl.protocol import DataProto
from verl.rewards import RewardRunner, load_reward_function
from verl.rollout.base import SamplingParams
from verl.single_controller import LocalWorkerGroup, WorkerGroup
from verl.trainer.settings import actor_settings, critic_settings, reference_settings
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.reference import Reference


@dataclass
class Roles:
    """Everything that a dataflow's nodes call. ``reference`` and ``critic`` are None where nothing asks for them."""

    actor: WorkerGroup
    reference: WorkerGroup | None
    critic: WorkerGroup | None
    reward: RewardRunner
    kl_controller: FixedKLController
    prompt_columns: Sequence[str]
    dump_folder: Path

    def generate(self, batch: DataProto, *, n: int, sampling: SamplingParams):
        """Stream the n responses of every prompt.

        Raises:
            ModelError: a prompt has token ids that the model does not know.
        """
        prompts = batch.non_tensor_batch["prompt_ids"]
        width = max(len(ids) for ids in prompts)
        highest, vocabulary = max(int(ids.max()) for ids in prompts), self.actor.describe()["vocabulary"]
        if highest >= vocabulary:
            raise ModelError(
                f"A prompt has the token id {highest}, but the model's vocabulary has {vocabulary} entries: the "
                "tokenizer is another model's; set actor_rollout_ref.model.tokenizer_path to the right one."
            )
        return self.actor.generate(batch, n=n, sampling=sampling, prompt_width=width)

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

    @contextlib.contextmanager
    def _dumping(self, batch: DataProto) -> Iterator[None]:
        """If the update gives up, keep the batch that made it do so."""
        try:
            yield
        except TrainingError as error:
            kept = DataProto(batch=batch.batch, non_tensor_batch=batch.non_tensor_batch)
            path = self.dump_folder / "failed_batch"
            kept.save_to_disk(path)
            raise TrainingError(f"{error} The batch is in {path} (verl.DataProto.load_from_disk).") from error

    def close(self) -> None:
        self.reward.close()


def build_roles(
    config: Config, choice: Choice, tokenizer: PreTrainedTokenizerBase, prompt_columns: Sequence[str], total_steps: int
) -> Roles:
    """Load every model that the configuration asks for. ``config`` must be resolved and valid."""
    import_external(config)
    reference = reference_settings(config, choice)
    critic = critic_settings(config, choice, total_steps)
    reward = build_reward(config, tokenizer)
    try:
        return Roles(
            actor=LocalWorkerGroup(Actor, actor_settings(config, choice, total_steps)),
            reference=LocalWorkerGroup(Reference, reference) if reference else None,
            critic=LocalWorkerGroup(Critic, critic) if critic else None,
            reward=reward,
            kl_controller=get_kl_controller(config.algorithm.kl_ctrl),
            prompt_columns=tuple(prompt_columns),
            dump_folder=Path(config.trainer.default_local_dir),
        )
    except BaseException:
        reward.close()
        raise


def import_external(config: Config) -> None:
    """``model.external_lib``: modules that register architectures before anything is loaded."""
    for model in (config.actor_rollout_ref.model, config.critic.model):
        for name in filter(None, (model.external_lib or "").split(",")):
            try:
                importlib.import_module(name.strip())
            except ImportError as error:
                raise ConfigError(f"model.external_lib={name.strip()} cannot be imported: {error}") from error


def build_reward(config: Config, tokenizer: PreTrainedTokenizerBase) -> RewardRunner:
    """The runner for the user's function (from Python, or from a file), else for the rule of each row's data source."""
    reward = config.reward
    custom = reward.custom_reward_function
    function: Any = reward.reward_fn
    if function is None and custom.path is not None:
        function = load_reward_function(custom.path, custom.name, custom.reward_kwargs)
    timeout: dict[str, Any] = {} if reward.timeout_s is None else {"timeout_s": reward.timeout_s}
    return RewardRunner(function, tokenizer, num_workers=reward.num_workers, on_error=reward.on_error, **timeout)
