"""Public cases B17 to B31: advantages, groups, the KL in the reward."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from verl.algorithms.advantages import compute_advantage, gae_unwhitened
from verl.algorithms.batch_metrics import group_metrics
from verl.algorithms.registry import registered_names
from verl.algorithms.rewards_shaping import apply_kl_penalty
from verl.config import load_config, validate
from verl.trainer.ppo.core_algos import (
    AdaptiveKLController,
    compute_grpo_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_rloo_outcome_advantage,
)


def outcome(fn, rewards, lengths=None):
    """One advantage a row, of one group."""
    lengths = lengths or [1] * len(rewards)
    mask = torch.zeros(len(rewards), max(lengths))
    grid = torch.zeros_like(mask)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        grid[row, length - 1] = rewards[row]
    advantages, _ = fn(grid, mask, np.array(["p"] * len(rewards), dtype=object))
    assert all(advantages[row, :length].unique().numel() == 1 for row, length in enumerate(lengths))
    return advantages[:, 0].tolist()


def batch_of(rewards, mask, **more):
    rewards, mask = torch.tensor(rewards), torch.tensor(mask)
    values = {"values": torch.zeros_like(rewards), "reward_baselines": torch.zeros(len(rewards))}
    uids = np.array(["p"] * len(rewards), dtype=object)
    return {"token_level_rewards": rewards, "response_mask": mask, "uid": uids, **values, **more}


def test_B17_a_group_without_spread_teaches_nothing_and_is_counted():
    assert outcome(compute_grpo_outcome_advantage, [1.0] * 4) == [0.0] * 4
    assert outcome(compute_grpo_outcome_advantage, [1.0, 0.0, 0.0, 0.0]) == pytest.approx(
        [1.5, -0.5, -0.5, -0.5], abs=1e-4
    )
    metrics = group_metrics([1.0] * 4 + [1.0, 0.0], ["a"] * 4 + ["b"] * 2)
    assert metrics["training/zero_std_groups"] == 1


def test_B19_a_group_of_one_has_advantage_zero_in_every_variant_and_is_told():
    for name in (
        "grpo",
        "grpo_vectorized",
        "rloo",
        "rloo_vectorized",
        "grpo_passk",
        "opo",
        "reinforce_plus_plus_baseline",
    ):
        found = compute_advantage(name, batch_of([[3.0]], [[1]]))
        assert found["advantages"].tolist() == [[0.0]], name
    from verl import notices

    config = load_config(["data.train_files=x/y", "actor_rollout_ref.model.path=x/y", "algorithm.adv_estimator=grpo"])
    validate(config)
    assert any("rollout.n=1" in line for line in notices.seen())


def test_B20_rloo_and_opo():
    assert outcome(compute_rloo_outcome_advantage, [1.0, 0.0, 0.0]) == pytest.approx([1.0, -0.5, -0.5])
    assert outcome(compute_opo_outcome_advantage, [1.0, 0.0], lengths=[1, 3]) == pytest.approx([0.75, -0.25])


def test_B22_rewards_of_rejected_tokens_are_dropped():
    batch = batch_of([[0.0, 1.0], [0.0, 0.0]], [[1, 0], [1, 1]], generation_mask=torch.ones(2, 2))
    assert compute_advantage("grpo", batch)["advantages"].eq(0).all()


def test_B23_gae_reads_nothing_at_padding():
    mask = torch.tensor([[1, 1, 0]])
    for last in (0.0, 100.0, math.nan):
        rewards, values = torch.tensor([[0.0, 1.0, last]]), torch.tensor([[0.0, 0.0, last]])
        advantages, returns = gae_unwhitened(rewards, values, mask, 1.0, 0.95)
        assert advantages[0, :2].tolist() == pytest.approx([0.95, 1.0])
        assert returns[0, :2].tolist() == pytest.approx([0.95, 1.0])
    advantages, _ = gae_unwhitened(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.25, 9.0]]), mask, 1.0, 0.95)
    assert advantages[0, :2].tolist() == pytest.approx([0.4625, 0.75])


def test_B24_an_observation_is_no_step_of_gae():
    mask = torch.tensor([[1, 0, 1]])
    advantages, _ = gae_unwhitened(torch.tensor([[0.0, 0.0, 1.0]]), torch.zeros(1, 3), mask, 1.0, 0.5)
    assert advantages.tolist() == [[0.5, 0.0, 1.0]]


@pytest.mark.parametrize("name", list(registered_names()[0]))
def test_B25_a_terminal_reward_on_a_masked_token_is_not_lost(name):
    """The first row's episode ends with tool output; the second row has reward 0."""
    moved = batch_of([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], [[1, 1, 0], [1, 1, 0]])
    plain = batch_of([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], [[1, 1, 0], [1, 1, 0]])
    advantages = compute_advantage(name, moved)["advantages"]
    assert torch.equal(advantages, compute_advantage(name, plain)["advantages"])
    assert advantages[0, 1] > 0 and advantages[:, 2].eq(0).all()


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_B27_whitening_one_token_or_none_goes_on(name):
    one = compute_advantage(name, batch_of([[5.0, 0.0]], [[1, 0]]))
    none = compute_advantage(name, batch_of([[5.0, 0.0]], [[0, 0]]))
    for found in (one, none):
        assert found["advantages"].eq(0).all()
        assert found["metrics"]["training/advantage_whiten_degenerate"] == 1


def test_B29_no_kl_penalty_at_observations():
    mask = torch.tensor([[1, 0, 1]])
    rewards, observed, _ = apply_kl_penalty(
        torch.zeros(1, 3), torch.tensor([[0.0, 1.0, 0.0]]), torch.zeros(1, 3), mask, 1.0
    )
    assert rewards.eq(0).all() and observed == 0.0
    returns = compute_advantage("reinforce_plus_plus", batch_of(rewards.tolist(), mask.tolist()))["returns"]
    assert returns.eq(0).all()


def test_B31_the_adaptive_controller():
    controller = AdaptiveKLController(0.001, target_kl=0.1, horizon=10_000)
    controller.update(0.3, 1024)
    assert controller.value == pytest.approx(0.00102048)
