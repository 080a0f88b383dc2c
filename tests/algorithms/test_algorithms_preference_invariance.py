"""However a mini-batch is cut, ordered or filled up, preference losses and their gradients stay the same."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.preference import (
    PairLogps,
    PreferenceSettings,
    UnpairedLogps,
    get_preference_loss,
    pair_loss,
    preference_loss_names,
    prepare,
    unpaired_loss,
)
from verl.metrics import Metrics

torch.set_num_threads(1)


def settings_of(name):
    uses = get_preference_loss(name).uses
    more = {"label_smoothing": 0.1} if "label_smoothing" in uses else {}
    if "desirable_weight" in uses:
        more |= {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    elif name not in ("orpo", "cpo"):
        more |= {"rpo_alpha": 0.5}
    return PreferenceSettings(name, beta=0.3, **more)


def draw(name, rows, seed):
    """(leaf tensor of policy log-probs, function from the leaf to the inputs)."""
    rng = np.random.default_rng(seed)
    lengths = torch.tensor(rng.integers(1, 9, (2, rows)))
    leaf = -torch.tensor(rng.uniform(0.1, 3, (2, rows))) * lengths
    ref = -torch.tensor(rng.uniform(0.1, 3, (2, rows))) * lengths
    if get_preference_loss(name).frame == "pair":
        return leaf, lambda t: PairLogps(t[0], t[1], ref[0], ref[1], lengths[0], lengths[1])
    label = torch.tensor(rng.integers(0, 2, rows).astype(bool))
    return leaf, lambda t: UnpairedLogps(t[0], ref[0], label, t[1].detach(), ref[1])


def run(name, inputs, leaf, cuts):
    """Total loss, gradient and metrics of the mini-batch cut into ``cuts`` (lists of row numbers)."""
    s = settings_of(name)
    leaf = leaf.clone().requires_grad_()
    x = inputs(leaf)
    stats, _ = prepare(x, s)
    function = pair_loss if get_preference_loss(name).frame == "pair" else unpaired_loss
    total, bags = 0, []
    for cut in cuts:
        index = torch.as_tensor(cut, dtype=torch.long)
        part = {key: value[index] for key, value in stats.items()}
        loss, metrics = function(x.select(index), s, part, rows=len(x))
        total = total + loss
        bags.append(metrics)
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
    return total.item(), gradient, Metrics.merged(bags).results()


@pytest.mark.parametrize("name", preference_loss_names())
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 9), seed=st.integers(0, 10**6), data=st.data())
def test_micro_batches_sum_to_the_whole(name, rows, seed, data):
    leaf, inputs = draw(name, rows, seed)
    order = data.draw(st.permutations(range(rows)))
    borders = sorted(data.draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
    cuts = [order[a:b] for a, b in zip([0, *borders], [*borders, rows], strict=True)]
    whole = run(name, inputs, leaf, [range(rows)])
    parts = run(name, inputs, leaf, cuts)
    assert parts[0] == pytest.approx(whole[0], rel=1e-10)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-10, atol=1e-12)
    assert parts[2] == pytest.approx(whole[2], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", preference_loss_names())
def test_filling_rows_change_nothing_whatever_they_hold(name):
    s = settings_of(name)
    leaf, inputs = draw(name, 5, 3)
    real = run(name, inputs, leaf, [range(5)])
    leaf = leaf.clone().requires_grad_()
    x = inputs(leaf)
    keep = torch.tensor([0, 3, 1, 3, 2, 3, 4])
    valid = torch.tensor([True, False, True, True, True, False, True])
    filled = x.select(keep)
    values = {k: v for k, v in vars(filled).items() if v is not None}
    garbage = {
        key: torch.where(valid, value, torch.nan if value.is_floating_point() else 0)
        for key, value in values.items()
        if value.dtype != torch.bool
    }
    filled = type(x)(**{**values, **garbage, "valid": valid})
    stats, _ = prepare(filled, s)
    function = pair_loss if isinstance(x, PairLogps) else unpaired_loss
    loss, metrics = function(filled, s, stats, rows=5)
    (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert loss.item() == pytest.approx(real[0], rel=1e-10)
    torch.testing.assert_close(gradient, real[1], rtol=1e-10, atol=1e-12)
    assert metrics.results() == pytest.approx(real[2], rel=1e-5, abs=1e-6)
    nothing = filled.select(~valid)
    loss, metrics = function(nothing, s, {k: v[~valid] for k, v in stats.items()}, rows=5)
    assert loss.item() == 0 and not metrics.results()
    assert not torch.autograd.grad(loss, leaf)[0].any()


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_gradient_of_sorted_losses_is_that_of_sorting_everything_at_once(name):
    """Autograd through torch.sort over the whole mini-batch, against matched partners."""
    s = PreferenceSettings(name, beta=0.3)
    leaf, inputs = draw(name, 8, 5)
    leaf.requires_grad_()
    x = inputs(leaf)
    if name == "aot":
        delta = (x.policy_chosen - x.policy_rejected).sort().values - (x.ref_chosen - x.ref_rejected).sort().values
    else:
        delta = x.chosen_ratio.sort().values - x.rejected_ratio.sort().values
    expected = -torch.nn.functional.logsigmoid(0.3 * delta).mean()
    loss, _ = pair_loss(x, s, prepare(x, s)[0])
    assert loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(expected, leaf)[0])


@pytest.mark.parametrize("name", preference_loss_names())
def test_float32_is_close_to_float64(name):
    leaf, inputs = draw(name, 6, 9)
    exact = run(name, inputs, leaf, [range(6)])
    rounded = run(name, inputs, leaf.float(), [range(6)])
    assert rounded[0] == pytest.approx(exact[0], rel=1e-5)
