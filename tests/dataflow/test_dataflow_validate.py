"""What is found before anything runs."""

from __future__ import annotations

import pytest
from dataflow_toys import generate, prompts, score

from verl import notices
from verl.dataflow import Dataflow, FlowSet, Node, aggregate, expand, pair, subset
from verl.errors import DataflowError


def nothing(batch) -> None:
    return None


GEN = Node("generate", nothing, ["prompt/ids"], ["responses"], relation=expand(2), reads=["actor.weights"])


def flow(*nodes: Node, **options) -> Dataflow:
    options = {"inputs": {"prompt": ["ids"]}, "state": ["actor.weights"], "outputs": ["responses"], **options}
    return Dataflow(GEN, *nodes, **options)


PROBLEMS = [
    ([Node("a", nothing, ["respones"])], "nobody gives; did you mean 'sample/responses'"),
    ([Node("a", nothing, ["ids"])], "there is prompt/ids: name the frame"),
    ([Node("a", nothing, gives=["responses"])], "given by 'generate', 'a'; a key has one giver"),
    ([Node("a", nothing, gives=["ids"], frame="prompt")], "given by 'a' and is an input too"),
    (
        [Node("a", nothing, ["x"], ["y"]), Node("b", nothing, ["y"], ["x"])],
        "circle: 'a' gives sample/y to 'b', 'b' gives sample/x to 'a'",
    ),
    ([Node("a", nothing, ["responses"], reads=["actor.weight"])], "unknown state 'actor.weight'; did you mean"),
    ([Node("a", nothing, ["responses"], ["x"], out="prompt")], "keeps the frame, but frame is 'sample' and out is"),
    ([Node("a", nothing, ["responses"], ["prompt/x"])], "its rows are of frame 'sample': set out="),
    ([Node("a", nothing, ["sample/responses"], frame="prompt")], "aggregate sample/responses first"),
    ([Node("a", nothing, ["sample/responses"], frame="step")], "take frame='sample', out='step'"),
    ([Node("a", nothing, ["x"], frame="pair")], "works on frame 'pair', whose rows nobody makes"),
    ([Node("a", nothing, frame="turn")], "unknown frame 'turn'"),
    ([Node("a", nothing, ["turn/x"])], "unknown frame 'turn'"),
    ([Node("a", nothing, relation="split")], "unknown relation 'split'"),
    ([Node("a", nothing, relation=expand(0))], "expand\\(n\\) needs a whole number of at least 1, not 0"),
    ([Node("a", nothing, relation=expand(2), frame="sample")], "makes rows of another frame"),
    ([Node("a", nothing, ["ids"], ["x"], relation=expand(2))], "frame 'sample' are made by 'generate', 'a'"),
    ([Node("a", nothing, relation=aggregate, frame="prompt")], "aggregate goes from sample or pair to prompt"),
    ([Node("a", nothing, relation=subset, frame="step")], "has no rows to filter"),
    ([Node("a", nothing, per_row=True, relation=pair)], "needs whole groups"),
    ([Node("a", nothing, per_row=True, out="step")], "per_row=True needs a frame with rows"),
    ([Node("a", 3)], "call must be callable, not 3"),
    ([Node("a", nothing, "responses")], "needs must be a list of names, not the string 'responses'"),
    ([Node("generate", nothing)], "two nodes are called 'generate'"),
    ([Node("a", nothing, ["responses"], rename={"x": "y"})], "rename maps 'x' to 'y', which it neither needs"),
    (
        [
            Node("p", nothing, gives=["responses"], frame="prompt"),
            Node("a", nothing, ["responses", "prompt/responses"]),
        ],
        "needs two keys of one name",
    ),
    ([Node("a", nothing, ["responses", "responses"])], "lists a key twice"),
]


@pytest.mark.parametrize(("nodes", "message"), PROBLEMS)
def test_each_problem_has_its_sentence(nodes: list[Node], message: str) -> None:
    with pytest.raises(DataflowError, match=message):
        flow(*nodes).validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pools": ["gpu"]}, "unknown pool 'controller'; there are gpu"),
        ({"outputs": ["rewards"]}, "the caller reads \\(outputs=\\) sample/rewards, which nobody gives"),
        ({"staleness": {"actor": 1}}, "staleness names the unknown state 'actor'; did you mean 'actor.weights'"),
        ({"staleness": {"actor.weights": -1}}, "it is a number of steps, 0 or more"),
        ({"inputs": {"prompts": ["ids"]}}, "unknown frame 'prompts'"),
        ({"inputs": {}}, "prompt/ids, which nobody gives"),
    ],
)
def test_problems_of_the_whole(options: dict, message: str) -> None:
    with pytest.raises(DataflowError, match=message):
        flow(**options).validate()


def test_a_state_cycle_names_its_edges() -> None:
    update = Node("update", nothing, ["responses"], writes=["actor.weights"])
    with pytest.raises(DataflowError, match=r"'update' writes actor.weights before 'generate'"):
        Dataflow(update, GEN, inputs={"prompt": ["ids"]}, state=["actor.weights"]).validate()


def test_all_problems_are_reported_at_once() -> None:
    bad = [Node("a", nothing, ["nope"], reads=["x"]), Node("b", nothing, ["neither"]), Node("c", nothing, frame="pair")]
    with pytest.raises(DataflowError) as caught:
        flow(*bad, pools=["gpu"], outputs=["gone"]).validate()
    text = str(caught.value)
    assert text.startswith("9 problems in the dataflow 'train'")
    for part in ("sample/nope", "sample/neither", "unknown state 'x'", "frame 'pair'", "sample/gone", "unknown pool"):
        assert part in text


def test_run_validates_first() -> None:
    called = []
    bad = Dataflow(Node("a", called.append, ["prompt/ids"], frame="prompt"), Node("b", nothing, ["x"]))
    with pytest.raises(DataflowError, match="problems in the dataflow"):
        bad.run(None, 0)
    assert called == []


def test_unread_keys_are_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    notices.reset()
    flow(outputs=["responses"]).validate()
    assert capsys.readouterr().out == ""
    flow(outputs=[]).validate()
    assert "nobody reads these keys: generate: sample/responses" in capsys.readouterr().out


def test_nodes_that_are_off_at_build_time_are_left_out() -> None:
    built = flow(None, Node("a", nothing, ["gone"], when=False), Node("b", nothing, ["responses"], when=True))
    assert [node.name for node in built.validate().nodes] == ["generate", "b"]


def test_every_phase_is_checked() -> None:
    late = Node("late", nothing, ["responses"], ["x"], when=lambda step: step >= 150)
    with pytest.raises(DataflowError, match="'use' needs sample/x at every step, but its giver 'late' may be off"):
        flow(late, Node("use", nothing, ["x"])).validate()
    with pytest.raises(DataflowError, match=r"outputs=.* sample/x at every step"):
        flow(late, outputs=["x"]).validate()
    with pytest.raises(DataflowError, match="'use' needs sample/x at step 149, when its giver 'late' is off"):
        flow(late, Node("use", nothing, ["x"], when=lambda step: step >= 149)).validate()
    flow(late, Node("use", nothing, ["x"], when=lambda step: step >= 150)).validate()


def test_a_phase_beyond_the_probed_steps_is_caught_before_it_runs() -> None:
    called = []
    late = Node("late", nothing, ["responses"], ["x"], when=lambda step: step != 123_457)
    use = Node("use", called.append, ["x"], when=lambda step: True)
    built = flow(late, use, outputs=[]).validate()
    with pytest.raises(DataflowError, match="'use' needs sample/x at step 123457"):
        built.run(prompts(1), 123_457)
    assert called == []
    with pytest.raises(DataflowError, match="at step 123457"):
        flow(late, use, outputs=[]).validate(steps=range(123_450, 123_460))


def test_when_switches_a_node_by_step() -> None:
    gen = Node("generate", generate, ["prompt/ids"], ["responses"], relation=expand(2))
    warm = Node("score", score, ["responses"], ["score"], writes=["actor.weights"], when=lambda step: step >= 2)
    built = Dataflow(gen, warm, inputs={"prompt": ["ids"]}, state=["actor.weights"])
    assert ["score" in built.run(prompts(1), step).timings for step in range(4)] == [False, False, True, True]
    assert built.versions == {"actor.weights": 2}


def test_flows_by_name() -> None:
    writer = Node("update", nothing, ["responses"], writes=["actor.weights"])
    train, reader = flow(writer), flow()
    with pytest.raises(DataflowError, match=r"flow 'validate': node 'update' writes actor.weights"):
        FlowSet({"train": train, "validate": flow(writer)}).validate()
    with pytest.raises(DataflowError, match="give choose="):
        FlowSet({"train": [train, reader]}).validate()
    with pytest.raises(DataflowError, match=r"choose\(2\) gives 2"):
        FlowSet({"train": [train, reader]}, choose=lambda step: step).validate()
    with pytest.raises(DataflowError, match=r"flow 'preview': .*nobody gives"):
        FlowSet({"train": train, "preview": flow(Node("a", nothing, ["nope"]))}).validate()


def test_mixed_training_shares_versions() -> None:
    gen = Node("generate", generate, ["prompt/ids"], ["responses"], relation=expand(2), reads=["actor.weights"])
    update = Node("update", nothing, ["responses"], writes=["actor.weights"])
    common = {"inputs": {"prompt": ["ids"]}, "state": ["actor.weights"]}
    flows = FlowSet(
        {
            "train": [
                Dataflow(gen, update, **common),
                Dataflow(update.__class__("sft", nothing, ["ids"], frame="prompt", writes=["actor.weights"]), **common),
            ],
            "validate": Dataflow(gen, **common, outputs=["responses"]),
        },
        choose=lambda step: step % 2,
    ).validate()
    assert [sorted(flows.run("train", prompts(1), step).timings) for step in (0, 1)] == [
        ["generate", "update"],
        ["sft"],
    ]
    assert flows.run("validate", prompts(1), 1).read == {"generate": {"actor.weights": 2}}
    assert flows.versions == {"actor.weights": 2}
    with pytest.raises(DataflowError, match="there is no flow 'test'"):
        flows.flow("test", 0)


def test_staleness_is_checked_against_the_versions_of_past_steps() -> None:
    update = Node("update", nothing, ["prompt/ids"], frame="prompt", writes=["w"])
    for lag, allowed in ((0, {2: False, 3: False, 4: True}), (1, {2: False, 3: True, 4: True})):
        built = Dataflow(update, inputs={"prompt": ["ids"]}, state=["w"], staleness={"w": lag})
        for step in range(4):
            built.run(prompts(1), step)
        resumed = Dataflow(update, inputs={"prompt": ["ids"]}, state=["w"], staleness={"w": lag})
        resumed.load_state_dict(built.state_dict())
        for same in (built, resumed):
            same.run(prompts(1), 4)
            for version, good in allowed.items():
                if good:
                    same.check_staleness("w", version, 4)
                    same.check_staleness("w", [version, 9], 4)
                else:
                    with pytest.raises(DataflowError, match=f"made with version {version} of 'w'"):
                        same.check_staleness("w", [9, version], 4)
