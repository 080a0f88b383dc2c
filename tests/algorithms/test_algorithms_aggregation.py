"""Aggregation: right values, and the same loss and gradient however the mini-batch was cut."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.aggregation import LOSS_AGG_MODES, GlobalCounts, agg_loss, use_counts
from verl.errors import ConfigError

torch.set_num_threads(1)
QUICK = settings(max_examples=30, deadline=None)


def reference(losses, mask, mode, tokens=None, sequences=None, horizon=None):
    """The modes as the words say them, one token at a time."""
    rows = [[float(x) for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(losses, mask, strict=True)]
    rows = [row for row in rows if row]
    tokens = tokens or sum(len(row) for row in rows)
    sequences = sequences or len(rows)
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / tokens
    if mode == "token-sum":
        return sum(sum(row) for row in rows)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / sequences
    total = sum(sum(row) for row in rows) / sequences
    return total / (horizon or len(losses[0])) if mode == "seq-mean-token-sum-norm" else total


def matrix(seed, rows, width, empty_share=0.3):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) < 0.6
    mask[rng.random(rows) < empty_share] = False
    return torch.from_numpy(rng.normal(size=(rows, width))), torch.from_numpy(mask)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), width=st.integers(1, 7))
@QUICK
def test_equals_the_slow_reference(mode, seed, rows, width):
    losses, mask = matrix(seed, rows, width)
    assert float(agg_loss(losses, mask, mode)) == pytest.approx(reference(losses, mask, mode), abs=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("ambient", [False, True])
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 8), width=st.integers(1, 6), cuts=st.lists(st.integers(0, 8)))
@QUICK
def test_sum_over_micro_batches_is_the_whole(mode, ambient, seed, rows, width, cuts):
    losses, mask = matrix(seed, rows, width)
    counts = GlobalCounts.of(mask, horizon=width)
    whole = losses.clone().requires_grad_()
    expected = agg_loss(whole, mask, mode)
    expected.backward()

    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    pieces = losses.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for start, end in itertools.pairwise(edges):  # some are empty, some hold only masked rows
        trimmed = int(mask[start:end].any(dim=0).long().cumsum(0).argmax()) + 1 if end > start else width
        part, part_mask = pieces[start:end, :trimmed], mask[start:end, :trimmed]
        if ambient:
            with use_counts(counts):
                loss = agg_loss(part, part_mask, mode)
        else:
            loss = agg_loss(part, part_mask, mode, counts)
        loss.backward()
        total += loss.detach()
    assert torch.allclose(total, expected.detach(), atol=1e-12)
    assert torch.allclose(pieces.grad, whole.grad, atol=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_ranks_that_average_gradients_multiply_by_dp_size(mode):
    losses, mask = matrix(3, 4, 5, empty_share=0.0)
    counts = GlobalCounts.of(mask, horizon=5)
    ranks = [agg_loss(losses[i::2], mask[i::2], mode, counts, dp_size=2) for i in range(2)]
    assert torch.allclose(sum(ranks) / 2, agg_loss(losses, mask, mode))


def test_b01_tokens_of_all_micro_batches_share_one_denominator():
    one, three = torch.tensor([[1.0, 0.0, 0.0]]), torch.zeros(1, 3)
    masks = torch.tensor([[1, 0, 0]]), torch.tensor([[1, 1, 1]])
    counts = GlobalCounts(tokens=4, sequences=2)
    total = agg_loss(one, masks[0], "token-mean", counts) + agg_loss(three, masks[1], "token-mean", counts)
    assert float(total) == 0.25
    counts = GlobalCounts(tokens=1000, sequences=2)
    parts = [
        agg_loss(torch.full((1, n), x), torch.ones(1, n), "token-mean", counts) for n, x in ((100, 0.5), (900, 0.3))
    ]
    assert float(sum(parts)) == pytest.approx(0.32)


def test_b03_a_masked_row_is_in_no_denominator():
    losses, mask = torch.ones(2, 4), torch.tensor([[1] * 4, [0] * 4])
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert float(agg_loss(losses, mask, mode)) == 1.0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_b03_b06_all_masked_is_zero_with_zero_gradient(mode):
    for counts in (None, GlobalCounts(0, 0), GlobalCounts(7, 2)):
        losses = torch.tensor([[math.nan, math.inf]], requires_grad=True)
        loss = agg_loss(losses, torch.zeros(1, 2), mode, counts)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert losses.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("mode", "right"), [("token-mean", 2.5), ("seq-mean-token-sum", 5.0), ("seq-mean-token-mean", 2.5)]
)
def test_b05_nan_at_masked_positions(mode, right):
    losses = torch.tensor([[1.0, math.nan, 3.0], [2.0, 4.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    loss = agg_loss(losses, mask, mode)
    loss.backward()
    assert float(loss.detach()) == right
    assert losses.grad.isfinite().all()
    assert losses.grad[mask == 0].tolist() == [0.0, 0.0]


def test_b07_both_paths_count_non_empty_sequences():
    losses, mask = torch.ones(3, 2), torch.tensor([[1, 1], [1, 0], [0, 0]])
    counts = GlobalCounts.of(mask)
    assert counts.sequences == 2
    local = agg_loss(losses, mask, "seq-mean-token-mean")
    assert float(local) == float(agg_loss(losses, mask, "seq-mean-token-mean", counts)) == 1.0
    assert float(local) == float(agg_loss(losses, mask, "seq-mean-token-mean", global_batch_size=counts.sequences))


def test_denominators_explicit_before_ambient_before_local():
    losses, mask = torch.ones(1, 4), torch.ones(1, 4)
    with use_counts(GlobalCounts(8, 2)):
        assert float(agg_loss(losses, mask, "token-mean", GlobalCounts(16, 4))) == 0.25
        assert float(agg_loss(losses, mask, "token-mean", batch_num_tokens=2)) == 2.0
        assert float(agg_loss(losses, mask, "seq-mean-token-sum", batch_num_tokens=2)) == 2.0
        assert float(agg_loss(losses, mask, "token-mean")) == 0.5
    assert float(agg_loss(losses, mask, "token-mean")) == 1.0


def test_norm_mode_takes_scale_then_horizon_then_width():
    losses, mask, mode = torch.ones(1, 4), torch.ones(1, 4), "seq-mean-token-sum-norm"
    assert float(agg_loss(losses, mask, mode)) == 1.0
    assert float(agg_loss(losses, mask, mode, GlobalCounts(4, 1, horizon=8))) == 0.5
    assert float(agg_loss(losses, mask, mode, GlobalCounts(4, 1, horizon=8), loss_scale_factor=2)) == 2.0


def test_wrong_use_is_named():
    with pytest.raises(ConfigError, match=r"token-average.*token-mean"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "token-average")
    with pytest.raises(ValueError, match="global counts"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "token-mean", dp_size=2)


def test_bf16_losses_are_summed_in_float32():
    losses = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    assert float(agg_loss(losses, torch.ones(1, 4096), "token-sum")) == 4096.0
