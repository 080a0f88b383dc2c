"""Policy losses: slow references, invariance to how the mini-batch is cut, garbage at masked positions, extremes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import core_algos
from verl.algorithms.aggregation import LOSS_AGG_MODES, GlobalCounts, use_counts
from verl.algorithms.policy_loss.covariance import prepare_clip_cov, prepare_kl_cov
from verl.algorithms.registry import get_policy_loss_fn, registered_names
from verl.errors import ConfigError
from verl.metrics import Metrics

torch.set_num_threads(1)
NAMES = registered_names()[1]
COVARIANCE = ["clip_cov", "kl_cov"]
CONFIG = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "policy_loss": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.2},
}


def tensors(seed, rows=5, width=6, spread=0.4, empty=0.2):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) < 0.7
    mask[rng.random(rows) < empty] = False
    old = -rng.exponential(1.5, size=(rows, width))
    new = np.minimum(old + spread * rng.normal(size=(rows, width)), -1e-3)
    advantages = np.repeat(rng.normal(size=(rows, 1)), width, axis=1)
    weights = rng.uniform(0.2, 2.0, size=(rows, width))
    return tuple(torch.from_numpy(x) for x in (old, new, advantages, mask, weights))


def evaluate(name, old, new, advantages, mask, mode="token-mean", config=CONFIG, **extra):
    """(loss, gradient with respect to log_prob, metrics)"""
    leaf = new.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(old, leaf, advantages, mask, mode, config, **extra)
    loss.backward()
    return loss.detach(), leaf.grad, metrics


def token_loss(name, old, new, adv, low=0.2, high=0.28):
    """The loss of one token from the formula; None for those that are not made of single tokens."""
    ratio = math.exp(min(max(new - old, -20.0), 20.0))
    clipped = min(max(ratio, 1 - low), 1 + high)
    if name == "vanilla":
        upper = max(-adv * ratio, -adv * clipped)
        return min(upper, -adv * 3.0) if adv < 0 else upper
    if name == "gpg":
        return -adv * new
    if name == "cispo":
        return -clipped * adv * new
    if name == "sapo":
        tau = 1.0 if adv > 0 else 1.05
        return -adv * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if name == "dppo_tv":
        shift = math.exp(new) - math.exp(old)
        keep = shift <= high if adv > 0 else shift >= -low
        return -adv * min(ratio, 20.0) * new * keep
    if name == "dppo_kl":
        p, q = math.exp(old), math.exp(new)
        divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        keep = (divergence <= high or q <= p) if adv > 0 else (divergence <= low or q >= p)
        return -adv * min(ratio, 20.0) * new * keep
    return None


def reference(name, old, new, advantages, mask, weights):
    low, high = 0.2, 0.28
    rows = []
    for i in range(len(mask)):
        steps = [t for t in range(mask.shape[1]) if mask[i, t]]
        if not steps:
            continue
        gap = [float(new[i, t] - old[i, t]) for t in steps]
        adv = [float(advantages[i, t]) for t in steps]
        w = [float(weights[i, t]) for t in steps]
        if name == "gspo":
            s = math.exp(sum(gap) / len(gap))
            clipped = min(max(s, 1 - low), 1 + high)
            rows.append([max(-a * s, -a * clipped) * x for a, x in zip(adv, w, strict=True)])
        elif name == "geo_mean":
            a = sum(adv) / len(adv)
            bounded = [min(g, high) if a > 0 else max(g, -low) for g in gap]
            geometric = math.exp(sum(math.log(x) for x in w) / len(w))
            rows.append([-a * math.exp(sum(bounded) / len(bounded)) * geometric])
        else:
            tokens = zip(steps, adv, w, strict=True)
            rows.append([token_loss(name, float(old[i, t]), float(new[i, t]), a) * x for t, a, x in tokens])
    if not rows:
        return 0.0
    if name in ("gspo", "sapo", "geo_mean"):
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / sum(map(len, rows))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in COVARIANCE])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_equals_the_slow_reference(name, seed):
    old, new, advantages, mask, weights = tensors(seed, spread=1.0)
    config = dict(CONFIG, clip_ratio_c=20.0) if name.startswith("dppo") else CONFIG
    loss, grad, _ = evaluate(name, old, new, advantages, mask, config=config, rollout_is_weights=weights)
    assert float(loss) == pytest.approx(reference(name, old, new, advantages, mask, weights), rel=1e-6, abs=1e-9)
    assert (grad[~mask] == 0).all()


@pytest.mark.parametrize("name", COVARIANCE)
def test_covariance_losses_equal_the_slow_reference(name):
    for seed in range(10):
        old, new, advantages, mask, weights = tensors(seed, empty=0.0)
        selection = get_policy_loss_fn(name).prepare(old, new, advantages, mask, CONFIG, generator_seed=seed)
        assert selection.dtype == torch.bool and not (selection & ~mask).any()
        loss, _, _ = evaluate(name, old, new, advantages, mask, selection=selection, rollout_is_weights=weights)
        total = 0.0
        for i, t in mask.nonzero().tolist():
            a, ratio = float(advantages[i, t]), math.exp(float(new[i, t] - old[i, t]))
            if name == "kl_cov":
                value = -a * ratio + 0.1 * abs(float(new[i, t] - old[i, t])) * bool(selection[i, t])
            else:
                value = max(-a * ratio, -a * min(max(ratio, 0.8), 1.28)) * (not selection[i, t])
            total += value * float(weights[i, t])
        assert float(loss) == pytest.approx(total / int(mask.sum()), rel=1e-9)


def test_which_tokens_the_covariance_holds_back():
    old, new, advantages, mask, _ = tensors(4, empty=0.0)
    kept_adv, kept_logp = advantages[mask], new[mask]
    covariance = torch.zeros_like(new)
    covariance[mask] = (kept_adv - kept_adv.mean()) * (kept_logp - kept_logp.mean())
    count = int(0.2 * int(mask.sum()))
    chosen = prepare_kl_cov(old, new, advantages, mask, CONFIG)
    assert int(chosen.sum()) == count
    assert covariance[chosen].min() >= covariance[mask & ~chosen].max()
    held = prepare_clip_cov(old, new, advantages, mask, CONFIG, generator_seed=1)
    ratio = (new - old).exp()
    clipped = torch.where(advantages > 0, ratio > 1.28, ratio < 0.8)
    eligible = mask & (covariance > 0.05) & (covariance < 5.0) & ~clipped
    assert int(held.sum()) == min(count, int(eligible.sum())) > 0
    assert not (held & ~eligible).any()
    assert torch.equal(held, prepare_clip_cov(old, new, advantages, mask, CONFIG, generator_seed=1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(seed=st.integers(0, 10**6), cut=st.integers(0, 5))
@settings(max_examples=6, deadline=None)
def test_cut_and_padding_do_not_matter(name, mode, seed, cut):
    old, new, advantages, mask, weights = tensors(seed)
    loss_fn = get_policy_loss_fn(name)
    extra = {"rollout_is_weights": weights}
    if loss_fn.prepare is not None:
        extra["selection"] = loss_fn.prepare(old, new, advantages, mask, CONFIG, generator_seed=7)
    whole, whole_grad, whole_metrics = evaluate(name, old, new, advantages, mask, mode, **extra)
    total, grads, bags = 0.0, [], []
    with use_counts(GlobalCounts.of(mask, horizon=mask.shape[1])):
        for part in (slice(0, cut), slice(cut, 5)):
            pieces = [torch.nn.functional.pad(x[part], (0, 2)) for x in (old, new, advantages, mask)]
            more = {key: torch.nn.functional.pad(value[part], (0, 2)) for key, value in extra.items()}
            loss, grad, metrics = evaluate(name, *pieces, mode, **more)
            total += loss
            grads.append(grad[:, :-2])
            bags.append(metrics)
    assert torch.allclose(total, whole, atol=1e-12)
    assert torch.allclose(torch.cat(grads), whole_grad, atol=1e-12)
    merged = Metrics.merged(bags)
    assert merged.results() == pytest.approx(whole_metrics.results(), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e9, -1e9])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_b08_garbage_at_masked_positions_changes_nothing(name, poison, seed):
    old, new, advantages, mask, weights = tensors(seed)
    clean, clean_grad, clean_metrics = evaluate(name, old, new, advantages, mask, rollout_is_weights=weights)
    dirty = [x.masked_fill(~mask, poison) for x in (old, new, advantages)]
    loss, grad, metrics = evaluate(name, *dirty, mask, rollout_is_weights=weights.masked_fill(~mask, poison))
    assert torch.equal(loss, clean) and torch.equal(grad, clean_grad)
    assert metrics.results() == clean_metrics.results()
    assert loss.isfinite() and grad.isfinite().all() and metrics.finite()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_ratios_stay_finite(name, gap, dtype):
    new = torch.full((2, 3), -1.0 if gap > 0 else -1.0 + gap, dtype=dtype)
    old = torch.full((2, 3), -1.0 - gap if gap > 0 else -1.0, dtype=dtype)
    advantages = torch.tensor([[1.0], [-1.0]], dtype=dtype).expand(2, 3)
    loss, grad, metrics = evaluate(name, old, new, advantages, torch.ones(2, 3))
    assert loss.isfinite() and grad.isfinite().all() and metrics.finite()
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_learn_from(name):
    for rows, width in ((2, 3), (0, 3), (1, 1)):
        empty = torch.zeros(rows, width)
        loss, grad, metrics = evaluate(name, empty, empty, empty, empty)
        assert float(loss) == 0.0 and (grad == 0).all() and len(metrics) == 0


@pytest.mark.parametrize("name", NAMES)
def test_b11_first_update_has_ratio_one(name):
    _, new, advantages, mask, _ = tensors(0, empty=0.0)
    _, grad, metrics = evaluate(name, new, new, advantages, mask)
    assert metrics["actor/ppo_kl"] == 0.0
    if name not in COVARIANCE:
        assert metrics.results().get("actor/pg_clipfrac", 0.0) == 0.0
        # at ratio 1 every one of them is the policy gradient: -A at each token, over the denominator of its aggregation
        lengths = mask.sum(dim=-1, keepdim=True)
        per_sequence = name in ("gspo", "sapo", "geo_mean")
        share = 1 / (lengths * len(mask)) if per_sequence else 1 / mask.sum()
        assert torch.allclose(grad, torch.where(mask, -advantages * share, 0.0), atol=1e-7)


def test_b10_clip_ratio_alone_sets_both_bounds():
    old, new = torch.zeros(1, 1), torch.tensor([[math.log(1.15)]])
    for config in ({"clip_ratio": 0.1}, {"clip_ratio": 0.1, "clip_ratio_low": None, "clip_ratio_high": None}):
        loss, grad, metrics = evaluate("vanilla", old, new, torch.ones(1, 1), torch.ones(1, 1), config=config)
        assert float(loss) == pytest.approx(-1.1)
        assert float(grad) == 0.0
        assert metrics["actor/pg_clipfrac"] == 1.0


def test_dual_clip_bounds_the_loss_of_bad_actions():
    old, new = torch.zeros(1, 2), torch.tensor([[math.log(5.0), math.log(5.0)]])
    loss, grad, metrics = evaluate("vanilla", old, new, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2))
    assert float(loss) == pytest.approx((3.0 - 1.28) / 2)
    assert grad.tolist() == [[0.0, 0.0]]
    assert metrics["actor/pg_clipfrac_lower"] == 0.5
    with pytest.raises(ConfigError, match=r"clip_ratio_c=1\.0 must be greater"):
        evaluate("vanilla", old, new, torch.ones(1, 2), torch.ones(1, 2), config={"clip_ratio_c": 1.0})


def test_metrics_are_weighted_by_tokens():
    old, mask = torch.zeros(2, 4), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    new = torch.tensor([[-0.1] * 4, [-0.5] * 4])
    bags = [evaluate("vanilla", old[i : i + 1], new[i : i + 1], old[:1], mask[i : i + 1])[2] for i in range(2)]
    assert Metrics.merged(bags)["actor/ppo_kl"] == pytest.approx((3 * 0.1 + 0.5) / 4)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="differ in shape"):
        evaluate("vanilla", torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2), torch.ones(1, 2))


def test_old_names():
    old, new, advantages, mask, _ = tensors(5)
    loss, clipfrac, kl, lower = core_algos.compute_policy_loss(old, new, advantages, mask, 0.2, cliprange_high=0.28)
    expected, _, metrics = evaluate("vanilla", old, new, advantages, mask)
    assert torch.equal(loss, expected)
    assert (clipfrac, kl, lower) == (
        metrics["actor/pg_clipfrac"],
        metrics["actor/ppo_kl"],
        metrics["actor/pg_clipfrac_lower"],
    )
