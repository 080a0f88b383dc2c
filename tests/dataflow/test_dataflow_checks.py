"""Every way in which a node can break its contract, and how errors reach the caller."""

from __future__ import annotations

import pytest
from dataflow_toys import generate, ids_of, prompts, rows, score, uid

from verl.dataflow import Dataflow, Node, NodeError, aggregate, expand, pair, subset
from verl.errors import DataflowError, MissingDependencyError, RewardError
from verl.protocol import DataProto

EXECUTORS = ("serial", "concurrent")


def run(node: Node, executor: str = "serial"):
    first = Node("generate", generate, ["prompt/ids"], ["responses"], relation=expand(2), pool="gpu")
    flow = Dataflow(first, node, inputs={"prompt": ["ids"]}, state=["s"], outputs=["responses"])
    return flow.run(prompts(2), 0, executor)


def pick(*index: int):
    return lambda batch: DataProto.concat([batch.select_idxs([i]) for i in index])


A, B = uid(0), uid(1)

BROKEN = [
    # relation same: by ids
    (Node("n", pick(0, 1, 2), ["responses"], ["x"], rename={"responses": "x"}), None),
    (Node("n", pick(0, 1, 3), ["responses"], ["x"]), "did not return the key 'x'"),
    (Node("n", lambda b: rows(["q"] * 4, ["q/0"] * 4, x=[0.0] * 4), ["responses"], ["x"]), "not given: q/0"),
    (Node("n", lambda b: rows([A], x=[0.0]), ["responses"], ["x"]), f"got 4 rows \\({A}/0, .*returned 1"),
    (Node("n", lambda b: rows([A], [f"{A}/0"], x=[0.0]), ["responses"], ["x"]), f"lost rows: {A}/1, {B}/0, {B}/1"),
    (Node("n", lambda b: rows([A] * 2, [f"{A}/0"] * 2, x=[0.0] * 2), ["responses"], ["x"]), f"twice: {A}/0"),
    (Node("n", lambda b: None, ["responses"], ["x"]), "returned nothing, but declares gives"),
    (Node("n", lambda b: 3, ["responses"], ["x"]), "returned a int"),
    (Node("n", lambda b: iter([b]), ["responses"], ["x"]), "needs per_row=True"),
    (Node("n", lambda b: DataProto(), ["responses"], ["x"], out="step"), "did not return the key 'x'"),
    (Node("n", lambda b: DataProto(meta_info={"metrics": {"a": 1}}), ["responses"]), "must be a verl.metrics.Metrics"),
    # subset
    (Node("n", lambda b: rows(["q"], ["q/0"]), ["responses"], relation=subset), "not given: q/0"),
    (Node("n", pick(0, 0), ["responses"], relation=subset), f"twice: {A}/0"),
    (Node("n", lambda b: b.select_idxs([]), ["responses"], relation=subset), "left no rows"),
    (Node("n", lambda b: rows([A], x=[1.0]), ["responses"], relation=subset), "no 'sample_id' column"),
    # aggregate
    (Node("n", lambda b: rows([A], x=[1.0]), ["responses"], ["x"], relation=aggregate), f"lost rows: {B}"),
    (Node("n", lambda b: rows([A, B, B], x=[1.0] * 3), ["responses"], ["x"], relation=aggregate), f"twice: {B}"),
    (Node("n", lambda b: rows([A, "q"], x=[1.0] * 2), ["responses"], ["x"], relation=aggregate), "not given: q"),
    # pair
    (Node("n", lambda b: rows([A], x=[1.0]), ["responses"], ["x"], relation=pair), "no 'pair_id' column"),
    (Node("n", lambda b: rows(["q"], ["q/0"], "pair_id", x=[1.0]), ["responses"], ["x"], relation=pair), "not given"),
    (
        Node("n", lambda b: rows([A] * 2, ["p"] * 2, "pair_id", x=[1.0] * 2), ["responses"], ["x"], relation=pair),
        "twice",
    ),
]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("node", "message"), [case for case in BROKEN if case[1]])
def test_a_broken_contract_names_node_frame_and_rows(node: Node, message: str, executor: str) -> None:
    with pytest.raises(DataflowError, match=message) as caught:
        run(node, executor)
    assert "node 'n'" in str(caught.value) and node.frame in str(caught.value)
    assert not isinstance(caught.value, NodeError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: generate(b, 1), "must return 2 rows for each of the 2"),
        (lambda b: rows([A] * 4, [f"{A}/{i}" for i in range(4)], responses=[0.0] * 4), f"{A} has 4, {B} has 0"),
        (lambda b: rows([A] * 2 + ["q"] * 2, list("abcd"), responses=[0.0] * 4), "uid that it was not given: c, d"),
        (lambda b: rows([A, A, B, B], ["a", "a", "b", "c"], responses=[0.0] * 4), "twice: a"),
        (lambda b: rows([A, A, B, B], responses=[0.0] * 4), "no 'sample_id' column"),
    ],
)
def test_expand_is_counted_for_every_prompt(call, message: str) -> None:
    flow = Dataflow(
        Node("generate", call, ["prompt/ids"], ["responses"], relation=expand(2)), inputs={"prompt": ["ids"]}
    )
    with pytest.raises(DataflowError, match=message):
        flow.run(prompts(2), 0)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_shuffled_rows_are_put_back_by_id(executor: str) -> None:
    def shuffled(batch: DataProto) -> DataProto:
        out = score(batch)
        out.non_tensor_batch["sample_id"] = batch.non_tensor_batch["sample_id"]
        return out.select_idxs([2, 0, 3, 1])

    result = run(Node("n", shuffled, ["responses"], ["score"]), executor)
    assert result["sample"].batch["score"].tolist() == [0.0, 1.0, 100.0, 121.0]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_crash_is_wrapped_and_names_rows(executor: str) -> None:
    def crash(batch: DataProto) -> DataProto:
        raise IndexError("list index out of range")

    with pytest.raises(NodeError, match=r"node 'n'.*'sample', rows u997/0.* raised IndexError: list index") as caught:
        run(Node("n", crash, ["responses"], ["x"]), executor)
    assert isinstance(caught.value.__cause__, IndexError)
    assert any(entry.name == "crash" for entry in _frames(caught.value.__cause__))


def _frames(error: BaseException) -> list:
    import traceback

    return traceback.extract_tb(error.__traceback__)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "error", [RewardError("reward file r.py is broken"), MissingDependencyError("vllm", "rollout")]
)
def test_errors_for_people_keep_their_type_and_sentence(error: Exception, executor: str) -> None:
    sentence = str(error).split(" [in")[0]

    def fail(batch: DataProto) -> DataProto:
        raise error

    with pytest.raises(type(error)) as caught:
        run(Node("n", fail, ["responses"], ["x"]), executor)
    assert str(caught.value).startswith(sentence)
    assert "[in node 'n' (frame 'sample', rows u997/0" in str(caught.value)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_keyboard_interrupt_passes_through(executor: str) -> None:
    def interrupt(batch: DataProto) -> DataProto:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Node("n", interrupt, ["responses"], ["x"]), executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_failed_writer_does_not_count_as_written(executor: str) -> None:
    def fail(batch: DataProto) -> None:
        raise RewardError("no")

    flow = Dataflow(
        Node("a", lambda b: None, ["prompt/ids"], frame="prompt", writes=["a"]),
        Node("b", fail, ["prompt/ids"], frame="prompt", writes=["b"]),
        inputs={"prompt": ["ids"]},
        state=["a", "b"],
    )
    with pytest.raises(RewardError):
        flow.run(prompts(1), 0, executor)
    assert flow.versions == {"a": 1, "b": 0}
    assert ids_of(prompts(1), "uid") == [uid(0)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_pieces_of_different_width_are_refused(executor: str) -> None:
    def pieces(batch: DataProto):
        import torch

        for i in range(2):
            piece = batch.select_idxs([2 * i, 2 * i + 1])
            yield DataProto.from_dict(
                tensors={"x": torch.zeros(2, 3 + i)}, non_tensors={"sample_id": piece.non_tensor_batch["sample_id"]}
            )

    with pytest.raises(DataflowError, match="key 'x' have different shapes per row"):
        run(Node("n", pieces, ["responses"], ["x"], per_row=True), executor)
