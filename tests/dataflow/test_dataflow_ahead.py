"""One-step-off: the first half of the next step beside the second half of this one, and what it may not be."""

from __future__ import annotations

import threading

import pytest
import torch
from dataflow_toys import generate, prompts, rows

from verl.dataflow import Dataflow, Node, NodeError, OneStepOff, expand
from verl.errors import DataflowError
from verl.metrics import Metrics
from verl.protocol import DataProto

WAIT_S = 60.0


class Weights:
    """State that generate reads and update writes: it counts updates."""

    def __init__(self) -> None:
        self.live, self.sent = 0.0, 0.0

    def send(self) -> None:
        self.sent = self.live

    def generate(self, batch: DataProto) -> DataProto:
        made = generate(batch)
        made.batch["responses"] += 1000 * self.sent
        made.meta_info["metrics"] = Metrics()
        made.meta_info["metrics"].add("made_with", self.sent, reduce="last")
        return made

    def update(self, batch: DataProto) -> Metrics:
        self.live += 1
        metrics = Metrics()
        metrics.add("seen", float(batch.batch["responses"].sum()), reduce="sum")
        return metrics


def flow(weights: Weights, *more: Node, **changes) -> Dataflow:
    made = {"relation": expand(2), "reads": ["weights"], "pool": "rollout", "ahead": True, **changes}
    return Dataflow(
        Node("generate", weights.generate, ["prompt/ids"], ["responses"], **made),
        *more,
        Node("update", weights.update, ["responses", "prompt/ids"], writes=["weights"], pool="train"),
        inputs={"prompt": ["ids", "text"]},
        state=["weights"],
        staleness={"weights": 1},
        outputs=["responses", "prompt/text"],
    )


def steps(executor: str, count: int = 4, weights: Weights | None = None) -> tuple[list, OneStepOff]:
    weights = weights or Weights()
    both = OneStepOff(
        flow(weights).validate(), lambda step: prompts(3, 10 * step) if step <= count else None, weights.send
    )
    return [both.run(None, step, executor) for step in range(1, count + 1)], both


def test_rows_are_made_with_the_state_of_the_step_before_whatever_the_executor():
    results, both = steps("concurrent")
    assert [result.metrics["made_with"] for result in results] == [0, 0, 1, 2]
    assert [result.lag for result in results] == [0, 1, 1, 1] and both.pending is None
    assert [result.step for result in results] == [1, 2, 3, 4]
    serial, _ = steps("serial")
    for one, other in zip(results, serial, strict=True):
        assert dict(one.metrics) == dict(other.metrics) and one.read == other.read
        assert torch.equal(one["sample"].batch["responses"], other["sample"].batch["responses"])
        assert one["prompt"].non_tensor_batch["text"].tolist() == other["prompt"].non_tensor_batch["text"].tolist()
        assert {"generate", "update"} <= one.timings.keys()


def test_both_halves_are_in_progress_at_the_same_time():
    """Each waits for the other: without overlap this would not end."""
    weights, making, training = Weights(), threading.Event(), threading.Event()
    make, train = weights.generate, weights.update
    first = iter([True])

    def generate_(batch):
        if not next(first, False):
            making.set()
            assert training.wait(WAIT_S)
        return make(batch)

    def update(batch):
        training.set()
        assert making.wait(WAIT_S)
        return train(batch)

    weights.generate, weights.update = generate_, update
    results, _ = steps("concurrent", 2, weights)
    assert len(results) == 2


def test_pending_rows_are_saved_and_taken_over():
    whole, _ = steps("concurrent")
    weights = Weights()
    draw = lambda step: prompts(3, 10 * step) if step <= 4 else None  # noqa: E731
    first = OneStepOff(flow(weights), draw, weights.send)
    for step in (1, 2):
        first.run(None, step)
    state = first.state_dict()
    assert state["step"] == 3
    again = OneStepOff(flow(weights), draw, weights.send)
    again.flow.versions.update(first.flow.versions)
    again.load_state_dict(state)
    with pytest.raises(DataflowError, match="rows that were made ahead are of step 3"):
        again.run(None, 5)
    again.load_state_dict(state)
    rest = [again.run(None, step) for step in (3, 4)]
    for one, other in zip(whole[2:], rest, strict=True):
        assert dict(one.metrics) == dict(other.metrics) and one.lag == other.lag and one.read == other.read
    again.load_state_dict(None)
    assert again.pending is None and again.state_dict() is None


def test_rows_that_are_too_old_are_refused():
    weights = Weights()
    both = OneStepOff(flow(weights), lambda step: prompts(2), weights.send)
    both.run(None, 1)
    both.flow.note_begin(2)
    both.flow.versions["weights"] += 1
    state = both.state_dict()
    state["read"]["generate"]["weights"] = -1
    both.load_state_dict(state)
    with pytest.raises(DataflowError, match="step 2 uses rows made with version -1 of 'weights'"):
        both.run(None, 2)


@pytest.mark.parametrize("half", ["generate", "update"])
def test_an_error_in_one_half_ends_the_other(half):
    weights, real = Weights(), {}
    for name in ("generate", "update"):
        real[name] = getattr(weights, name)
    calls = {"generate": 0, "update": 0}

    def broken(name):
        def call(batch):
            calls[name] += 1
            if name == half and calls[name] == 2:
                raise ValueError("broken")
            return real[name](batch)

        return call

    weights.generate, weights.update = broken("generate"), broken("update")
    with pytest.raises(NodeError, match=f"{half}.*broken"):
        steps("concurrent", 4, weights)
    assert calls["update"] == (1 if half == "generate" else 2)


def look(batch: DataProto) -> DataProto:
    return rows(
        list(batch.non_tensor_batch["uid"]), list(batch.non_tensor_batch["sample_id"]), length=[0.0] * len(batch)
    )


@pytest.mark.parametrize(
    ("more", "changes", "problem"),
    [
        ([], {"pool": "train"}, "on the pool 'train', on which 'update' works for the step before"),
        ([], {"writes": ["other"]}, "writes other, which that step may still use"),
        ([], {"when": lambda step: step > 1}, "must be on at every step"),
        (
            [Node("look", look, ["responses"], ["length"]), Node("judge", look, ["length"], ["score"], ahead=True)],
            {},
            "node 'judge' runs ahead, but 'look' gives sample/length to it and does not",
        ),
    ],
)
def test_what_cannot_run_ahead_is_told(more, changes, problem):
    found = flow(Weights(), *more, **changes)
    found.state = ("weights", "other")
    assert any(problem in text for text in found.problems())


def test_staleness_must_be_declared():
    found = flow(Weights())
    found.staleness = {}
    problem = "node 'generate' runs ahead, so it reads an older 'weights': declare staleness={'weights': 1} (and "
    assert found.problems() == [problem + "correct for it)"]
    assert "runs ahead of the step before" in flow(Weights()).describe(width=400)
