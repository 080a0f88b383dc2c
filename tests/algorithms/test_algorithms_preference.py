"""Preference losses: values against independent numpy formulas, hand-worked cases, settings, metrics."""

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch

from verl.algorithms.preference import (
    PairLogps,
    PairRows,
    PreferenceSettings,
    UnpairedLogps,
    bradley_terry,
    get_preference_loss,
    pair_logps,
    pair_loss,
    preference_loss_names,
    prepare,
    reward_model_loss,
    sequence_logps,
    unpaired_loss,
    with_margin,
    wpo_weights,
)
from verl.errors import ConfigError
from verl.metrics import Metrics

torch.set_num_threads(1)
T = torch.tensor


def sigma(v):
    return 1 / (1 + np.exp(-v))


def nls(v):  # -log sigmoid
    return np.log1p(np.exp(-v))


def smooth(v, e):
    return (1 - e) * nls(v) + e * nls(-v)


def odds(logp):
    p = np.exp(logp)
    return np.log(p / (1 - p))


BETA, EPS = 0.3, 0.2
# pc, pr, rc, rr: log-probs; lc, lr: lengths; c, r: log-ratios; a: the same per token
REFERENCE = {
    "sigmoid": lambda d: smooth(BETA * (d["c"] - d["r"]), EPS),
    "sigmoid_norm": lambda d: smooth(BETA * (d["c"] / d["lc"] - d["r"] / d["lr"]), EPS),
    "hinge": lambda d: np.maximum(0, 1 - BETA * (d["c"] - d["r"])),
    "ipo": lambda d: (d["c"] / d["lc"] - d["r"] / d["lr"] - 0.5 / BETA) ** 2,
    "robust": lambda d: (
        ((1 - EPS) * nls(BETA * (d["c"] - d["r"])) - EPS * nls(-BETA * (d["c"] - d["r"]))) / (1 - 2 * EPS)
    ),
    "exo_pair": lambda d: sum(
        q * np.log(q / p)
        for q, p in ((sigma(BETA * (d["c"] - d["r"])), 1 - EPS), (sigma(BETA * (d["r"] - d["c"])), EPS))
    ),
    "nca_pair": lambda d: nls(BETA * d["c"]) + nls(-BETA * d["c"]) / 2 + nls(-BETA * d["r"]) / 2,
    "bco_pair": lambda d: nls(BETA * d["c"] - d["delta"]) + nls(d["delta"] - BETA * d["r"]),
    "sppo_hard": lambda d: (d["c"] - 0.5 / BETA) ** 2 + (d["r"] + 0.5 / BETA) ** 2,
    "apo_zero": lambda d: 1 - sigma(BETA * d["c"]) + sigma(BETA * d["r"]),
    "apo_down": lambda d: sigma(BETA * d["c"]) + 1 - sigma(BETA * (d["c"] - d["r"])),
    "discopop": lambda d: (
        nls(BETA * (d["c"] - d["r"])) * (1 - sigma(BETA * (d["c"] - d["r"]) / 0.1))
        + np.exp(-BETA * (d["c"] - d["r"])) * sigma(BETA * (d["c"] - d["r"]) / 0.1)
    ),
    "aot": lambda d: smooth(BETA * (np.sort(d["pc"] - d["pr"]) - np.sort(d["rc"] - d["rr"])), EPS),
    "aot_pair": lambda d: smooth(BETA * (np.sort(d["pc"] - d["pr"]) - np.sort(d["rc"] - d["rr"])), EPS),
    "aot_unpaired": lambda d: smooth(BETA * (np.sort(d["c"]) - np.sort(d["r"])), EPS),
    "simpo": lambda d: smooth(BETA * (d["pc"] / d["lc"] - d["pr"] / d["lr"]) - 0.5, EPS),
    "cpo": lambda d: smooth(BETA * (d["pc"] - d["pr"]), EPS) - 0.7 * d["pc"] / d["lc"],
    "orpo": lambda d: -d["pc"] / d["lc"] + BETA * nls(odds(d["pc"] / d["lc"]) - odds(d["pr"] / d["lr"])),
}
EXTRA = {"discopop": {"discopop_tau": 0.1}, "cpo": {"cpo_alpha": 0.7}}


def pairs(rows=7, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 9, (2, rows))
    policy = -rng.uniform(0.2, scale, (2, rows)) * lengths
    ref = -rng.uniform(0.2, scale, (2, rows)) * lengths
    values = [T(v) for v in (*policy, *ref)]
    return PairLogps(*values, chosen_lengths=T(lengths[0]), rejected_lengths=T(lengths[1]))


def numbers(x):
    d = {
        "pc": x.policy_chosen.numpy(),
        "pr": x.policy_rejected.numpy(),
        "rc": x.ref_chosen.numpy(),
        "rr": x.ref_rejected.numpy(),
        "lc": x.chosen_lengths.numpy(),
        "lr": x.rejected_lengths.numpy(),
    }
    d["c"], d["r"] = d["pc"] - d["rc"], d["pr"] - d["rr"]
    d["delta"] = BETA * np.concatenate([d["c"], d["r"]]).mean()
    return d


def settings_for(name, **more):
    smoothing = {"label_smoothing": EPS} if "label_smoothing" in get_preference_loss(name).uses else {}
    return PreferenceSettings(loss_type=name, beta=BETA, **{**smoothing, **EXTRA.get(name, {}), **more})


def test_every_pair_loss_has_a_reference_here():
    assert set(REFERENCE) == set(preference_loss_names("pair"))


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_equals_the_numpy_formula(name, seed):
    x, s = pairs(seed=seed), settings_for(name)
    stats, _ = prepare(x, s)
    loss, _ = pair_loss(x, s, stats)
    assert loss.item() == pytest.approx(REFERENCE[name](numbers(x)).mean(), rel=1e-9)


def dpo(chosen_ratio, rejected_ratio, **settings):
    zero = torch.zeros(1)
    x = PairLogps(T([chosen_ratio]), T([rejected_ratio]), zero, zero, T([1]), T([1]))
    s = PreferenceSettings(**settings)
    return pair_loss(x, s, prepare(x, s)[0])


def test_dpo_at_the_start():
    loss, metrics = dpo(0.0, 0.0)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["rewards/chosen"] == metrics["rewards/rejected"] == metrics["rewards/margins"] == 0
    assert metrics["rewards/accuracies"] == 0  # an equal pair is not a right one


def test_dpo_worked_by_hand():
    loss, metrics = dpo(2.0, -1.0)
    assert loss.item() == pytest.approx(0.55436, abs=1e-5)
    assert metrics["rewards/chosen"] == pytest.approx(0.2)
    assert metrics["rewards/rejected"] == pytest.approx(-0.1)
    assert metrics["rewards/accuracies"] == 1


def kto_rows(ratios, labels, kl, valid=None):
    zeros = torch.zeros(len(ratios))
    return UnpairedLogps(T(ratios), zeros, T(labels), torch.full_like(zeros, kl), zeros, valid)


def test_kto_worked_by_hand():
    x, s = kto_rows([2.0, -1.0], [True, False], 0.5), PreferenceSettings("kto")
    loss, metrics = unpaired_loss(x, s, prepare(x, s)[0])
    assert loss.item() == pytest.approx(0.46257, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0.5)
    assert metrics["rewards/chosen"] == pytest.approx(0.2)
    assert metrics["logps/rejected"] == -1


def test_kto_at_the_start_and_class_weights():
    x = kto_rows([0.0, 0.0, 0.0], [True, False, False], 0.0)
    s = PreferenceSettings("kto", desirable_weight=2.0, undesirable_weight=0.5)
    assert unpaired_loss(x, PreferenceSettings("kto"), {"kl": torch.zeros(3)})[0].item() == 0.5
    assert unpaired_loss(x, s, {"kl": torch.zeros(3)})[0].item() == pytest.approx(0.5 * (2 + 0.5 + 0.5) / 3)


def test_kto_kl_is_never_negative_and_has_no_gradient():
    s = PreferenceSettings("kto")
    policy_kl = T([-3.0, -1.0], requires_grad=True)
    x = UnpairedLogps(torch.zeros(2, requires_grad=True), torch.zeros(2), T([True, False]), policy_kl, torch.zeros(2))
    stats, _ = prepare(x, s)
    assert stats["kl"].tolist() == [0, 0]
    up, _ = prepare(UnpairedLogps(x.policy, x.ref, x.label, -policy_kl, x.ref_kl), s)
    assert up["kl"].tolist() == [2, 2] and not up["kl"].requires_grad
    unpaired_loss(x, s, up)[0].backward()
    assert policy_kl.grad is None and x.policy.grad.abs().min() > 0


@pytest.mark.parametrize("name", ["kto", "bco", "apo_zero_unpaired"])
@pytest.mark.parametrize("label", [True, False])
def test_one_class_alone_is_finite_and_the_other_has_no_metric(name, label):
    x = kto_rows([2.0, -1.0], [label, label], 0.5)
    s = PreferenceSettings(name)
    loss, metrics = unpaired_loss(x, s, prepare(x, s)[0])
    present, absent = ("chosen", "rejected") if label else ("rejected", "chosen")
    assert torch.isfinite(loss)
    assert f"rewards/{present}" in metrics and f"rewards/{absent}" not in metrics
    assert "rewards/margins" not in with_margin(metrics) and metrics.finite()


def test_class_means_use_counts_over_the_window():
    s = PreferenceSettings("apo_zero_unpaired", beta=1.0)
    parts = [kto_rows([1.0, 2.0, 3.0], [True] * 3, 0), kto_rows([6.0, -4.0], [True, False], 0)]
    metrics = with_margin(Metrics.merged(unpaired_loss(x, s)[1] for x in parts))
    assert metrics["rewards/chosen"] == pytest.approx(3.0)  # (1 + 2 + 3 + 6) / 4
    assert metrics["rewards/margins"] == pytest.approx(7.0)


def test_unpaired_values_equal_the_numpy_formulas():
    x = kto_rows([2.0, -1.0, 0.3, -2.0], [True, False, False, True], 0.0)
    u, sign = x.policy.numpy(), np.where(x.label, 1, -1)
    apo, _ = unpaired_loss(x, PreferenceSettings("apo_zero_unpaired", beta=0.4))
    assert apo.item() == pytest.approx((1 - sigma(sign * 0.4 * u)).mean(), rel=1e-6)
    s = PreferenceSettings("bco", beta=0.4)
    stats, running = prepare(x, s)
    delta = 0.4 * ((2 - 2) / 2 + (-1 + 0.3) / 2) / 2
    assert running.mean == pytest.approx(delta)
    assert unpaired_loss(x, s, stats)[0].item() == pytest.approx(nls(sign * (0.4 * u - delta)).mean(), rel=1e-6)
    # one class only: the shift stays
    assert prepare(kto_rows([9.0], [True], 0), s, running)[1] == running


def test_bco_pair_shift_is_the_mean_of_all_rewards_seen():
    s, first, second = PreferenceSettings("bco_pair", beta=1.0), pairs(3, 1), pairs(5, 2)
    _, running = prepare(first, s)
    stats, running = prepare(second, s, running)
    every = torch.cat([v for x in (first, second) for v in (x.chosen_ratio, x.rejected_ratio)])
    assert running.count == 16 and running.mean == pytest.approx(every.mean().item())
    assert stats["delta"].tolist() == pytest.approx([running.mean] * 5)
    assert type(running).from_state(running.state_dict()) == running


def test_sft_term_weighting_and_length_normalisation():
    x = pairs()
    d = numbers(x)
    base = nls(BETA * (d["c"] - d["r"]))
    rpo, metrics = pair_loss(x, PreferenceSettings(beta=BETA, rpo_alpha=2.0))
    nll = -d["pc"] / d["lc"]
    assert rpo.item() == pytest.approx((base + 2 * nll).mean()) and metrics["nll_loss"] == pytest.approx(nll.mean())
    weights = T(np.linspace(0.1, 1, 7))
    weighted, _ = pair_loss(x, PreferenceSettings(beta=BETA, rpo_alpha=2.0, use_weighting=True), weights=weights)
    assert weighted.item() == pytest.approx((weights.numpy() * base + 2 * nll).mean())
    normal, metrics = pair_loss(x, PreferenceSettings(beta=BETA, length_normalize=True))
    assert normal.item() == pair_loss(x, PreferenceSettings("sigmoid_norm", beta=BETA))[0].item()
    assert metrics["rewards/chosen"] == pytest.approx(BETA * (d["c"] / d["lc"]).mean())
    assert metrics["logps/chosen"] == pytest.approx(d["pc"].mean())


def test_weights_carry_no_gradient():
    weights = torch.ones(7, requires_grad=True, dtype=torch.float64)
    x = pairs()
    x.policy_chosen.requires_grad_()
    loss, metrics = pair_loss(x, PreferenceSettings(use_weighting=True), weights=weights * 2)
    loss.backward()
    assert weights.grad is None and x.policy_chosen.grad.any() and metrics["weights"] == 2


def test_ld_dpo_reweights_what_is_longer_than_the_shared_length():
    log_probs, mask = T([[1.0, 2, 4, 8], [16, 32, 64, 128]]), T([[1, 0, 1, 1], [1, 1, 0, 0]])
    rows = PairRows.of(["p", "p"], ["chosen", "rejected"])
    x = pair_logps(log_probs, torch.zeros(2, 4), mask, rows, ld_alpha=0.25)
    assert x.policy_chosen.item() == 1 + 4 + 0.25 * 8 and x.policy_rejected.item() == 48
    assert x.chosen_lengths.item() == 3
    plain = pair_logps(log_probs, None, mask, rows, ld_alpha=1.0)
    assert plain.policy_chosen.item() == 13 == pair_logps(log_probs, None, mask, rows).policy_chosen.item()
    assert plain.ref_chosen is None


def test_wpo_weight_of_text_as_likely_as_samples_is_one():
    # uniform over 4 tokens: log p = log 1/4 = log sum p^2
    log_probs = torch.full((2, 3), math.log(0.25))
    mask = T([[1, 1, 0], [1, 1, 1]])
    assert wpo_weights(log_probs, log_probs, mask).tolist() == pytest.approx([1, 1])
    garbage = log_probs.masked_fill(mask == 0, torch.nan)
    lower = wpo_weights(garbage - T([[1.0], [2.0]]), garbage, mask)
    assert lower.tolist() == pytest.approx([math.exp(-1), math.exp(-2)])


def test_only_trained_tokens_count_whatever_the_others_hold():
    mask = T([[0, 1, 1, 0], [0, 0, 1, 0]])
    log_probs = torch.tensor([[torch.nan, -1.0, -2.0, torch.inf], [1e9, torch.nan, -4.0, 0]], requires_grad=True)
    sums = sequence_logps(log_probs, mask)
    sums.sum().backward()
    assert sums.tolist() == [-3, -4] and torch.equal(log_probs.grad, mask.float())


def test_pairs_are_joined_by_id():
    rows = PairRows.of(["b", "a", "a", "b"], ["rejected", "chosen", "rejected", "chosen"])
    assert rows.ids == ["b", "a"] and rows.chosen.tolist() == [3, 1] and rows.rejected.tolist() == [0, 2]
    with pytest.raises(ValueError, match="pair 'a' has only its chosen row"):
        PairRows.of(["a"], ["chosen"])
    with pytest.raises(ValueError, match="two chosen rows"):
        PairRows.of(["a", "a"], ["chosen", "chosen"])
    with pytest.raises(ValueError, match="left"):
        PairRows.of(["a"], ["left"])


def test_reward_model_loss_with_margin_and_centering():
    chosen, rejected, margin = T([2.0, 0.5]), T([1.0, 0.5]), T([0.5, 0.0])
    expected = nls(np.array([0.5, 0.0])) + 0.1 * np.array([9.0, 1.0])
    assert bradley_terry(chosen, rejected, margin, 0.1).numpy() == pytest.approx(expected, rel=1e-6)
    loss, metrics = reward_model_loss(chosen, rejected, rows=4)
    assert loss.item() == pytest.approx(nls(np.array([1.0, 0.0])).sum() / 4)
    assert metrics["rewards/accuracies"] == 0.5 and metrics["rewards/max"] == 2 and metrics["rewards/min"] == 0.5
    loss, metrics = reward_model_loss(T([2.0, torch.nan]), T([1.0, 3.0]), valid=T([True, False]))
    assert loss.item() == pytest.approx(nls(1.0)) and metrics["rewards/max"] == 2
    with pytest.raises(ConfigError, match="center_rewards_coefficient=-1"):
        bradley_terry(chosen, rejected, None, -1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beta": 0.0}, "beta=0.0: must be greater than 0"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"loss_type": "sigmod"}, "did you mean 'sigmoid'"),
        ({"loss_type": "exo_pair"}, "exo_pair takes its logarithm"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "less than 0.5"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing=0.1 has no effect"),
        ({"simpo_gamma": 1.0}, "simpo_gamma=1.0 has no effect"),
        ({"loss_type": "kto", "rpo_alpha": 1.0}, "rpo_alpha=1.0 has no effect"),
        ({"loss_type": "ipo", "ld_alpha": 0.5}, "averages"),
        ({"ld_alpha": 1.5}, "between 0 and 1"),
        ({"loss_type": "kto", "desirable_weight": -1.0}, "at least 0"),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, "discopop_tau"),
        ({"rpo_alpha": -0.5}, "rpo_alpha"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError) as error:
        PreferenceSettings(**settings)
    assert words in str(error.value)


def test_wrong_inputs_are_refused():
    x, zero = pairs(2), torch.zeros(2)
    labelled = kto_rows([0.0, 0.0], [True, False], 0)
    with pytest.raises(ValueError, match="needs ref_chosen"):
        pair_loss(PairLogps(zero, zero), PreferenceSettings())
    with pytest.raises(ValueError, match="run prepare"):
        pair_loss(x, PreferenceSettings("aot"))
    with pytest.raises(ValueError, match="use_weighting"):
        pair_loss(x, PreferenceSettings(use_weighting=True))
    with pytest.raises(ValueError, match="chosen_lengths"):
        pair_loss(PairLogps(zero, zero, zero, zero), PreferenceSettings("ipo"))
    with pytest.raises(ConfigError, match="not from pairs"):
        pair_loss(x, PreferenceSettings("apo_zero_unpaired"))
    with pytest.raises(ConfigError, match="learns from pairs"):
        unpaired_loss(labelled, PreferenceSettings())
    with pytest.raises(ConfigError, match="learns from pairs"):
        prepare(labelled, PreferenceSettings("aot"))
    with pytest.raises(ValueError, match="policy_kl"):
        prepare(UnpairedLogps(zero, zero, labelled.label), PreferenceSettings("kto"))
    with pytest.raises(ValueError, match="label must be bool"):
        UnpairedLogps(zero, zero, zero)
    with pytest.raises(ValueError, match="ref_chosen has shape"):
        PairLogps(zero, zero, torch.zeros(3), zero)


@pytest.mark.parametrize("name", [n for n in REFERENCE if n not in ("sppo_hard", "ipo")])
@pytest.mark.parametrize("ratio", [-300.0, 300.0])
def test_extreme_log_ratios_stay_finite(name, ratio):
    policy = T([min(ratio, 0.0) - 1, -1.0], requires_grad=True)
    other = T([-1.0 - max(ratio, 0.0), -1.0])
    x = PairLogps(policy, other, T([-1.0, -1.0]), T([-1.0, -1.0]), T([3, 3]), T([3, 3]))
    s = settings_for(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, _ = pair_loss(x, s, prepare(x, s)[0])
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(policy.grad).all()


def test_orpo_is_exact_near_certainty_and_far_from_it():
    values = T([-1e-5, -0.1, -0.6931, -0.7, -30.0], dtype=torch.float64, requires_grad=True)
    from verl.algorithms.preference.reference_free import log1mexp

    out = log1mexp(values)
    assert out.detach().numpy() == pytest.approx(np.log(-np.expm1(values.detach().numpy())), rel=1e-12)
    out.sum().backward()
    v = values.detach().numpy()
    assert values.grad.numpy() == pytest.approx(-np.exp(v) / -np.expm1(v), rel=1e-9)


def test_dpo_falls_on_one_pair():
    """Five steps of gradient descent on the log-probs of one pair raise the margin."""
    policy = T([-5.0, -5.0], requires_grad=True)
    losses = []
    for _ in range(6):
        x = PairLogps(policy[:1], policy[1:], T([-5.0]), T([-5.0]))
        loss, _ = pair_loss(x, PreferenceSettings())
        losses.append(loss.item())
        (gradient,) = torch.autograd.grad(loss, policy)
        policy = (policy - 5 * gradient).detach().requires_grad_()
    assert all(later < earlier for earlier, later in pairwise(losses))


def test_every_loss_is_in_the_documentation():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "preference.md").read_text(encoding="utf-8")
    assert [name for name in preference_loss_names() if f"`{name}`" not in page] == []
