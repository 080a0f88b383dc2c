"""From declared nodes to a plan: who waits for whom and why, the order, and which edges can be streamed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from verl.dataflow.node import STEP, Key, Node
from verl.dataflow.rows import AFFECTS
from verl.errors import DataflowError

if TYPE_CHECKING:
    from verl.dataflow.loop import Loop

    Step = Node | Loop


@dataclass(frozen=True)
class Edge:
    """``target`` waits for ``source``. Kinds: key, rows (makes the frame), state, filter (thins the frame)."""

    source: str
    target: str
    kind: str
    why: str
    key: Key | None = None


@dataclass
class Plan:
    """How the nodes of one phase run: a total order that the serial executor follows, and what may overlap."""

    order: tuple[Step, ...]
    edges: tuple[Edge, ...]
    makers: dict[str, str]  # frame -> the node that makes its rows (frames of the input have none)
    waits: dict[str, frozenset[str]] = field(default_factory=dict)  # node -> nodes that must have ended
    streams: dict[str, frozenset[str]] = field(default_factory=dict)  # node -> nodes whose rows it takes as they come
    epoch: dict[str, int] = field(default_factory=dict)  # node -> number of filters before it
    last_epoch: int = 0

    @property
    def givers(self) -> dict[Key, str]:
        return {key: node.name for node in self.order for key in node.given}


def is_filter(node: Step) -> bool:
    return isinstance(node, Node) and node.relation.kind == "subset"


def row_frames(node: Step) -> frozenset[str]:
    """Frames whose rows a node takes or gives (a loop only makes frames)."""
    return frozenset((node.frame, node.out)) - {STEP} if isinstance(node, Node) else frozenset()


def frame_makers(nodes: Sequence[Step], input_frames: Iterable[str]) -> dict[str, list[str]]:
    """frame -> the nodes that would make its rows; more than one is an error. An input frame has the maker "input".

    A loop that gives an input frame is fed with the input rows and then makes the frame itself.
    """
    looped = {frame for node in nodes if not isinstance(node, Node) for frame in node.makes}
    makers: dict[str, list[str]] = {f: ["input"] for f in input_frames if f != STEP and f not in looped}
    for node in nodes:
        for frame in node.makes:
            makers.setdefault(frame, []).append(node.name)
    for node in nodes:
        if isinstance(node, Node) and node.relation.kind == "aggregate":
            makers.setdefault(node.out, [node.name])
    return makers


def _edges(nodes: Sequence[Step], makers: Mapping[str, str]) -> list[Edge]:
    givers = {key: node.name for node in nodes for key in node.given}
    edges = []
    for node in nodes:
        for key in node.needed:
            if key in givers:
                edges.append(Edge(givers[key], node.name, "key", f"gives {key} to", key))
        for frame in sorted(row_frames(node)):
            maker = makers.get(frame, "input")
            if maker not in ("input", node.name):
                edges.append(Edge(maker, node.name, "rows", f"makes the rows of frame {frame} for"))
    for i, first in enumerate(nodes):
        for later in nodes[i + 1 :]:
            for state in sorted({*first.writes} & {*later.reads, *later.writes}):
                edges.append(Edge(first.name, later.name, "state", f"writes {state} before"))
            for state in sorted({*first.reads} & {*later.writes}):
                edges.append(Edge(first.name, later.name, "state", f"reads {state} before"))
    return edges


def _ordered(nodes: Sequence[Step], edges: Sequence[Edge]) -> list[Step]:
    """Listed order, as far as the edges allow: always the first listed node that can go."""
    before: dict[str, set[str]] = defaultdict(set)
    for edge in edges:
        before[edge.target].add(edge.source)
    placed: dict[str, Step] = {}
    remaining = list(nodes)
    while remaining:
        ready = next((node for node in remaining if before[node.name] <= placed.keys()), None)
        if ready is None:
            raise DataflowError(_cycle({node.name for node in remaining}, edges))
        placed[ready.name] = ready
        remaining.remove(ready)
    return list(placed.values())


def _cycle(names: set[str], edges: Sequence[Edge]) -> str:
    into = {e.target: e for e in edges if e.source in names and e.target in names}
    path = [next(iter(sorted(into)))]
    while path.count(path[-1]) < 2:
        path.append(into[path[-1]].source)
    ring = path[path.index(path[-1]) :][::-1]
    told = [f"{a!r} {into[b].why} {b!r}" for a, b in pairwise(ring)]
    return (
        f"the nodes wait for each other in a circle: {', '.join(told)}; list them in another order or cut one of these"
    )


def build_plan(nodes: Sequence[Step], input_frames: Iterable[str]) -> Plan:
    """The plan for these nodes (those that are on in one phase). Raises DataflowError on a cycle."""
    makers = {frame: names[0] for frame, names in frame_makers(nodes, input_frames).items()}
    edges = _edges(nodes, makers)
    order = _ordered(nodes, edges)
    epoch, filters = {}, 0
    for i, node in enumerate(order):
        epoch[node.name] = filters
        if is_filter(node):
            filters += 1
            for later in order[i + 1 :]:
                if row_frames(later) & {*AFFECTS[node.frame]}:
                    edges.append(Edge(node.name, later.name, "filter", f"filters the rows of frame {node.frame} for"))
    plan = Plan(tuple(order), tuple(edges), makers, epoch=epoch, last_epoch=filters)
    by_name = {node.name: node for node in order}
    for node in order:
        sources = {e.source for e in edges if e.target == node.name}
        streamed = {s for s in sources if _can_stream(by_name[s], node, edges)}
        plan.streams[node.name] = frozenset(streamed)
        plan.waits[node.name] = frozenset(sources - streamed)
    return plan


def _can_stream(source: Step, target: Step, edges: Sequence[Edge]) -> bool:
    """Rows flow as they come if both nodes treat rows alone, run on different pools, and only rows tie them."""
    if not (isinstance(source, Node) and isinstance(target, Node) and source.per_row and target.per_row):
        return False
    if source.pools & target.pools or source.out != target.frame:
        return False
    between = [e for e in edges if (e.source, e.target) == (source.name, target.name)]
    return all(e.kind != "state" and (e.key is None or e.key.frame == target.frame) for e in between)
