"""Running a flow: rows, joins, renames, step values, metrics, events."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from dataflow_toys import as_dict, generate, ids_of, prompts, rows, score, uid

from verl.dataflow import Dataflow, Node, aggregate, expand, pair, subset
from verl.errors import DataflowError
from verl.metrics import Metrics
from verl.protocol import DataProto, DataProtoFuture, object_column

EXECUTORS = ("serial", "concurrent")
INPUTS = {"prompt": ["ids", "text"]}


def base(*more: Node, n: int = 3, **options) -> Dataflow:
    return Dataflow(
        Node("generate", generate, ["prompt/ids"], ["responses"], relation=expand(n), pool="gpu", params={"n": n}),
        Node("score", score, ["responses"], ["score"], pool="cpu"),
        *more,
        inputs=INPUTS,
        **options,
    )


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rows_keep_draw_order_and_sample_order(executor: str) -> None:
    result = base(n=12).run(prompts(3), 1, executor)
    sample = result["sample"]
    assert ids_of(sample) == [f"{uid(p)}/{k}" for p in range(3) for k in range(12)]  # u.../2 before u.../10
    assert sample.batch["responses"].tolist() == [10.0 * p + k for p in range(3) for k in range(12)]
    assert torch.equal(sample.batch["score"], sample.batch["responses"] ** 2)
    assert ids_of(result["prompt"], "uid") == [uid(p) for p in range(3)]
    assert set(result.timings) == {"generate", "score"}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_call_gets_the_needed_keys_only_and_prompt_keys_by_uid(executor: str) -> None:
    seen = {}

    def look(batch: DataProto) -> DataProto:
        seen["columns"] = sorted([*batch.batch.keys(), *batch.non_tensor_batch])
        seen["meta"] = dict(batch.meta_info)
        pairs = zip(batch.batch["responses"].tolist(), batch.non_tensor_batch["text"], strict=True)
        assert all(text == f"text {int(value) // 10}" for value, text in pairs)
        return DataProto.from_dict(
            non_tensors={"length": object_column([len(t) for t in batch.non_tensor_batch["text"]])}
        )

    flow = base(Node("look", look, ["responses", "prompt/text"], ["length"]))
    result = flow.run(prompts(4), 7, executor)
    assert seen == {"columns": ["responses", "sample_id", "text", "uid"], "meta": {"global_step": 7}}
    assert list(result["sample"].non_tensor_batch["length"]) == [6] * 12


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rename_lets_two_methods_serve_twice(executor: str) -> None:
    def greedy(batch: DataProto) -> DataProto:
        return rows(ids_of(batch, "uid"), responses=[float(x) + 0.5 for x in batch.batch["ids"][:, 0]])

    def advantage(batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"advantages": batch.batch["score"] - batch.batch["baseline"]})

    flow = base(
        Node("greedy", greedy, ["ids"], ["greedy"], frame="prompt", rename={"responses": "greedy"}),
        Node(
            "baseline",
            score,
            ["greedy"],
            ["baseline"],
            frame="prompt",
            rename={"responses": "greedy", "score": "baseline"},
        ),
        Node("advantage", advantage, ["score", "prompt/baseline"], ["advantages"]),
    )
    result = flow.run(prompts(3), 0, executor)
    expected = [(10.0 * p + k) ** 2 - (p + 0.5) ** 2 for p in range(3) for k in range(3)]
    assert result["sample"].batch["advantages"].tolist() == expected


@pytest.mark.parametrize("executor", EXECUTORS)
def test_step_values_travel_in_meta_info(executor: str) -> None:
    def plan(batch: DataProto, scale: int) -> DataProto:
        return DataProto(meta_info={"plan": [scale * i for i in range(len(batch))]})

    def update(batch: DataProto) -> Metrics:
        metrics = Metrics()
        metrics.add("actor/plan_sum", sum(batch.meta_info["plan"]) + batch.meta_info["temperature"], reduce="sum")
        return metrics

    flow = Dataflow(
        Node("generate", generate, ["prompt/ids"], ["responses"], relation=expand(2)),
        Node("plan", plan, ["responses"], ["plan"], out="step", params={"scale": 2}),
        Node("update", update, ["responses", "step/plan", "step/temperature"], writes=["actor.weights"]),
        inputs={"prompt": ["ids"], "step": ["temperature"]},
        state=["actor.weights"],
    )
    batch = prompts(2)
    batch.meta_info["temperature"] = 0.5
    result = flow.run(batch, 3, executor)
    assert result.values == {"temperature": 0.5, "plan": [0, 2, 4, 6]}
    assert result.metrics["actor/plan_sum"] == 12.5
    assert flow.versions == {"actor.weights": 1}
    with pytest.raises(DataflowError, match="without its input step/temperature"):
        flow.run(prompts(2), 4, executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_futures_are_awaited(executor: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        flow = Dataflow(
            Node("generate", lambda b: pool.submit(generate, b), ["prompt/ids"], ["responses"], relation=expand(2)),
            Node("score", lambda b: DataProtoFuture.of(pool.submit(score, b)), ["responses"], ["score"]),
            inputs=INPUTS,
        )
        result = flow.run(prompts(2), 0, executor)
    assert result["sample"].batch["score"].tolist() == [0.0, 1.0, 100.0, 121.0]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_subset_pair_and_aggregate(executor: str) -> None:
    def keep_odd(batch: DataProto) -> DataProto:
        keep = [i for i, v in enumerate(batch.batch["responses"].tolist()) if int(v) % 2 or v == 0]
        return batch.select_idxs(keep[::-1])

    def mean(batch: DataProto) -> DataProto:
        groups: dict[str, list[float]] = {}
        for u, v in zip(ids_of(batch, "uid"), batch.batch["responses"].tolist(), strict=True):
            groups.setdefault(u, []).append(v)
        names = sorted(groups)
        return rows(names, mean=[float(np.mean(groups[u])) for u in names])

    def ends(batch: DataProto) -> DataProto:
        order: dict[str, list[int]] = {}
        for i, u in enumerate(ids_of(batch, "uid")):
            order.setdefault(u, []).append(i)
        pairs = [(u, where[0], where[-1]) for u, where in order.items() if len(where) > 1][::-1]
        ids = ids_of(batch)
        chosen = batch.batch["responses"][[b for _, _, b in pairs]].tolist()
        return rows([u for u, _, _ in pairs], [ids[a] + "|" + ids[b] for _, a, b in pairs], "pair_id", chosen=chosen)

    def filters_later(batch: DataProto) -> DataProto:
        return batch.select_idxs([0])

    flow = base(
        Node("keep", keep_odd, ["responses"], relation=subset),
        Node("after", score, ["responses"], ["late_score"], rename={"score": "late_score"}),
        Node("mean", mean, ["responses"], ["mean"], relation=aggregate),
        Node("pair", ends, ["responses"], ["chosen"], relation=pair),
        Node("one", filters_later, ["chosen"], relation=subset, frame="pair"),
        n=4,
    )
    result = flow.run(prompts(3), 0, executor)
    assert result["sample"].batch["responses"].tolist() == [0.0, 1.0, 3.0, 11.0, 13.0, 21.0, 23.0]
    assert torch.equal(result["sample"].batch["score"], result["sample"].batch["late_score"])
    assert result["prompt"].batch["mean"].tolist() == [4 / 3, 12.0, 22.0]
    assert ids_of(result["pair"], "uid") == [uid(0)]
    assert result["pair"].batch["chosen"].tolist() == [3.0]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_filter_of_one_frame_takes_the_dependent_rows_along(executor: str) -> None:
    def drop_first_prompt(batch: DataProto) -> DataProto:
        return batch.select_idxs(list(range(1, len(batch))))

    def drop_last_group(batch: DataProto) -> DataProto:
        last = ids_of(batch, "uid")[-1]
        return batch.select_idxs([i for i, u in enumerate(ids_of(batch, "uid")) if u != last])

    flow = base(
        Node("groups", drop_first_prompt, ["text"], relation=subset, frame="prompt"),
        Node("samples", drop_last_group, ["responses"], relation=subset),
    )
    result = flow.run(prompts(4), 0, executor)
    assert ids_of(result["prompt"], "uid") == [uid(1), uid(2)]
    assert ids_of(result["sample"], "uid") == [uid(1)] * 3 + [uid(2)] * 3
    assert list(result["prompt"].non_tensor_batch["text"]) == ["text 1", "text 2"]


def test_inputs_of_several_frames_and_flows_without_rows() -> None:
    sample = rows([uid(1), uid(0)], ["b/0", "a/0"], x=[1.0, 2.0])

    def total(batch: DataProto) -> DataProto:
        return DataProto(meta_info={"total": float((batch.batch["x"] * batch.batch["ids"][:, 0]).sum())})

    flow = Dataflow(
        Node("total", total, ["x", "prompt/ids"], ["total"], out="step"), inputs={"prompt": ["ids"], "sample": ["x"]}
    )
    assert flow.run({"prompt": prompts(2), "sample": sample}, 0).values == {"total": 1.0}
    with pytest.raises(DataflowError, match="input frames prompt, sample: run it with"):
        flow.run(prompts(2), 0)
    count = Dataflow(
        Node("count", lambda b: DataProto(meta_info={"n": b.meta_info["global_step"]}), gives=["n"], frame="step")
    )
    assert count.run(None, 5).values == {"n": 5}


def test_bad_input_batches_are_refused() -> None:
    flow = base()
    with pytest.raises(DataflowError, match="lacks the key 'text'"):
        flow.run(prompts(2).select(batch_keys=["ids"], non_tensor_batch_keys=["uid"]), 0)
    with pytest.raises(DataflowError, match="identity column 'uid'"):
        flow.run(prompts(2).select(batch_keys=["ids"], non_tensor_batch_keys=["text"]), 0)
    with pytest.raises(DataflowError, match="appear twice: u997"):
        flow.run(DataProto.concat([prompts(2), prompts(1)]), 0)
    with pytest.raises(DataflowError, match="no rows"):
        flow.run(prompts(2).select_idxs([]), 0)
    with pytest.raises(DataflowError, match="unknown executor 'parallel'"):
        flow.run(prompts(2), 0, "parallel")


def test_metrics_keep_their_reducers_across_nodes() -> None:
    def more(batch: DataProto) -> Metrics:
        metrics = Metrics()
        metrics.add("score/mean", 0.0, weight=6)
        metrics.add("score/max", 1e6, reduce="max")
        return metrics

    result = base(Node("more", more, ["score"])).run(prompts(2), 0)
    assert result.metrics["score/mean"] == pytest.approx(result["sample"].batch["score"].mean().item() / 2)
    assert result.metrics["score/max"] == 1e6


def test_events_are_told_in_order() -> None:
    events = []
    base().run(prompts(2), 0, on_event=lambda node, kind, info: events.append((node, kind, info)))
    assert [(n, k) for n, k, _ in events] == [(n, k) for n in ("generate", "score") for k in ("start", "rows", "end")]
    assert events[1][2] == {"done": 6, "total": 6}
    assert events[2][2]["seconds"] >= 0 and events[2][2]["rows"] == 6


def test_the_grad_mode_of_the_caller_holds_in_every_node() -> None:
    modes = []

    def look(batch: DataProto) -> None:
        modes.append((torch.is_grad_enabled(), threading.current_thread() is threading.main_thread()))

    flow = base(Node("look", look, ["responses"]))
    for executor in EXECUTORS:
        with torch.no_grad():
            flow.run(prompts(1), 0, executor)
    flow.run(prompts(1), 0)
    assert modes == [(False, True), (False, False), (True, False)]


def test_adding_and_removing_a_node_changes_what_happens() -> None:
    flow = base()
    plain = flow.run(prompts(2), 0)

    def double(batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"double": 2 * batch.batch["score"]})

    def keep_one(batch: DataProto) -> DataProto:
        return batch.select_idxs([1])

    more = flow.with_node(Node("double", double, ["score"], ["double"]), after="score")
    assert torch.equal(more.run(prompts(2), 0)["sample"].batch["double"], 2 * plain["sample"].batch["score"])
    assert as_dict(more.without("double").run(prompts(2), 0)) == as_dict(plain)
    filtered = flow.with_node(Node("keep", keep_one, ["responses"], relation=subset), before="score")
    assert [n.name for n in filtered.nodes] == ["generate", "keep", "score"]
    assert filtered.run(prompts(2), 0).metrics["score/max"] == 1.0 < plain.metrics["score/max"]
    assert [n.name for n in flow.nodes] == ["generate", "score"]  # the original is untouched
    with pytest.raises(DataflowError, match="no node 'scor'; did you mean 'score'"):
        flow.without("scor")
    with pytest.raises(DataflowError, match="nobody gives"):
        more.without("score").run(prompts(2), 0)


def test_undeclared_keys_are_dropped_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    def extra(batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"a": batch.batch["score"], "undeclared_b": batch.batch["score"]})

    result = base(Node("extra_node", extra, ["score"], ["a"]), outputs=["a"]).run(prompts(1), 0)
    assert "undeclared_b" not in list(result["sample"].batch.keys())
    assert "'extra_node' returned keys that its gives= lacks, they are dropped: undeclared_b" in capsys.readouterr().out


def test_columns_move_by_reference() -> None:
    held = []

    def look(batch: DataProto) -> None:
        held.append(batch.batch["responses"].data_ptr())

    flow = base(Node("look", look, ["responses"]), Node("again", look, ["responses"]))
    result = flow.run(prompts(2), 0)
    assert set(held) == {result["sample"].batch["responses"].data_ptr()}
