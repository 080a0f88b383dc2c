"""Importance weights and rejection between the trained and the sampling policy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.rollout_correction import importance_weights, offpolicy_metrics, rollout_correction
from verl.algorithms.rollout_rejection import MODES, parse_rejection, rejection_mask
from verl.errors import ConfigError

torch.set_num_threads(1)


def ratios(rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def test_token_weights_are_truncated():
    weights, metrics = importance_weights(ratios([[0.5, 3.0, 1.0]]), torch.tensor([[1, 1, 0]]), "token", 2.0)
    assert weights[0].tolist() == pytest.approx([0.5, 2.0, 0.0])
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.25)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.25**2 / 2.125)


def test_sequence_weights_are_products():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    weights, _ = importance_weights(ratios([[0.5, 3.0, 9.0], [4.0, 9.0, 9.0]]), mask, "sequence", 2.0)
    assert weights.flatten().tolist() == pytest.approx([1.5, 1.5, 0.0, 2.0, 0.0, 0.0])


def test_two_thresholds_cut_out_what_lies_outside():
    weights, _ = importance_weights(ratios([[0.4, 0.6, 1.9, 2.1]]), torch.ones(1, 4), "token", "0.5_2.0")
    assert weights[0].tolist() == pytest.approx([0.0, 0.6, 1.9, 0.0])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_normalisation(level):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    weights, metrics = importance_weights(ratios([[0.5] * 3, [1.5] * 3, [7.0] * 3]), mask, level, 2.0, True)
    plain, _ = importance_weights(ratios([[0.5] * 3, [1.5] * 3, [7.0] * 3]), mask, level, 2.0)
    mean = plain[mask.bool()].mean() if level == "token" else plain[:2, 0].mean()
    assert torch.allclose(weights, plain / mean)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(float(mean))


def reference_keep(mode, x, mask, low, high):
    """Which tokens a mode keeps, one sequence at a time."""
    kept = np.zeros(mask.shape, dtype=bool)
    level, divergence = mode.rsplit("_", 1)
    for i in range(len(mask)):
        steps = [t for t in range(mask.shape[1]) if mask[i, t]]
        gaps = [min(max(float(x[i, t]), -20), 20) for t in steps]
        values = [{"k1": -g, "k2": g * g / 2, "k3": math.exp(g) - 1 - g}[divergence] for g in gaps]
        if not steps:
            continue
        whole = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values), "seq_max": max(values)}
        for t, value in zip(steps, values, strict=True):
            kept[i, t] = low <= (value if level == "token" else whole[level]) <= high
    return kept


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_rejection_equals_the_reference(mode, seed):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=(4, 5)) * 0.5, rng.random((4, 5)) < 0.6
    threshold = "0.6_1.5" if mode.endswith("k1") else 0.1
    low, high = (math.log(0.6), math.log(1.5)) if mode.endswith("k1") else (-math.inf, 0.1)
    kept, metrics = rejection_mask(torch.from_numpy(x), torch.from_numpy(mask), mode, threshold)
    assert (kept.numpy() == reference_keep(mode, x, mask, low, high)).all()
    if mask.any():
        lost = (mask & ~kept.numpy()).sum() / mask.sum()
        assert metrics["rollout_rs_masked_fraction"] == pytest.approx(lost)


def test_modes_are_combined():
    x = torch.tensor([[0.0, 1.0], [0.1, 0.1]])
    kept, _ = rejection_mask(x, torch.ones(2, 2), "token_k2,seq_max_k3", "0.004,0.3")
    assert kept.tolist() == [[False, False], [False, False]]
    kept, _ = rejection_mask(x, torch.ones(2, 2), "token_k2,seq_max_k3", "0.1,0.3")
    assert kept.tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize(
    ("modes", "thresholds", "message"),
    [
        ("token_k9", 1.0, "token_k9.*unknown"),
        ("token_k1", None, "one threshold"),
        ("token_k1,seq_sum_k2", "1,2,3", "each of 2 modes"),
        ("seq_sum_k2", "0.5_2", "one number"),
        ("token_k1", "2_0.5", "above the high"),
        ("token_k2", "-1", "positive"),
    ],
)
def test_wrong_rejection_settings(modes, thresholds, message):
    with pytest.raises(ConfigError, match=message):
        parse_rejection(modes, thresholds)


def test_wrong_weight_settings():
    for threshold in ("x", -1.0, "2_1", "1_2_3"):
        with pytest.raises(ConfigError, match="rollout_is_threshold"):
            importance_weights(torch.zeros(1, 1), torch.ones(1, 1), "token", threshold)
    with pytest.raises(ConfigError, match="null, token or sequence"):
        importance_weights(torch.zeros(1, 1), torch.ones(1, 1), "word")


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e9])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", MODES)
def test_garbage_and_extremes(poison, level, mode):
    config = {
        "rollout_is": level,
        "rollout_is_batch_normalize": True,
        "rollout_rs": mode,
        "rollout_rs_threshold": 3.0,
    }
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    old = torch.tensor([[-1.0, -1e4, 0.0], [0.0] * 3, [-2.0, 0.0, 0.0]])
    sampled = torch.tensor([[-1.1, -1.0, 0.0], [0.0] * 3, [-2.1, 0.0, 0.0]])
    clean = rollout_correction(old, sampled, mask, config)
    hidden = mask == 0
    dirty = rollout_correction(old.masked_fill(hidden, poison), sampled.masked_fill(hidden, -poison), mask, config)
    assert torch.equal(dirty.weights, clean.weights) and torch.equal(dirty.response_mask, clean.response_mask)
    assert clean.weights.isfinite().all()
    assert dirty.metrics.results() == clean.metrics.results()
    assert not (clean.response_mask & hidden).any()
    empty = rollout_correction(old, sampled, torch.zeros(3, 3), config)
    assert (empty.weights == 0).all() and len(empty.metrics) <= 1


def test_nothing_asked_nothing_changed():
    mask = torch.tensor([[1, 0]])
    found = rollout_correction(torch.zeros(1, 2), torch.zeros(1, 2), mask, {})
    assert found.weights is None
    assert found.response_mask.tolist() == [[True, False]]
    assert found.metrics["rollout_corr/kl"] == 0.0


def test_offpolicy_metrics():
    train, sampled = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -2.0, 0.0]])
    found = offpolicy_metrics(train, sampled, torch.tensor([[1, 1, 0]]))
    assert found["rollout_corr/kl"] == pytest.approx(-0.25)
    assert found["rollout_corr/k3_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert found["rollout_corr/training_ppl"] == pytest.approx(math.exp(1.5))
    assert found["rollout_corr/ppl_ratio"] == pytest.approx(math.exp(-0.25))
    assert found["rollout_corr/chi2_token"] == pytest.approx((math.e - 1) / 2)
    assert found["rollout_corr/chi2_seq"] == pytest.approx(math.e - 1)
