"""The nodes that run on the controller: shaping rewards, correction, advantages, plans, filtering, metrics.

Each is a small function of a batch; what it needs of the configuration is bound when the table is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from verl.algorithms.advantages import compute_advantage
from verl.algorithms.batch_metrics import data_metrics, group_metrics, rollout_agreement
from verl.algorithms.group_filter import keep_varied_groups
from verl.algorithms.kl_controller import FixedKLController
from verl.algorithms.masked import as_mask
from verl.algorithms.rewards_shaping import apply_kl_penalty, last_token, overlong_penalty
from verl.algorithms.rollout_correction import rollout_correction
from verl.config import Config
from verl.config.tree import Actor, Critic
from verl.errors import RewardError
from verl.metrics import Metrics
from verl.models.packing import packed_lengths
from verl.notices import notice
from verl.protocol import DataProto
from verl.train_engine.plan import MiniBatchPlan, plan_for


def tensors_of(batch: DataProto) -> dict[str, Any]:
    """All columns of a batch by name."""
    tensors = {} if batch.batch is None else {key: batch.batch[key] for key in batch.batch.keys()}
    return {**tensors, **batch.non_tensor_batch}


def result(metrics: Metrics | None = None, **tensors: torch.Tensor) -> DataProto:
    """What a node gives: tensors in the order of the rows that it got, and metrics."""
    given = DataProto.from_dict(tensors=tensors)
    if metrics is not None:
        given.meta_info["metrics"] = metrics
    return given


def shape_rewards(batch: DataProto, *, config: Config, kl_controller: FixedKLController) -> DataProto:
    """``token_level_rewards``: the scores, less the soft penalty on length and the KL in the reward."""
    b, metrics = tensors_of(batch), Metrics()
    rewards, mask = b["token_level_scores"].float(), as_mask(b["response_mask"])
    penalty = _length_penalty(b, config)
    if penalty is not None:
        metrics.add("reward/overlong_penalty/mean", float(penalty.mean()), weight=len(penalty))
        rewards = torch.where(last_token(mask), rewards + penalty[:, None], rewards)
    if config.algorithm.use_kl_in_reward:
        before = b["old_log_probs"] if "old_log_probs" in b else b["rollout_log_probs"]
        rewards, observed, found = apply_kl_penalty(
            rewards, before, b["ref_log_prob"], mask, kl_controller.value, config.algorithm.kl_penalty
        )
        metrics.merge(found)
        kl_controller.update(observed, len(rewards))
    return result(metrics, token_level_rewards=rewards)


def _length_penalty(b: Mapping[str, Any], config: Config) -> torch.Tensor | None:
    """(B,) what DAPO's soft limit adds to a response's score; None where it is off."""
    overlong = config.reward.overlong_buffer
    if not overlong.enable:
        return None
    lengths = b["attention_mask"][:, -b["response_mask"].shape[1] :].sum(1)
    return overlong_penalty(lengths, config.data.max_response_length, overlong.len, overlong.penalty_factor)


def correct(batch: DataProto, *, config: Config) -> DataProto:
    """``rollout_is_weights`` (if asked for) and ``trained_mask`` of the off-policy correction."""
    b = tensors_of(batch)
    correction = config.algorithm.rollout_correction
    found = rollout_correction(b["old_log_probs"], b["rollout_log_probs"], b["response_mask"], correction)
    weights = {} if found.weights is None else {"rollout_is_weights": found.weights}
    return result(found.metrics, trained_mask=found.response_mask.to(b["response_mask"].dtype), **weights)


def advantages(batch: DataProto, *, config: Config) -> DataProto:
    """``advantages`` and ``returns`` of the configured estimator, over the whole batch at once."""
    b = tensors_of(batch)
    if "trained_mask" in b:
        # rewards belong to what was generated; what was rejected since is not trained
        b = {**b, "generation_mask": b["response_mask"], "response_mask": b["trained_mask"]}
    found = compute_advantage(config.algorithm.adv_estimator, b, config.algorithm)
    return result(found["metrics"], advantages=found["advantages"], returns=found["returns"])


def baseline(batch: DataProto) -> DataProto:
    """``reward_baselines`` (B,): the summed score of each prompt's greedy response, for ReMax; NaN where it failed."""
    b, metrics = tensors_of(batch), Metrics()
    scores, mask, valid = b["token_level_scores"], as_mask(b["response_mask"]), as_mask(b["score_valid"])
    metrics.add("reward/baseline_failed", float((~valid).sum()), reduce="sum")
    return result(metrics, reward_baselines=scores.masked_fill(~mask, 0).sum(1).masked_fill(~valid, float("nan")))


def make_plans(batch: DataProto, *, config: Config) -> DataProto:
    """``step/plan``: the mini-batches of the policy's update."""
    return DataProto(meta_info={"plan": _plan(batch, config.actor_rollout_ref.actor, config)})


def make_critic_plan(batch: DataProto, *, config: Config) -> DataProto:
    """``step/critic_plan``: the mini-batches of the value model's update."""
    return DataProto(meta_info={"critic_plan": _plan(batch, config.critic, config)})


def _plan(batch: DataProto, role: Actor | Critic, config: Config) -> MiniBatchPlan:
    return plan_for(
        batch,
        packed_lengths(batch),
        mini_batch_prompts=role.ppo_mini_batch_size,
        epochs=role.ppo_epochs,
        shuffle=role.shuffle,
        seed=config.actor_rollout_ref.actor.data_loader_seed + batch.meta_info["global_step"],
    )


def filter_groups(batch: DataProto, *, metric: str, config: Config | None = None) -> DataProto:
    """The rows of prompts whose responses do not all score the same (dynamic sampling).

    Args:
        metric: ``score`` (what the reward function gave), ``acc`` (what it reported under that name), ``seq_reward``
            (the score with the soft penalty on length) or ``seq_final_reward`` (the same here: with a KL in the reward,
            which is not known yet, the configuration is refused).
        config: for the penalty on length.
    """
    b = tensors_of(batch)
    scores = b["token_level_scores"].masked_fill(~as_mask(b["response_mask"]), 0).sum(1).numpy()
    if metric == "acc":
        found = [extra.get("acc") if isinstance(extra, dict) else None for extra in b["reward_extra_info"]]
        if all(acc is None for acc in found):
            notice(
                "algorithm.filter_groups.metric=acc: the reward function reports no 'acc', so scores are compared.",
                key="filter_groups/acc",
            )
        scores = np.array([score if acc is None else _accuracy(acc) for acc, score in zip(found, scores, strict=True)])
    penalty = _length_penalty(b, config) if config is not None and metric.startswith("seq_") else None
    if penalty is not None:
        scores = scores + penalty.numpy()
    keep, metrics = keep_varied_groups(scores, b["uid"], b["score_valid"])
    kept = DataProto(non_tensor_batch={key: b[key][keep] for key in ("uid", "sample_id")})
    kept.meta_info["metrics"] = metrics
    return kept


def _accuracy(value: Any) -> float:
    if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        raise RewardError(
            f"algorithm.filter_groups.metric=acc compares the 'acc' that the reward function reports, which is "
            f"{value!r:.60} here: report true, false or a number, or leave the metric at the score"
        )
    return float(value)


def batch_metrics(batch: DataProto, *, config: Config) -> Metrics:
    """verl's metrics of the training batch."""
    b = tensors_of(batch)
    metrics = data_metrics(b, config.data.max_prompt_length)
    scores = b["token_level_scores"].masked_fill(~as_mask(b["response_mask"]), 0).sum(1)
    metrics.merge(group_metrics(scores, b["uid"], b["score_valid"]))
    if "old_log_probs" in b:
        metrics.merge(rollout_agreement(b["old_log_probs"], b["rollout_log_probs"], b["response_mask"]))
    return metrics
