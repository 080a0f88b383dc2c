"""All that can be wrong with a flow before anything runs: every problem is found, not the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from verl.dataflow.ahead import ahead_problems
from verl.dataflow.graph import build_plan, frame_makers, row_frames
from verl.dataflow.node import FRAMES, STEP, Key, Node, nearest
from verl.errors import DataflowError

if TYPE_CHECKING:
    from verl.dataflow.flow import Dataflow
    from verl.dataflow.graph import Step

# Where a phase is likely to begin: every early step, and both sides of round numbers.
PROBE_STEPS = (*range(257), *(n + d for k in range(3, 8) for n in (10**k, 2 * 10**k, 5 * 10**k) for d in (-1, 0, 1)))


def all_problems(flow: Dataflow, outputs: Sequence[Key], steps: Iterable[int] | None) -> list[str]:
    """Everything wrong with ``flow`` whose keys ``outputs`` somebody will read, one sentence each."""
    nodes = flow.nodes
    found = [p for node in nodes for p in node.problems()]
    found += [f"two nodes are called {name!r}" for name, n in Counter(x.name for x in nodes).items() if n > 1]
    found += [
        f"inputs names the unknown frame {f!r}; there are {', '.join(FRAMES)}" for f in flow.inputs if f not in FRAMES
    ]
    if found:  # the graph cannot be read with these
        return found
    found += _key_problems(nodes, flow.input_keys, outputs)
    found += _frame_problems(nodes, flow.inputs)
    found += _state_problems(flow)
    found += _pool_problems(flow)
    if not found:
        try:
            build_plan(nodes, flow.inputs)
            found += ahead_problems(flow)
        except DataflowError as error:
            found.append(str(error))
    return found + _phase_problems(nodes, flow.input_keys, outputs, PROBE_STEPS if steps is None else steps)


def _givers(nodes: Sequence[Step]) -> dict[Key, list[str]]:
    givers: dict[Key, list[str]] = {}
    for node in nodes:
        for key in node.given:
            givers.setdefault(key, []).append(node.name)
    return givers


def _key_problems(nodes: Sequence[Step], inputs: Sequence[Key], outputs: Sequence[Key]) -> list[str]:
    givers = _givers(nodes)
    found = []
    for key, names in givers.items():
        if len(names) > 1:
            found.append(
                f"key {key} is given by {', '.join(map(repr, names))}; a key has one giver, so rename one of them"
            )
        if key in inputs:
            found.append(f"key {key} is given by {names[0]!r} and is an input too; a key has one giver: rename one")
    known = {*givers, *inputs}
    for node in nodes:
        for key in node.needed:
            if key not in known:
                found.append(_missing(f"node {node.name!r} needs", key, known))
            elif isinstance(node, Node) and node.frame == STEP and key.frame != STEP:
                found.append(
                    f"node {node.name!r} is of frame 'step' and needs {key}: take frame={key.frame!r}, out='step'"
                )
            elif isinstance(node, Node) and key.frame not in (node.frame, "prompt", STEP):
                found.append(
                    f"node {node.name!r} takes rows of frame {node.frame!r} and needs {key}: one {node.frame} row has "
                    f"many {key.frame} rows, so aggregate {key} first or take frame={key.frame!r}"
                )
    return found + [_missing("the caller reads (outputs=)", key, known) for key in outputs if key not in known]


def _missing(who: str, key: Key, known: set[Key]) -> str:
    elsewhere = sorted(str(k) for k in known if k.name == key.name)
    if elsewhere:
        return f"{who} {key}, which nobody gives; there is {', '.join(elsewhere)}: name the frame"
    return f"{who} {key}, which nobody gives{nearest(str(key), map(str, known))}"


def _frame_problems(nodes: Sequence[Step], inputs: Iterable[str]) -> list[str]:
    makers = frame_makers(nodes, inputs)
    found = [
        f"the rows of frame {frame!r} are made by {', '.join(map(repr, names))}; a frame has one maker"
        for frame, names in makers.items()
        if len(names) > 1
    ]
    for node in nodes:
        for frame in sorted(row_frames(node) - makers.keys()):
            found.append(f"node {node.name!r} works on frame {frame!r}, whose rows nobody makes")
    return found


def _state_problems(flow: Dataflow) -> list[str]:
    found = []
    for node in flow.nodes:
        for state in sorted({*node.reads, *node.writes} - {*flow.state}):
            found.append(
                f"node {node.name!r} uses the unknown state {state!r}{nearest(state, flow.state)}; "
                f"state= lists {', '.join(flow.state) or 'none'}"
            )
    for state, lag in flow.staleness.items():
        if state not in flow.state:
            found.append(f"staleness names the unknown state {state!r}{nearest(state, flow.state)}")
        elif not isinstance(lag, int) or lag < 0:
            found.append(f"staleness of {state!r} is {lag!r}; it is a number of steps, 0 or more")
    return found + [p for node in flow.nodes if not isinstance(node, Node) for p in node.carry_problems(flow)]


def _pool_problems(flow: Dataflow) -> list[str]:
    if flow.pools is None:
        return []
    return [
        f"node {node.name!r} runs on the unknown pool {pool!r}{nearest(pool, flow.pools)}; "
        f"there are {', '.join(flow.pools)}"
        for node in flow.nodes
        for pool in sorted(node.pools - {*flow.pools})
    ]


def starved(on: Sequence[Step], inputs: Iterable[Key], outputs: Sequence[Key]) -> list[tuple[str, Key]]:
    """(who, key) for everything that is needed while only the nodes ``on`` give keys."""
    there = {*inputs, *(key for node in on for key in node.given)}
    wanted = [(f"node {node.name!r} needs", key) for node in on for key in node.needed]
    wanted += [("the caller reads (outputs=)", key) for key in outputs]
    return [(who, key) for who, key in wanted if key not in there]


def _phase_problems(
    nodes: Sequence[Step], inputs: Sequence[Key], outputs: Sequence[Key], steps: Iterable[int]
) -> list[str]:
    """Phases are probed at ``steps``; besides, a node that is always on may not need one that is on by a function."""
    if not any(callable(node.when) for node in nodes):
        return []
    giver = {key: node for node in nodes for key in node.given}
    always = [(f"node {node.name!r} needs", key) for node in nodes if not callable(node.when) for key in node.needed]
    always += [("the caller reads (outputs=)", key) for key in outputs]
    told = {(who, key) for who, key in always if key in giver and callable(giver[key].when)}
    found = [
        f"{who} {key} at every step, but its giver {giver[key].name!r} may be off at some (its when= is a function)"
        for who, key in sorted(told)
    ]
    phases: set[tuple[str, ...]] = set()
    for step in steps:
        on = [node for node in nodes if node.is_on(step)]
        names = tuple(node.name for node in on)
        if names in phases:
            continue
        phases.add(names)
        for who, key in starved(on, inputs, outputs):
            if key in giver and (who, key) not in told:
                told.add((who, key))
                found.append(f"{who} {key} at step {step}, when its giver {giver[key].name!r} is off")
        found += [p for p in _frame_problems(on, {key.frame for key in inputs}) if not found]
    return found


def unread(nodes: Sequence[Step], outputs: Sequence[Key]) -> Mapping[str, list[str]]:
    """node -> keys it gives and nobody reads."""
    read = {*outputs, *(key for node in nodes for key in node.needed)}
    left = {node.name: [str(key) for key in node.given if key not in read] for node in nodes}
    return {name: keys for name, keys in left.items() if keys}
