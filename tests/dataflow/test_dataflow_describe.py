"""The table and the Mermaid chart."""

from __future__ import annotations

import re

from dataflow_toys import generate, prompts, score

from verl.dataflow import Dataflow, Loop, Node, expand


def flow() -> Dataflow:
    return Dataflow(
        Node(
            "generate",
            generate,
            ["prompt/ids"],
            ["responses"],
            relation=expand(2),
            reads=["w"],
            pool="gpu",
            per_row=True,
        ),
        Node("update", lambda b: None, ["score"], writes=["w"], pool="gpu", when=lambda step: step > 0),
        Node("score", score, ["responses"], ["score"], pool="cpu", per_row=True),
        inputs={"prompt": ["ids"]},
        state=["w"],
    )


def test_the_table_lists_nodes_in_order_with_keys_pools_and_state() -> None:
    text = flow().describe(width=200)
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["dataflow", "'train';", "inputs:", "prompt/ids"]
    assert [line[:2] for line in lines[3:]] == [["1", "generate"], ["2", "score"], ["3", "update"]]
    assert "expand(2)" in text and "streams from generate" in text and "at some steps" in text
    assert re.search(r"update +gpu +sample +score +w +at some steps", text)
    assert "seconds" not in text and max(map(len, flow().describe(width=90).splitlines())) <= 90


def test_seconds_come_from_the_last_step_or_the_caller() -> None:
    built = flow()
    built.run(prompts(2), 1)
    assert re.search(r"score .*\d\.\d{3}", built.describe(width=200))
    assert "12.500" in built.describe({"update": 12.5}, width=200)
    assert "update<br/>12.500 s" in built.to_mermaid({"update": 12.5})


def test_mermaid_draws_pools_streams_and_state() -> None:
    chart = flow().to_mermaid()
    assert chart.startswith("flowchart TD\n")
    ids = dict(re.findall(r'(n\d)\["(\w+)"\]', chart))
    names = {name: key for key, name in ids.items()}
    assert set(names) == {"generate", "score", "update"}
    assert f'  {names["generate"]} ==>|"sample/responses"| {names["score"]}' in chart
    assert f'  {names["score"]} -->|"sample/score"| {names["update"]}' in chart
    assert f"  s0 -.-> {names['generate']}" in chart and f"  {names['update']} -.-> s0" in chart
    assert f'  inputs -->|"prompt/ids"| {names["generate"]}' in chart
    assert f"{names['generate']} --> {names['update']}" not in chart  # that it makes the rows goes without saying
    assert chart.count("subgraph") == chart.count("  end") == 2


def test_a_loop_shows_its_body() -> None:
    body = Dataflow(
        Node("inner", generate, ["prompt/ids"], ["responses"], relation=expand(2)), inputs={"prompt": ["ids"]}
    )
    outer = Dataflow(
        Loop("refill", body, lambda k: prompts(2), take=4, limit=7, gives=["responses"]), inputs={"prompt": ["ids"]}
    )
    text = outer.describe(width=200)
    assert "body of 'refill'" in text and "inner" in text
    assert "4 groups, at most 7 draws, then error; surplus: drop" in text
    assert '[["refill"]]' in outer.to_mermaid() and 'inputs -->|"prompt"|' in outer.to_mermaid()
