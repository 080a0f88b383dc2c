"""A flow for people: a plain-text table, and a Mermaid flowchart."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from verl.dataflow.graph import Plan, build_plan
from verl.dataflow.node import STEP, Node, parse_keys

if TYPE_CHECKING:
    from verl.dataflow.flow import Dataflow
    from verl.dataflow.graph import Step


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Columns as wide as their content; where ``width`` does not do, the widest ones are wrapped."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    while sum(widths) + 2 * len(widths) > width and max(widths) > 14:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in [head, ["-" * w for w in widths], *rows]:
        cells = [textwrap.wrap(cell, w) or [""] for cell, w in zip(row, widths, strict=True)]
        for i in range(max(map(len, cells))):
            line = (cell[i] if i < len(cell) else "" for cell in cells)
            lines.append("  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _rows_of(node: Step) -> str:
    if not isinstance(node, Node):
        return f"loop → {', '.join(node.makes)}"
    ends = node.frame if node.out == node.frame else f"{node.frame} → {node.out}"
    return ends if str(node.relation) == "same" else f"{ends} {node.relation}"


def _notes(node: Step, plan: Plan) -> str:
    notes = []
    if plan.streams.get(node.name):
        notes.append(f"streams from {', '.join(sorted(plan.streams[node.name]))}")
    if callable(node.when):
        notes.append("at some steps")
    if node.ahead:
        notes.append("runs ahead of the step before")
    if not isinstance(node, Node):
        wanted = f"{node.take} groups" if node.take is not None else "until enough"
        notes.append(f"{wanted}, at most {node.limit} draws, then {node.on_limit}; surplus: {node.carry}")
    return "; ".join(notes)


def _keys(keys: Iterable, frame: str) -> str:
    return ", ".join(key.name if key.frame == frame else str(key) for key in keys)


def _inputs(flow: Dataflow) -> list[str]:
    return [str(key) for frame, keys in flow.inputs.items() for key in parse_keys(keys, frame)]


def describe(flow: Dataflow, seconds: Mapping[str, float], width: int, indent: str = "") -> str:
    """Nodes in the order in which the serial executor runs them, with keys, frames, pools and state."""
    plan = build_plan(flow.nodes, flow.inputs)
    timed = any(node.name in seconds for node in plan.order)
    head = ["", "node", "pool", "rows", "needs", "gives", "reads", "writes", *(["seconds"] if timed else []), "notes"]
    rows = []
    for number, node in enumerate(plan.order, 1):
        row = [
            str(number),
            node.name,
            ", ".join(sorted(node.pools)),
            _rows_of(node),
            _keys(node.needed, node.frame),
            _keys(node.given, node.out if isinstance(node, Node) else "sample"),
            ", ".join(node.reads),
            ", ".join(node.writes),
        ]
        if timed:
            row.append(f"{seconds[node.name]:.3f}" if node.name in seconds else "")
        rows.append([*row, _notes(node, plan)])
    text = f"dataflow {flow.name!r}; inputs: {', '.join(_inputs(flow)) or 'none'}\n" + _table(head, rows, width)
    text = textwrap.indent(text, indent)
    for loop in flow.loops.values():
        inner = {n.removeprefix(f"{loop.name}/"): s for n, s in seconds.items() if n.startswith(f"{loop.name}/")}
        text += f"\n\n{indent}  body of {loop.name!r}: " + describe(loop.body, inner, width, indent + "  ").lstrip()
    return text


def _quoted(text: str) -> str:
    return '"' + text.replace('"', "#quot;") + '"'


def mermaid(flow: Dataflow, seconds: Mapping[str, float]) -> str:
    """Pools as boxes; ``==>`` rows as they come, ``-->`` whole frames, ``-.->`` state read and written."""
    plan = build_plan(flow.nodes, flow.inputs)
    ids = {node.name: f"n{i}" for i, node in enumerate(plan.order)}
    lines = ["flowchart TD"]
    by_pool: dict[str, list[Step]] = {}
    for node in plan.order:
        by_pool.setdefault(", ".join(sorted(node.pools)), []).append(node)
    for i, (pool, nodes) in enumerate(by_pool.items()):
        lines.append(f"  subgraph p{i}[{_quoted(pool)}]")
        for node in nodes:
            label = node.name + (f"<br/>{seconds[node.name]:.3f} s" if node.name in seconds else "")
            box = f"[{_quoted(label)}]" if isinstance(node, Node) else f"[[{_quoted(label)}]]"
            lines.append(f"    {ids[node.name]}{box}")
        lines.append("  end")
    lines += _arrows(flow, plan, ids)
    for i, state in enumerate(flow.state):
        lines.append(f"  s{i}[({_quoted(state)})]")
        for node in plan.order:
            lines += [f"  s{i} -.-> {ids[node.name]}"] if state in node.reads else []
            lines += [f"  {ids[node.name]} -.-> s{i}"] if state in node.writes else []
    return "\n".join(lines) + "\n"


def _arrows(flow: Dataflow, plan: Plan, ids: Mapping[str, str]) -> list[str]:
    labels: dict[tuple[str, str], list[str]] = {}
    fed = {edge.target for edge in plan.edges if edge.key is not None}
    for edge in plan.edges:
        if edge.key is not None:
            labels.setdefault((edge.source, edge.target), []).append(str(edge.key))
        elif edge.kind == "filter" or (edge.kind == "rows" and edge.target not in fed):
            labels.setdefault((edge.source, edge.target), [])
    lines = []
    for (source, target), keys in labels.items():
        arrow = "==>" if source in plan.streams[target] else "-->"
        label = f"|{_quoted(', '.join(keys))}|" if keys else ""
        lines.append(f"  {ids[source]} {arrow}{label} {ids[target]}")
    given = {*_inputs(flow)}
    readers = {n.name: [str(k) for k in n.needed if str(k) in given] for n in plan.order}
    for node in plan.order:  # a loop is fed whole rows, without naming their keys
        if not isinstance(node, Node) and {*flow.inputs} & {*node.makes} - {STEP}:
            readers[node.name] += sorted({*flow.inputs} & {*node.makes})
    if any(readers.values()):
        lines.append(f"  inputs([{_quoted('inputs')}])")
    lines += [f"  inputs -->|{_quoted(', '.join(keys))}| {ids[name]}" for name, keys in readers.items() if keys]
    return lines
