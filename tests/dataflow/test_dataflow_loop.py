"""Loop: refill until there are enough groups, and what becomes of the rest."""

from __future__ import annotations

import copy
import pickle

import pytest
from dataflow_toys import as_dict, generate, ids_of, prompts, uid

from verl.dataflow import Dataflow, Loop, Node, expand, subset
from verl.errors import DataError, DataflowError
from verl.metrics import Metrics
from verl.protocol import DataProto

EXECUTORS = ("serial", "concurrent")


def keep_even_prompts(batch: DataProto) -> DataProto:
    """Keeps whole groups: those of prompts with an even number."""
    values = batch.batch["responses"].tolist()
    return batch.select_idxs([i for i, v in enumerate(values) if int(v) // 10 % 2 == 0])


def count_rows(batch: DataProto) -> Metrics:
    metrics = Metrics()
    metrics.add("rows", len(batch), reduce="sum")
    return metrics


class Source:
    """Prompts 0, 1, 2, … in draws of ``size``; knows how many it gave, and ends at ``end``."""

    def __init__(self, size: int, end: int = 10**6, first: int = 0) -> None:
        self.size, self.end, self.next = size, end, first
        self.asked: list[int] = []

    def __call__(self, k: int) -> DataProto | None:
        self.asked.append(k)
        if self.next >= self.end:
            return None
        self.next += self.size
        return prompts(self.size, self.next - self.size)


def build(source: Source, *more: Node, staleness: int = 1, inputs: dict | None = None, **options) -> Dataflow:
    body = Dataflow(
        Node("generate", generate, ["prompt/ids"], ["responses"], relation=expand(2), reads=["w"], pool="gpu"),
        Node("keep", keep_even_prompts, ["responses"], relation=subset, pool="cpu"),
        Node("count", count_rows, ["responses"], pool="gpu"),
        inputs={"prompt": ["ids"]},
        state=["w"],
    )
    options = {"take": 3, "gives": ["responses", "prompt/ids"], **options}
    return Dataflow(
        Loop("refill", body, source, **options),
        Node("update", lambda batch: None, ["responses", "prompt/ids"], writes=["w"], pool="gpu"),
        *more,
        inputs=inputs,
        state=["w"],
        staleness={"w": staleness},
        outputs=["responses"],
    )


def taken(result) -> list[int]:
    """Numbers of the prompts that were taken, checked against the samples."""
    numbers = [int(x) for x in result["prompt"].batch["ids"][:, 0]]
    assert ids_of(result["sample"]) == [f"{uid(n)}/{k}" for n in numbers for k in range(2)]
    assert result["sample"].batch["responses"].tolist() == [10.0 * n + k for n in numbers for k in range(2)]
    return numbers


@pytest.mark.parametrize("executor", EXECUTORS)
def test_refill_takes_groups_in_draw_order_and_drops_the_rest(executor: str) -> None:
    source = Source(4)
    flow = build(source, staleness=0)
    first, second = (flow.run(None, step, executor) for step in (0, 1))
    assert taken(first) == [0, 2, 4] and taken(second) == [8, 10, 12]
    assert source.asked == [0, 1, 0, 1]
    assert dict(first.metrics.results()) == {
        "rows": 8.0,
        "refill/draws": 2.0,
        "refill/groups": 3.0,
        "refill/groups_dropped": 1.0,
    }
    assert {"refill", "refill/generate", "refill/keep", "update"} <= set(first.timings)
    assert flow.versions == {"w": 2}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_saved_groups_come_first_in_the_next_step(executor: str) -> None:
    source = Source(4)
    flow = build(source, carry="save")
    results = [flow.run(None, step, executor) for step in range(3)]
    assert [taken(r) for r in results] == [[0, 2, 4], [6, 8, 10], [12, 14, 16]]
    assert [r.metrics["refill/draws"] for r in results] == [2.0, 1.0, 2.0]
    assert [r.metrics["refill/groups_saved"] for r in results] == [1.0, 0.0, 1.0]
    assert "refill/groups_dropped" not in results[0].metrics


def test_saved_groups_grow_too_old() -> None:
    flow = build(Source(16), carry="save")  # 8 groups a draw: the second step still lives on the first draw
    assert [taken(flow.run(None, step)) for step in (0, 1)] == [[0, 2, 4], [6, 8, 10]]
    result = flow.run(None, 2)
    assert taken(result) == [16, 18, 20]
    assert result.metrics["refill/groups_too_old"] == 2.0


def test_saving_needs_a_declared_staleness() -> None:
    with pytest.raises(
        DataflowError, match=r"saves rows that were made with an older 'w': declare staleness=\{'w': 1\}"
    ):
        build(Source(4), carry="save", staleness=0).validate()
    build(Source(4), carry="drop", staleness=0).validate()


def test_resume_equals_never_having_stopped() -> None:
    whole = build(Source(4), carry="save")
    expected = [as_dict(whole.run(None, step)) for step in range(4)]
    first = build(Source(4), carry="save")
    got = [as_dict(first.run(None, step)) for step in range(2 - 1)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    resumed = build(Source(4, first=8), carry="save")
    resumed.load_state_dict(state)
    got += [as_dict(resumed.run(None, step)) for step in range(1, 4)]
    assert got == expected
    with pytest.raises(DataflowError, match="rows of the loop 'refill', which flow 'train' lacks"):
        Dataflow(state=["w"]).load_state_dict(state)


def test_a_failed_step_leaves_the_saved_groups_as_they_were() -> None:
    failing = [False, True, False]

    def sometimes(batch: DataProto) -> None:
        if failing.pop(0):
            raise DataError("broken")

    flow = build(Source(4), Node("check", sometimes, ["responses"]), carry="save")
    flow.run(None, 0)
    before = copy.deepcopy(flow.state_dict()["loops"])
    with pytest.raises(DataError):
        flow.run(None, 1)
    after = flow.state_dict()["loops"]
    assert after["refill"]["versions"] == before["refill"]["versions"] == {uid(6): {"w": 0}}
    assert ids_of(after["refill"]["frames"]["sample"]) == ids_of(before["refill"]["frames"]["sample"])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_limit_as_error_or_smaller(executor: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataflowError, match=r"loop 'refill' .*has 2 groups of 3 after its limit of 2 draws in step 5"):
        build(Source(2), limit=2).run(None, 5, executor)
    result = build(Source(2), limit=2, on_limit="smaller").run(None, 6, executor)
    assert taken(result) == [0, 2]
    assert "step 6: loop 'refill' has 2 groups of 3 after its limit of 2 draws; going on" in capsys.readouterr().out
    with pytest.raises(DataflowError, match="when its source ended after 1 draws"):
        build(Source(2, end=2)).run(None, 0, executor)
    with pytest.raises(DataflowError, match="has 0 groups of 3"):
        build(Source(1, first=1, end=2), on_limit="smaller").run(None, 0, executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_draw_that_is_filtered_away_altogether_is_drawn_on(executor: str) -> None:
    result = build(Source(1)).run(None, 0, executor)  # every second draw is one odd prompt
    assert taken(result) == [0, 2, 4]
    assert result.metrics["refill/draws"] == 5.0 and result.metrics["rows"] == 6.0


def test_until_sees_the_frames_so_far() -> None:
    sizes = []

    def until(frames: dict[str, DataProto]) -> bool:
        sizes.append(len(frames["sample"]))
        return len(frames["sample"]) >= 10

    result = build(Source(4), until=until, take=None).run(None, 0)
    assert taken(result) == [0, 2, 4, 6, 8, 10] and sizes == [4, 8, 12]


def test_the_batch_of_the_step_is_the_first_draw() -> None:
    source = Source(4, first=100)
    flow = build(source, inputs={"prompt": ["ids"]})
    assert taken(flow.run(prompts(4), 0)) == [0, 2, 100]
    assert source.asked == [1]
    assert taken(flow.run(prompts(6, 50), 1)) == [50, 52, 54]


def test_step_values_reach_the_body() -> None:
    body = Dataflow(
        Node(
            "scale",
            lambda b: DataProto.from_dict({"y": b.batch["ids"][:, 0] * b.meta_info["factor"]}),
            ["ids", "step/factor"],
            ["y"],
            frame="prompt",
        ),
        inputs={"prompt": ["ids"], "step": ["factor"]},
    )
    flow = Dataflow(
        Loop("turns", body, Source(2), take=3, gives=["prompt/y"]), inputs={"step": ["factor"]}, outputs=["prompt/y"]
    )
    assert flow.run(DataProto(meta_info={"factor": 3.0}), 0)["prompt"].batch["y"].tolist() == [0.0, 3.0, 6.0]


def test_errors_inside_the_body_name_loop_and_node() -> None:
    def fail(batch: DataProto) -> DataProto:
        raise DataError("bad row")

    flow = build(Source(4))
    loop = flow.loops["refill"]
    loop.body = loop.body.with_node(Node("bad", fail, ["responses"], ["x"]))
    with pytest.raises(DataError, match=r"bad row \[in node 'bad' .*\[in loop 'refill'"):
        flow.run(None, 0)


def test_repeated_prompts_are_refused() -> None:
    with pytest.raises(DataflowError, match="whose uid is there already: u997"):
        build(lambda k: prompts(2)).run(None, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"take": None}, "would never know when to stop"),
        ({"limit": 0}, "limit must be a whole number of at least 1"),
        ({"take": 0}, "take must be a whole number"),
        ({"carry": "keep"}, "carry is 'keep'; it is one of 'save', 'drop'"),
        ({"on_limit": "stop"}, "on_limit is 'stop'"),
        (
            {"gives": ["responses", "prompt/ids", "scores"]},
            "loop 'refill': the caller reads .* sample/scores, which nobody",
        ),
        ({"gives": ["responses", "prompt/ids", "step/x"]}, "gives step/x; a loop gives rows of"),
    ],
)
def test_a_wrong_loop_is_found_before_it_runs(options: dict, message: str) -> None:
    with pytest.raises(DataflowError, match=message):
        build(Source(2), **options).validate()


def test_problems_of_the_body_are_problems_of_the_flow() -> None:
    body = Dataflow(Node("a", count_rows, ["nope"]), inputs={"prompt": ["ids"]})
    with pytest.raises(DataflowError, match="loop 'l': node 'a' needs sample/nope"):
        Dataflow(Loop("l", body, Source(1), take=1, gives=["prompt/ids"])).validate()
    body = Dataflow(inputs={"sample": ["x"]})
    with pytest.raises(DataflowError, match="must have frame 'prompt'"):
        Dataflow(Loop("l", body, Source(1), take=1, gives=["x"])).validate()
