"""Two steps in flight: rows of the next step are made while the present one is finished (one-step-off-policy).

The table of the step stays one. Its nodes with ``ahead=True`` are its first half (say, generate and score), the others
the second. While the second half of step k runs, and writes the weights, the first half of step k+1 makes rows with the
weights as they were before. Between steps nothing is in flight but those rows, which are saved with a checkpoint.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.dataflow.executor import OnEvent, StepResult, seconds_busy
from verl.dataflow.graph import build_plan
from verl.dataflow.node import CONTROLLER, STEP
from verl.dataflow.stream import GRACE_SECONDS, Lanes
from verl.errors import DataflowError
from verl.metrics import Metrics
from verl.protocol import DataProto

if TYPE_CHECKING:
    from verl.dataflow.flow import Batch, Dataflow

WAIT = "wait_for_rows"
"""Name of the span in which a finished step waits for the rows of the next one."""


def ahead_problems(flow: Dataflow) -> list[str]:
    """Why the nodes with ``ahead=True`` cannot run before the step before has ended, one sentence each."""
    first = [node for node in flow.nodes if node.ahead]
    if not first:
        return []
    rest = [node for node in flow.nodes if not node.ahead]
    written = {state for node in flow.nodes for state in node.writes}
    taken = {pool: node.name for node in rest for pool in node.pools - {CONTROLLER}}
    found = []
    for node in first:
        who = f"node {node.name!r} runs ahead"
        if node.writes:
            found.append(f"{who} of the step before and writes {', '.join(node.writes)}, which that step may still use")
        if callable(node.when):
            found.append(f"{who}, so it must be on at every step (its when= is a function)")
        found += [
            f"{who}, so it reads an older {state!r}: declare staleness={{{state!r}: 1}} (and correct for it)"
            for state in node.reads
            if state in written and flow.staleness.get(state, 0) < 1
        ]
        found += [
            f"{who} on the pool {pool!r}, on which {taken[pool]!r} works for the step before: give it a pool of its own"
            for pool in sorted(node.pools & taken.keys())
        ]
    if not found:
        names = {node.name for node in first}
        found += [
            f"node {edge.target!r} runs ahead, but {edge.source!r} {edge.why} it and does not: let both run ahead"
            for edge in build_plan(flow.nodes, flow.inputs).edges
            if edge.target in names and edge.source not in names
        ]
    return found


def halves(flow: Dataflow) -> tuple[Dataflow, Dataflow]:
    """The flow of the nodes that run ahead, and that of the others, whose inputs are all that the first gives."""
    first = [node for node in flow.nodes if node.ahead]
    given = [key for node in first for key in node.given]
    inputs: dict[str, list[str]] = {}
    for key in dict.fromkeys([*flow.input_keys, *given]):
        inputs.setdefault(key.frame, []).append(key.name)
    shared: dict[str, Any] = {"state": flow.state, "pools": flow.pools, "staleness": flow.staleness}
    kind = type(flow)
    head = kind(
        *first, inputs=flow.inputs, outputs=[str(key) for key in given], name=f"{flow.name}, rows ahead", **shared
    )
    rest = kind(
        *(node for node in flow.nodes if not node.ahead),
        inputs=inputs,
        outputs=flow.outputs,
        name=flow.name,
        **shared,
    )
    return head, rest


class OneStepOff:
    """Runs a flow with its ``ahead`` nodes one step before the others.

    Args:
        flow: checked; some of its nodes have ``ahead=True``.
        draw: ``draw(step)`` gives the input rows of a step, or None if there is no such step.
        ready: called between two steps, when nothing runs, before rows are made: it hands over the state that they are
            made with.

    Attributes:
        pending: the rows of the next step, made with older state; None before the first step and after the last.
    """

    def __init__(self, flow: Dataflow, draw: Callable[[int], Batch], ready: Callable[[], None] = lambda: None):
        self.flow, self.draw, self.ready = flow, draw, ready
        self.head, self.rest = halves(flow)
        self.head.validate()
        self.pending: StepResult | None = None
        self._lanes = Lanes()
        weakref.finalize(self, self._lanes.close)

    def run(self, batch: Batch, step: int, executor: str = "concurrent", on_event: OnEvent | None = None) -> StepResult:
        """One step, as :meth:`verl.dataflow.flow.Dataflow.run`, and the first half of the next.

        The executor ``serial`` makes the rows of the next step before it finishes this one: the same values, with
        nothing at the same time.

        Args:
            batch: input rows of this step if nothing is pending; None: ``draw`` gives them.
        """
        told = None if on_event is None else _one_at_a_time(on_event)
        made, self.pending = self.pending, None
        if made is not None and made.step != step:
            raise DataflowError(f"flow {self.flow.name!r}: the rows that were made ahead are of step {made.step}")
        self.flow.note_begin(step)
        if made is None:
            rows = self.draw(step) if batch is None else batch
            self.ready()
            made = self._make(rows, step, dict(self.flow.versions), executor, told, threading.Event())
        rows, seen, lag = self.draw(step + 1), dict(self.flow.versions), self._lag(made)
        if rows is None:
            result = self._finish(made, executor, told)
            result.lag = lag
            return result
        self.ready()
        if executor == "serial":
            self.pending = self._make(rows, step + 1, seen, executor, told, threading.Event())
            result = self._finish(made, executor, told)
        else:
            result = self._both(made, partial(self._make, rows, step + 1, seen, executor, told), executor, told)
        result.lag = lag
        return result

    def _both(
        self, made: StepResult, make: Callable[[threading.Event], StepResult], executor: str, told: OnEvent | None
    ) -> StepResult:
        """Finish ``made`` while the next rows are made in other threads."""
        cancel, future = threading.Event(), Future()

        def work() -> None:
            try:
                future.set_result(make(cancel))
            except BaseException as error:
                future.set_exception(error)

        self._lanes.submit("ahead", work)
        try:
            result = self._finish(made, executor, told)
            waited = time.perf_counter()
            self.pending = future.result()
        except BaseException:
            cancel.set()
            wait([future], GRACE_SECONDS)
            raise
        result.spans.append((WAIT, waited, time.perf_counter()))
        return result

    def _make(
        self,
        rows: Batch,
        step: int,
        versions: dict[str, int],
        executor: str,
        told: OnEvent | None,
        cancel: threading.Event,
    ) -> StepResult:
        return self.head.start(rows, step, executor, versions=versions, floor={}, on_event=told, cancel=cancel)

    def _lag(self, made: StepResult) -> int:
        """How many versions older than the present ones the rows were made with; an error if that is too old."""
        written, oldest = {state for node in self.flow.nodes for state in node.writes}, 0
        for read in made.read.values():
            for state in read.keys() & written:
                self.flow.check_staleness(state, read[state], made.step)
                oldest = max(oldest, self.flow.versions[state] - read[state])
        return oldest

    def _finish(self, made: StepResult, executor: str, told: OnEvent | None) -> StepResult:
        self.rest.versions = self.flow.versions
        rows = {**made.frames, STEP: DataProto(meta_info=dict(made.values))}
        result = self.rest.run(rows, made.step, executor, told)
        result.metrics = Metrics.merged([made.metrics, result.metrics])
        result.spans = [*made.spans, *result.spans]
        result.read = {**made.read, **result.read}
        for name in dict.fromkeys(span[0] for span in made.spans):
            result.timings[name] = seconds_busy([span for span in made.spans if span[0] == name])
        self.flow.timings = dict(result.timings)
        return result

    # ---- resume --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """The pending rows and what they were made with: frames, and plain values; None if nothing is pending."""
        made = self.pending
        if made is None:
            return None
        return {
            "frames": {frame: DataProto(rows.batch, rows.non_tensor_batch) for frame, rows in made.frames.items()},
            "step": made.step,
            "values": dict(made.values),
            "metrics": made.metrics,
            "read": made.read,
            "begun": {str(step): versions for step, versions in self.flow.state_dict()["begun"].items()},
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what :meth:`state_dict` gave."""
        if state is None:
            self.pending = None
            return
        self.pending = StepResult(
            step=state["step"],
            frames=dict(state["frames"]),
            values=dict(state["values"]),
            metrics=state["metrics"],
            timings={},
            spans=[],
            read=dict(state["read"]),
        )
        self.flow.load_begun(state["begun"])


def _one_at_a_time(on_event: OnEvent) -> OnEvent:
    """Two halves tell their events; a display takes them one by one."""
    lock = threading.Lock()

    def told(node: str, event: str, info: dict[str, Any]) -> None:
        with lock:
            on_event(node, event, info)

    return told


def input_rows(flow: Dataflow, frames: Mapping[str, DataProto]) -> DataProto:
    """The prompts of rows that were made ahead, as they were before: without what the first half gave them."""
    given = {key.name for node in flow.nodes for key in node.given if key.frame == "prompt"}
    given -= {*flow.inputs["prompt"]}  # a loop gives its prompts again
    prompts = frames["prompt"]
    tensors = [name for name in (prompts.tensor_keys() if prompts.batch is not None else ()) if name not in given]
    others = [name for name in prompts.non_tensor_batch if name not in given]
    return prompts.select(batch_keys=tensors, non_tensor_batch_keys=others)
