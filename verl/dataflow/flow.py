"""Dataflow: declared nodes, checked as a whole, run a step at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.dataflow.check_graph import all_problems, starved, unread
from verl.dataflow.describe import describe, mermaid
from verl.dataflow.executor import OnEvent, StepResult, StepRun
from verl.dataflow.graph import Plan, build_plan
from verl.dataflow.loop import Loop
from verl.dataflow.node import STEP, Key, Node, nearest, parse_keys
from verl.dataflow.rows import Store
from verl.dataflow.stream import ConcurrentRun, Lanes
from verl.errors import DataflowError
from verl.notices import notice
from verl.protocol import DataProto

if TYPE_CHECKING:
    from verl.dataflow.graph import Step

Batch = DataProto | Mapping[str, DataProto] | None


class Dataflow:
    """A training step, or any other computation over rows, as a graph of nodes.

    Args:
        nodes: Node and Loop, in the order in which they should run where the data leave a choice. None and nodes with
            ``when=False`` are left out.
        inputs: frame -> the keys that come with the batch of a step. Keys of frame ``step`` are in its ``meta_info``.
        state: names of the state that nodes may read and write.
        pools: names of the pools there are; None allows any.
        name: of the flow. A flow called ``validate`` or ``preview`` may not write state (see FlowSet).
        outputs: keys that the caller reads from the result (so they are neither missing nor reported as unread).
        staleness: state -> how many steps old the version may be that a row was made with (default 0).
    """

    def __init__(
        self,
        *nodes: Node | Loop | None,
        inputs: Mapping[str, Sequence[str]] | None = None,
        state: Sequence[str] = (),
        pools: Iterable[str] | None = None,
        name: str = "train",
        outputs: Sequence[str] = (),
        staleness: Mapping[str, int] | None = None,
    ) -> None:
        self.nodes: tuple[Step, ...] = tuple(node for node in nodes if node is not None and node.when is not False)
        self.inputs = {frame: tuple(keys) for frame, keys in (inputs or {}).items()}
        self.state = tuple(state)
        self.pools = None if pools is None else tuple(pools)
        self.name = name
        self.outputs = tuple(outputs)
        self.staleness = dict(staleness or {})
        self.versions: dict[str, int] = dict.fromkeys(self.state, 0)  # state -> how often it has been written
        self.timings: dict[str, float] = {}  # seconds per node in the last step
        self._begun: dict[int, dict[str, int]] = {}  # recent step -> versions when it began
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._checked = False
        self._lanes = Lanes()
        weakref.finalize(self, self._lanes.close)

    # ---- looking and changing ------------------------------------------------------------------------------------

    @property
    def input_keys(self) -> tuple[Key, ...]:
        """Input keys with their frames. Rows that feed a loop are seen through what the loop gives, not as inputs."""
        fed = {frame for node in self.nodes if isinstance(node, Loop) for frame in node.makes}
        return tuple(k for frame, keys in self.inputs.items() if frame not in fed for k in parse_keys(keys, frame))

    @property
    def loops(self) -> dict[str, Loop]:
        return {node.name: node for node in self.nodes if isinstance(node, Loop)}

    def _changed(self, nodes: Sequence[Step]) -> Dataflow:
        flow = Dataflow(
            *nodes,
            inputs=self.inputs,
            state=self.state,
            pools=self.pools,
            name=self.name,
            outputs=self.outputs,
            staleness=self.staleness,
        )
        flow.versions.update(self.versions)
        flow._begun = {step: dict(versions) for step, versions in self._begun.items()}
        return flow

    def _index(self, name: str) -> int:
        names = [node.name for node in self.nodes]
        if name not in names:
            raise DataflowError(f"flow {self.name!r} has no node {name!r}{nearest(name, names)}")
        return names.index(name)

    def with_node(self, node: Node | Loop, after: str | None = None, before: str | None = None) -> Dataflow:
        """A new flow with one more node, after or before the named one (default: at the end)."""
        if after is not None and before is not None:
            raise DataflowError(f"node {node.name!r}: give after= or before=, not both")
        at = len(self.nodes)
        if after is not None:
            at = self._index(after) + 1
        elif before is not None:
            at = self._index(before)
        return self._changed([*self.nodes[:at], node, *self.nodes[at:]])

    def without(self, name: str) -> Dataflow:
        """A new flow that lacks the named node."""
        at = self._index(name)
        return self._changed([*self.nodes[:at], *self.nodes[at + 1 :]])

    def describe(self, seconds: Mapping[str, float] | None = None, width: int = 160) -> str:
        """A plain-text table of the flow; ``seconds`` (node -> seconds) defaults to the last step's timings."""
        return describe(self, self.timings if seconds is None else seconds, width)

    def to_mermaid(self, seconds: Mapping[str, float] | None = None) -> str:
        """The flow as a Mermaid flowchart."""
        return mermaid(self, self.timings if seconds is None else seconds)

    # ---- checking ------------------------------------------------------------------------------------------------

    def problems(self, outputs: Sequence[Key] | None = None, steps: Iterable[int] | None = None) -> list[str]:
        """Everything that is wrong, one sentence each. ``outputs`` default to those of the flow."""
        return all_problems(self, parse_keys(self.outputs, "sample") if outputs is None else outputs, steps)

    def validate(self, steps: Iterable[int] | None = None) -> Dataflow:
        """Raise one DataflowError with ALL problems, or give a notice of keys that nobody reads. Returns the flow.

        ``steps``: global steps at which ``when=`` functions are asked; pass all steps of the run for a complete check.
        """
        found = self.problems(steps=steps)
        if len(found) == 1:
            raise DataflowError(f"dataflow {self.name!r}: {found[0]}")
        if found:
            raise DataflowError(
                f"{len(found)} problems in the dataflow {self.name!r}:\n" + "\n".join(f"  - {p}" for p in found)
            )
        left = unread(self.nodes, parse_keys(self.outputs, "sample"))
        if left:
            told = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in left.items())
            notice(f"dataflow {self.name!r}: nobody reads these keys: {told}")
        self._checked = True
        return self

    def plan_at(self, step: int) -> Plan:
        """The plan of the phase that ``step`` is in; raises DataflowError if the phase lacks a key."""
        on = [node for node in self.nodes if node.is_on(step)]
        names = tuple(node.name for node in on)
        if names not in self._plans:
            lacking = starved(on, self.input_keys, parse_keys(self.outputs, "sample"))
            if lacking:
                who, key = lacking[0]
                raise DataflowError(f"dataflow {self.name!r}: {who} {key} at step {step}, when its giver is off")
            self._plans[names] = build_plan(on, self.inputs)
        return self._plans[names]

    # ---- running -------------------------------------------------------------------------------------------------

    def run(self, batch: Batch, step: int, executor: str = "concurrent", on_event: OnEvent | None = None) -> StepResult:
        """One step.

        Args:
            batch: rows of the one input frame, or ``{frame: rows}`` if there are several, or None if there are none.
            step: global step; calls find it in ``meta_info["global_step"]``.
            executor: ``"concurrent"``, or ``"serial"``: the same values, one node after the other.
            on_event: ``on_event(node, "start" | "rows" | "end", info)``, for displays. Called from other threads, one
                call at a time.

        Raises:
            DataflowError: a node broke its contract. NodeError: a node crashed. Other VerlErrors keep their type.
        """
        if not self._checked:
            self.validate()
        self.note_begin(step)
        floor = {state: self._floor(state, step) for state in self.state}
        result = self.start(batch, step, executor, versions=self.versions, floor=floor, on_event=on_event)
        self.timings = dict(result.timings)
        return result

    def start(
        self,
        batch: Batch,
        step: int,
        executor: str,
        *,
        versions: dict[str, int],
        floor: Mapping[str, int],
        values: Mapping[str, Any] | None = None,
        on_event: OnEvent | None = None,
        allow_empty: bool = False,
        cancel: threading.Event | None = None,
        prefix: str = "",
    ) -> StepResult:
        """Run the nodes with somebody else's versions: what :meth:`run` and a Loop around this flow share."""
        plan = self.plan_at(step)
        store, feed = self._load(batch, step, values)
        common = {
            "floor": floor,
            "on_event": on_event,
            "allow_empty": allow_empty,
            "cancel": cancel or threading.Event(),
            "prefix": prefix,
        }
        if executor == "concurrent":
            run: StepRun = ConcurrentRun(plan, store, versions, feed=feed, lanes=self._lanes, **common)
        elif executor == "serial":
            run = StepRun(plan, store, versions, feed=feed, **common)
        else:
            raise DataflowError(f"unknown executor {executor!r}; there are 'concurrent' and 'serial'")
        run.run()
        for loop in self.loops.values():
            loop.commit()
        return run.result()

    def _load(self, batch: Batch, step: int, values: Mapping[str, Any] | None) -> tuple[Store, dict[str, DataProto]]:
        """The input rows by frame; rows of a frame that a loop makes are for the loop."""
        who = f"flow {self.name!r}"
        frames = [frame for frame in self.inputs if frame != STEP]
        if isinstance(batch, DataProto):
            if len(frames) > 1:
                raise DataflowError(f"{who} has the input frames {', '.join(frames)}: run it with {{frame: batch}}")
            batch = {frames[0] if frames else STEP: batch}
        batch = batch or {}
        store = Store(step)
        for each in batch.values():
            store.values.update({k: each.meta_info[k] for k in self.inputs.get(STEP, ()) if k in each.meta_info})
        store.values.update(values or {})
        missing = [f"step/{key}" for key in self.inputs.get(STEP, ()) if key not in store.values]
        missing += [f"rows of frame {frame!r}" for frame in frames if frame not in batch]
        if missing:
            raise DataflowError(f"{who} was run without its input {missing[0]}")
        makes = {frame for loop in self.loops.values() for frame in loop.makes}
        for frame in frames:
            if frame not in makes:
                store.load(frame, batch[frame], parse_keys(self.inputs[frame], frame), who)
        return store, {frame: batch[frame] for frame in frames if frame in makes}

    # ---- versions and resume -------------------------------------------------------------------------------------

    def note_begin(self, step: int) -> None:
        """Step ``step`` begins with the present versions: what :meth:`check_staleness` measures by."""
        self._begun[step] = dict(self.versions)
        keep = max(self.staleness.values(), default=0) + 2
        self._begun = dict(sorted(self._begun.items())[-keep:])

    def load_begun(self, begun: Mapping[Any, Mapping[str, int]]) -> None:
        """Take over the versions with which recent steps began, as ``state_dict()["begun"]`` gives them."""
        self._begun = {int(step): dict(versions) for step, versions in begun.items()}

    def _floor(self, state: str, step: int) -> int:
        """The version of ``state`` when step ``step - staleness`` began (or the oldest step that is known)."""
        if not self._begun:
            return 0
        known = [s for s in self._begun if s <= step - self.staleness.get(state, 0)]
        return self._begun[max(known) if known else min(self._begun)][state]

    def check_staleness(self, state: str, row_version: int | Iterable[int], step: int) -> None:
        """Raise DataflowError if a row that step ``step`` uses was made with a version of ``state`` that is too old."""
        if state not in self.versions:
            raise DataflowError(f"flow {self.name!r} has no state {state!r}{nearest(state, self.state)}")
        oldest = row_version if isinstance(row_version, int) else min(map(int, row_version))
        if oldest < self._floor(state, step):
            raise DataflowError(
                f"step {step} uses rows made with version {oldest} of {state!r}; with a staleness of "
                f"{self.staleness.get(state, 0)} it must be {self._floor(state, step)} or newer"
            )

    def state_dict(self) -> dict[str, Any]:
        """Versions of the state and what the loops have saved: what a resumed run needs."""
        return {
            "versions": dict(self.versions),
            "begun": {step: dict(versions) for step, versions in self._begun.items()},
            "loops": {name: loop.state_dict() for name, loop in self.loops.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave. Rows saved by a loop that this flow lacks are an error, not lost."""
        lost = sorted(state["loops"].keys() - self.loops.keys())
        if lost:
            raise DataflowError(
                f"the checkpoint has saved rows of the loop {lost[0]!r}, which flow {self.name!r} lacks"
            )
        self.versions.update(state["versions"])
        self.load_begun(state["begun"])
        for name, saved in state["loops"].items():
            self.loops[name].load_state_dict(saved)
