"""A training step's two halves by themselves: prompts to scored samples, and scored samples to new weights.

Both are made of the nodes of the training step's own table, so a rollout and its update equal the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl.data import PromptDataset, collate_prompts, rows_from_prompts
from verl.dataflow import Dataflow
from verl.dataflow.executor import StepResult
from verl.errors import ConfigError, DataflowError
from verl.protocol import DataProto
from verl.rewards.router import find_scorer
from verl.trainer.base import ChangeFlow, Trainer
from verl.trainer.ppo import update_half
from verl.trainer.ppo.keys import OUTPUTS, ROLLOUT, SCORES, STATE
from verl.trainer.ppo.rollouts import greedy_baseline, prompt_inputs, rollout_nodes
from verl.trainer.settings import train_sampling

_BASELINE = "reward_baselines"
_NOT_COLUMNS = ("uid", "prompt_ids")


def prompt_batch(
    trainer: Trainer, prompts: Sequence[Any], *, prefix: str, columns: Sequence[str] | None = None
) -> DataProto:
    """A prompt batch of texts, lists of messages or dataset rows (dicts); uids are ``{prefix}{number}``.

    Args:
        columns: columns that the batch must have (None where a row has no such value).
    """
    if isinstance(prompts, str) or not len(prompts):
        raise ConfigError("prompts is a list with at least one text, list of messages or row")
    rows = list(prompts) if all(isinstance(p, Mapping) for p in prompts) else rows_from_prompts(prompts)
    dataset = PromptDataset(rows, trainer.tokenizer, trainer.config.data)
    items = [{**dict.fromkeys(columns or ()), **dataset[i]} for i in range(len(dataset))]
    return collate_prompts(items, [f"{prefix}{i}" for i in range(len(items))])


def rollout(trainer: Trainer, prompts: DataProto, *, n: int | None = None, **sampling: Any) -> DataProto:
    """Sample ``n`` responses of every prompt from the current weights and, where there is a rule, score them.

    Args:
        n: responses a prompt; default ``actor_rollout_ref.rollout.n``.
        sampling: fields of :class:`verl.rollout.base.SamplingParams` that differ from training's.

    Returns:
        A sample batch with the prompts' columns; :func:`update` takes it. Nothing is written.
    """
    config, roles = trainer.config, trainer.roles
    columns = [name for name in prompts.non_tensor_batch if name not in _NOT_COLUMNS]
    table = rollout_nodes(
        replace(roles, prompt_columns=columns),
        columns,
        n or config.actor_rollout_ref.rollout.n,
        replace(train_sampling(config), **sampling),
        config.actor_rollout_ref.rollout.multi_turn.enable,
    )
    outputs = list(ROLLOUT)
    if config.reward.reward_fn is None and config.reward.custom_reward_function.path is None and not _ruled(prompts):
        table = table[:1]
    else:
        outputs += SCORES
        if config.algorithm.adv_estimator == "remax":
            table += greedy_baseline(replace(roles, prompt_columns=columns), config)
            outputs.append(f"prompt/{_BASELINE}")
    flow = Dataflow(*table, inputs=prompt_inputs(columns), state=STATE, name="rollout", outputs=outputs)
    flow.versions = trainer.flows.versions
    trainer.sync_rollout()
    result = trainer.run_flow(flow, prompts, trainer.global_steps + 1, commit=False)
    return _with_prompts(result)


def update(trainer: Trainer, batch: DataProto, *, change_flow: ChangeFlow | None = None) -> StepResult:
    """Train on a batch that :func:`rollout` gave; this is a whole step of the run.

    Args:
        change_flow: see :class:`verl.trainer.base.Trainer`, for this half.

    Raises:
        DataflowError: the batch lacks what a rollout with scores has. ConfigError: the schedule is not ``sync``.
    """
    if trainer.pipeline is not None:
        raise ConfigError("trainer.schedule=one_step_off runs both halves of a step itself: use fit() or train_step()")
    present = {*batch.non_tensor_batch, *(batch.batch.keys() if batch.batch is not None else ())}
    missing = [name for name in (*ROLLOUT, *SCORES, "uid", "sample_id", "prompt_ids") if name not in present]
    if missing:
        scores = " (give the trainer a reward_fn, then rollout() scores its samples)" if missing[0] in SCORES else ""
        raise DataflowError(f"update() needs a batch of rollout(): it has no {missing[0]!r}{scores}")
    prompts = _prompts_of(batch)
    columns = [name for name in prompts.non_tensor_batch if name not in _NOT_COLUMNS]
    keys = {"prompt": ["prompt_ids", *columns], "sample": [*ROLLOUT, *SCORES]}
    keys["prompt"] += prompts.tensor_keys() if prompts.batch is not None else []
    table = update_half(trainer.roles, trainer.config)
    flow = Dataflow(*table, inputs=keys, state=STATE, outputs=OUTPUTS)
    if change_flow is not None:
        flow = change_flow(flow, trainer.roles)
    flow.versions = trainer.flows.versions
    trainer.open()
    step = trainer.global_steps + 1
    return trainer.run_flow(flow, {"prompt": prompts, "sample": batch}, step, commit=True)


def _ruled(prompts: DataProto) -> bool:
    """Whether every prompt has a rule that scores it without a reward function."""
    columns = prompts.non_tensor_batch
    styles = [row.get("style") for row in columns["reward_model"]]
    return all(
        style == "reference" or find_scorer(source) is not None
        for style, source in zip(styles, columns["data_source"], strict=True)
    )


def _with_prompts(result: StepResult) -> DataProto:
    """The samples with every column of their prompt beside them."""
    samples, prompts = result.frames["sample"], result.frames["prompt"]
    place = {uid: i for i, uid in enumerate(prompts.non_tensor_batch["uid"])}
    index = np.array([place[uid] for uid in samples.non_tensor_batch["uid"]])
    for name, column in prompts.non_tensor_batch.items():
        if name not in samples.non_tensor_batch:
            samples.non_tensor_batch[name] = column[index]
    if prompts.batch is not None and _BASELINE in prompts.batch.keys():
        samples.batch[_BASELINE] = prompts.batch[_BASELINE][index]
    samples.meta_info["metrics"] = result.metrics
    return samples


def _prompts_of(batch: DataProto) -> DataProto:
    """The prompt rows of a rollout, one for each uid, in order of first appearance."""
    uids = list(batch.non_tensor_batch["uid"])
    first = np.array(list({uid: i for i, uid in reversed(list(enumerate(uids)))}.values())[::-1])
    own = ("sample_id", "finish_reason", "reward_extra_info", "reward_error")
    names = [name for name in batch.non_tensor_batch if name not in own]
    tensors = [_BASELINE] if batch.batch is not None and _BASELINE in batch.batch.keys() else []
    picked = batch.select(batch_keys=tensors, non_tensor_batch_keys=names).select_idxs(first)
    picked.meta_info.pop("metrics", None)
    return picked
