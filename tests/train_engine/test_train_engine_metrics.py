"""Metrics that are tensors: read late, with one transfer, and equal to reading each at once."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.token_metrics import token_metrics
from verl.metrics import REDUCERS, Metrics
from verl.protocol import DataProto

numbers = st.floats(-1e6, 1e6, width=32)
observations = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), numbers, st.sampled_from([0, 1, 2.5]), st.booleans()), max_size=12
)


def bag(rows, reduce, late):
    metrics = Metrics()
    for name, value, weight, tensor in rows:
        tensor = tensor and late
        metrics.add(
            name,
            torch.tensor(value, requires_grad=True) if tensor else value,
            reduce=reduce,
            weight=torch.tensor(weight) if tensor else weight,
        )
    return metrics


@settings(deadline=None)  # busy machines
@given(one=observations, two=observations, reduce=st.sampled_from(REDUCERS))
def test_late_and_early_reading_give_the_same_numbers(one, two, reduce):
    late, early = (bag(one, reduce, flag).merge(bag(two, reduce, flag)) for flag in (True, False))
    assert late.results() == early.results()
    assert late.with_scaled_sums(0.5).results() == early.with_scaled_sums(0.5).results()
    assert dict(late.prefixed("x/")) == dict(early.prefixed("x/"))


def test_nothing_is_read_before_somebody_looks(monkeypatch):
    reads = []
    whole = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(len(self)) or whole(self))
    metrics = Metrics()
    for value in (1.0, 3.0):
        micro = Metrics()
        micro.add("loss", torch.tensor(value), reduce="sum")
        mask = torch.tensor([[1, 1, 0]])
        micro.merge(token_metrics(mask, {"kl": torch.tensor([[value, value, float("nan")]])}))
        metrics.merge(micro)
    assert not reads
    assert metrics.results() == {"loss": 4.0, "kl": 2.0}
    assert len(reads) == 1
    assert metrics["loss"] == 4.0 and len(reads) == 1


def test_bags_with_tensors_travel():
    metrics = Metrics()
    metrics.add("loss", torch.tensor(2.0, requires_grad=True), reduce="sum")
    assert pickle.loads(pickle.dumps(metrics)).results() == {"loss": 2.0}
    again = DataProto(meta_info={"metrics": metrics})
    assert again.meta_info["metrics"]["loss"] == 2.0


def test_a_mean_may_come_as_a_total_and_a_tensor_must_be_one_number():
    metrics = Metrics()
    metrics.add_total("m", torch.tensor(6.0), torch.tensor(3))
    metrics.add("m", 5.0, weight=1)
    assert metrics["m"] == pytest.approx(11 / 4)
    with pytest.raises(ValueError, match=r"'m' needs one number, not a tensor of shape \(2,\)"):
        metrics.add("m", torch.ones(2))
    with pytest.raises(ValueError, match="unknown reducer"):
        metrics.add("m", torch.ones(()), reduce="median")


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.data())
def test_a_mean_does_not_depend_on_how_its_rows_came_together(values, data):
    """Bit for bit: rows come in pieces of any size and are merged piece by piece."""
    whole = Metrics()
    for value in values:
        whole.add("a", value)
        whole.add("b", value, reduce="sum")
    pieces, left = Metrics(), list(values)
    while left:
        size = data.draw(st.integers(1, len(left)))
        piece = Metrics()
        for value in left[:size]:
            piece.add("a", value)
            piece.add("b", value, reduce="sum")
        pieces.merge(piece)
        left = left[size:]
    assert pieces.results() == whole.results() == {"a": math.fsum(values) / len(values), "b": math.fsum(values)}
