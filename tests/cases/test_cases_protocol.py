"""Public cases B93 to B98: batches that are padded, joined and repeated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases_actor import live, make_actor, plan_of, recorded

from verl.algorithms.aggregation import GlobalCounts
from verl.errors import DataError
from verl.metrics import Metrics
from verl.protocol import DataProto, mark_padding_rows, pad_dataproto_to_divisor, unpad_dataproto


def rows(*values, **meta):
    return DataProto.from_dict(
        tensors={"x": torch.tensor(values)}, non_tensors={"uid": [f"u{v}" for v in values]}, meta_info=meta
    )


def test_B93_two_rows_padded_to_eight_and_back():
    padded, size = pad_dataproto_to_divisor(rows(0, 1), 8)
    assert size == 6 and padded.batch["x"].tolist() == [0, 1] * 4
    assert unpad_dataproto(padded, size).batch["x"].tolist() == [0, 1]


def test_B95_concat_merges_metrics_and_refuses_other_differences():
    bags = [Metrics(), Metrics()]
    for bag, value, weight in zip(bags, (1.0, 4.0), (1, 3), strict=True):
        bag.add("loss", value, weight=weight)
    whole = DataProto.concat([rows(0, metrics=bags[0], t=1), rows(1, metrics=bags[1], t=1)])
    assert whole.meta_info["metrics"]["loss"] == 3.25 and whole.meta_info["t"] == 1
    with pytest.raises(DataError, match="t"):
        DataProto.concat([rows(0, t=1), rows(1, t=2)])
    with pytest.raises(DataError):
        DataProto.concat([rows(0), DataProto.from_dict(tensors={"y": torch.zeros(1)})])


def test_B97_union_and_repeat():
    nan = DataProto.from_dict(tensors={"x": torch.tensor([float("nan"), 1.0])})
    assert len(nan.union(DataProto.from_dict(tensors={"x": torch.tensor([float("nan"), 1.0])}))) == 2
    with pytest.raises(DataError, match="x"):
        rows(0, 1).union(rows(0, 2).select(non_tensor_batch_keys=[]))
    assert rows(0, 1).repeat(2, interleave=True).batch["x"].tolist() == [0, 0, 1, 1]
    assert rows(0, 1).repeat(2, interleave=False).batch["x"].tolist() == [0, 1, 0, 1]


def test_B98_rows_that_fill_up_count_nowhere(tiny_model_dir):
    batch = recorded()
    padded, size = pad_dataproto_to_divisor(batch, 8)
    marked = mark_padding_rows(padded, size)
    assert GlobalCounts.of(marked.batch["response_mask"]) == GlobalCounts.of(batch.batch["response_mask"])
    assert not np.isin(marked.non_tensor_batch["uid"][4:], batch.non_tensor_batch["uid"]).any()
    results = {}
    for name, rows_given in (("plain", batch), ("padded", marked)):
        actor = make_actor(tiny_model_dir)
        metrics = actor.update(rows_given, plan_of(rows_given, prompts=99))
        results[name] = (live(actor), metrics["actor/loss"])
    assert results["plain"][1] == pytest.approx(results["padded"][1], rel=1e-6)
    for name, value in results["plain"][0].items():
        torch.testing.assert_close(value, results["padded"][0][name], rtol=0, atol=1e-7)
