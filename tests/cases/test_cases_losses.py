"""Public cases B01 to B15: aggregation, policy losses, KL."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases_actor import live, make_actor, moved, plan_of, recorded

from verl.algorithms.aggregation import LOSS_AGG_MODES, GlobalCounts
from verl.algorithms.kl import kl_loss
from verl.algorithms.registry import get_policy_loss_fn, registered_names
from verl.config import load_config, resolve
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, kl_penalty


def aggregated(losses, mask, mode, **how):
    """(loss, gradient) of ``agg_loss``."""
    leaf = torch.tensor(losses, requires_grad=True)
    loss = agg_loss(leaf, torch.tensor(mask), mode, **how)
    loss.backward()
    return float(loss.detach()), leaf.grad


def test_B01_micro_batches_share_the_global_denominator():
    counts = GlobalCounts(tokens=4, sequences=2)
    first, grad_1 = aggregated([[1.0, 9.0, 9.0]], [[1, 0, 0]], "token-mean", counts=counts)
    second, grad_2 = aggregated([[0.0, 0.0, 0.0]], [[1, 1, 1]], "token-mean", counts=counts)
    whole, grad = aggregated([[1.0, 9.0, 9.0], [0.0, 0.0, 0.0]], [[1, 0, 0], [1, 1, 1]], "token-mean")
    assert first + second == whole == 0.25
    assert torch.equal(torch.cat([grad_1, grad_2]), grad)
    parts = [
        aggregated([[value] * n], [[1] * n], "token-mean", batch_num_tokens=1000)[0]
        for value, n in [(0.5, 100), (0.3, 900)]
    ]
    assert sum(parts) == pytest.approx(0.32)


def test_B03_a_masked_row_leaves_numerator_and_denominator():
    loss, grad = aggregated([[1.0] * 4] * 2, [[1] * 4, [0] * 4], "token-mean")
    assert loss == 1.0 and grad[1].eq(0).all()
    for mode in LOSS_AGG_MODES:
        loss, grad = aggregated([[1.0] * 4] * 2, [[0] * 4] * 2, mode)
        assert loss == 0.0 and grad.eq(0).all()


@pytest.mark.parametrize(
    ("mode", "right"), [("token-mean", 2.5), ("seq-mean-token-sum", 5.0), ("seq-mean-token-mean", 2.5)]
)
def test_B05_nan_at_masked_positions(mode, right):
    mask = [[1, 0, 1], [1, 1, 0]]
    loss, grad = aggregated([[1.0, math.nan, 3.0], [2.0, 4.0, math.nan]], mask, mode)
    assert loss == right and grad.isfinite().all()
    assert grad[torch.tensor(mask) == 0].eq(0).all()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_B06_an_empty_micro_batch_is_zero_without_gradient(mode):
    loss, grad = aggregated([[math.nan, 2.0]], [[0, 0]], mode)
    assert loss == 0.0 and grad.eq(0).all()


def test_B07_fully_masked_sequences_count_in_neither_path():
    mask = [[1, 1], [1, 0], [0, 0]]
    local, _ = aggregated([[1.0, 1.0]] * 3, mask, "seq-mean-token-mean")
    given, _ = aggregated([[1.0, 1.0]] * 3, mask, "seq-mean-token-mean", global_batch_size=2)
    counted, _ = aggregated([[1.0, 1.0]] * 3, mask, "seq-mean-token-mean", counts=GlobalCounts.of(torch.tensor(mask)))
    assert local == given == counted == 1.0


@pytest.mark.parametrize("name", registered_names()[1])
def test_B08_every_loss_reads_the_mask_in_its_own_slot(name):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    new = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, -2.5]])
    old, advantages = new + 0.1, torch.tensor([[1.0] * 3, [-0.5] * 3])
    values = []
    for garbage in (0.0, math.nan, 1e9):
        leaf = new.masked_fill(mask == 0, garbage).requires_grad_()
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=old.masked_fill(mask == 0, garbage),
            log_prob=leaf,
            advantages=advantages.masked_fill(mask == 0, garbage),
            response_mask=mask,
            loss_agg_mode="token-mean",
            config={},
        )
        loss.backward()
        values.append((float(loss.detach()), leaf.grad.tolist(), metrics.results()))
    assert values[0] == values[1] == values[2] and math.isfinite(values[0][0])


def test_B10_clip_ratio_alone_moves_both_bounds():
    config = resolve(load_config(["actor_rollout_ref.actor.clip_ratio=0.1"])).actor_rollout_ref.actor
    assert (config.clip_ratio_low, config.clip_ratio_high) == (0.1, 0.1)
    log_prob = torch.tensor([[math.log(1.15)]])
    loss, _ = compute_policy_loss_vanilla(
        torch.zeros(1, 1), log_prob, torch.ones(1, 1), torch.ones(1, 1), config=config
    )
    assert float(loss) == pytest.approx(-1.1)


def test_B11_the_only_update_has_ratio_one_whatever_the_micro_batches(tiny_model_dir):
    actor = make_actor(tiny_model_dir, update_rows=1, log_prob_rows=2)
    batch = recorded()
    serves = actor.update(batch, plan_of(batch))  # without a pass of its own, the update's log-probs are the old ones
    assert serves["actor/ppo_kl"] == 0.0 and serves["actor/pg_clipfrac"] == 0.0
    actor = make_actor(tiny_model_dir, update_rows=1, log_prob_rows=2)
    passed = recorded()
    passed.batch["old_log_probs"] = actor.compute_log_prob(passed).batch["old_log_probs"]
    metrics = actor.update(passed, plan_of(passed))
    assert metrics["actor/pg_clipfrac"] == 0.0 and abs(metrics["actor/ppo_kl"]) < 1e-6


def test_B12_four_mini_batches_are_four_steps_from_frozen_old_log_probs(tiny_model_dir):
    actor = make_actor(tiny_model_dir)
    batch = recorded()
    old = actor.compute_log_prob(batch).batch["old_log_probs"]
    batch.batch["old_log_probs"] = old.clone()
    plan = plan_of(batch, prompts=1, epochs=2)
    assert len(plan.mini_batches) == 4
    shifts = []
    for mini in plan.mini_batches:
        shifts.append(abs(actor.update(batch, dataclasses.replace(plan, mini_batches=[mini]))["actor/ppo_kl"]))
    assert actor.workers[0].engine.version == 4
    assert shifts[0] < 1e-6 and all(shift > 1e-5 for shift in shifts[1:])
    assert torch.equal(batch.batch["old_log_probs"], old)


def test_B13_k3_of_a_huge_gap_is_finite_in_both_directions():
    for logp, ref in ((-60.0, -1.0), (-1.0, -60.0)):
        leaf = torch.tensor([[logp]], requires_grad=True)
        value = kl_penalty(leaf, torch.tensor([[ref]]), "low_var_kl")
        value.backward()
        assert value.isfinite().all() and leaf.grad.isfinite().all()
    assert float(kl_penalty(torch.tensor([[-60.0]]), torch.tensor([[-1.0]]), "k3")) == 10.0


@pytest.mark.parametrize(
    ("logp", "ref", "right"),
    [
        (-1.0, -2.0, {"k1": 1.0, "k2": 0.5, "abs": 1.0, "k3": 0.36788}),
        (-2.0, -1.0, {"k1": -1.0, "k2": 0.5, "abs": 1.0, "k3": 0.71828}),
    ],
)
def test_B14_values_and_gradients_of_the_kl_estimators(logp, ref, right):
    for name, value in right.items():
        assert float(kl_penalty(torch.tensor([[logp]]), torch.tensor([[ref]]), name)) == pytest.approx(value, abs=1e-5)
    slopes = {}
    for name in ("k3", "k3+"):
        leaf = torch.tensor([[logp]], requires_grad=True)
        value = kl_penalty(leaf, torch.tensor([[ref]]), name)
        value.backward()
        assert float(value.detach()) == pytest.approx(right["k3"], abs=1e-5)
        slopes[name] = float(leaf.grad)
    assert slopes["k3+"] == pytest.approx(logp - ref)
    assert slopes["k3"] == pytest.approx(1 - math.exp(ref - logp), abs=1e-5)


def test_B15_the_kl_loss_alone_has_a_gradient_towards_the_reference(tiny_model_dir):
    log_prob = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    loss, _ = kl_loss(log_prob, torch.tensor([[-2.0, -2.0]]), torch.ones(1, 2))
    loss.backward()
    assert log_prob.grad[0, 0] > 0 > log_prob.grad[0, 1]  # descent lowers the first and raises the second
    changes = {}
    for coefficient in (0.0, 0.1):
        actor = make_actor(tiny_model_dir, use_kl_loss=True, kl_loss_coef=coefficient)
        batch = recorded((0.0, 0.0, 0.0, 0.0))
        batch.batch["ref_log_prob"] = torch.full_like(batch.batch["advantages"], -2.0)
        before = live(actor)
        actor.update(batch, plan_of(batch))
        changes[coefficient] = moved(before, actor)
    assert changes[0.0] == 0.0 and changes[0.1] > 0


def test_the_divisor_of_the_length_norm_is_that_of_every_term(tiny_model_dir):
    """Doubling ``loss_scale_factor`` halves policy, entropy and KL terms alike."""
    losses = {}
    for scale in (10.0, 20.0):
        actor = make_actor(
            tiny_model_dir, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=scale,
            use_kl_loss=True, kl_loss_coef=0.5, entropy_coeff=0.3,
        )  # fmt: skip
        batch = recorded()
        batch.batch["ref_log_prob"] = torch.full_like(batch.batch["advantages"], -2.0)
        losses[scale] = actor.update(batch, plan_of(batch))["actor/loss"]
    assert losses[10.0] == pytest.approx(2 * losses[20.0], rel=1e-5)
