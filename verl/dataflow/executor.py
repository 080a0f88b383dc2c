"""Running one step: calling nodes, taking in what they return, and the serial executor.

The concurrent executor (stream.py) runs the same :class:`Task` code in threads, so both give the same values: every
barrier checks the rows and sorts them by id, and metrics are merged in the order of rows and of the plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.dataflow.checks import metrics_of, read_result, settle, where
from verl.dataflow.failures import Cancelled, blame
from verl.dataflow.graph import Plan, is_filter
from verl.dataflow.node import STEP, Key, Node
from verl.dataflow.rows import Part, RowSet, Store, join_columns, join_parts, some, take
from verl.errors import DataflowError
from verl.metrics import Metrics
from verl.protocol import DataProto, DataProtoFuture

if TYPE_CHECKING:
    from verl.dataflow.graph import Step

OnEvent = Callable[[str, str, dict[str, Any]], None]  # (node, "start" | "rows" | "end", info)
Span = tuple[str, float, float]  # node, start and end in seconds of time.perf_counter()
POLL_SECONDS = 0.2  # how often a waiting thread looks whether the step was cancelled


@dataclass
class StepResult:
    """What a step made. ``frames`` are sorted by draw order and, within a prompt, by sample number."""

    step: int
    frames: dict[str, DataProto]
    values: dict[str, Any]  # frame "step"
    metrics: Metrics
    timings: dict[str, float]  # node -> seconds in which a call of it was in progress
    spans: list[Span]  # one for every call
    read: dict[str, dict[str, int]]  # node -> state -> the version it read
    lag: int | None = None  # versions between making the rows and using them, where a schedule makes them ahead

    def __getitem__(self, frame: str) -> DataProto:
        return self.frames[frame]


@dataclass
class Task:
    """One node in one step, and what has come of it so far."""

    node: Step
    started: bool = False
    ended: bool = False
    skipped: bool = False
    parts: list[Part] = field(default_factory=list)
    emitted: list[tuple[str, str]] = field(default_factory=list)  # (row id, uid) in order of arrival
    place: dict[str, tuple[int, int]] = field(default_factory=dict)  # row id -> (part, row in it)
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[str | None, Metrics]] = field(default_factory=list)  # first row of the piece, its metrics
    metrics: Metrics = field(default_factory=Metrics)
    spans: list[Span] = field(default_factory=list)
    rows_in: RowSet | None = None  # rows of the call in progress, for the error message

    def gather(self, key: Key, ids: tuple[str, ...]) -> Any:
        """Values of a key that is still being streamed, for these rows."""
        by_part: dict[int, list[int]] = {}
        for i, row in enumerate(ids):
            by_part.setdefault(self.place[row][0], []).append(i)
        pieces = [
            take(self.parts[p].columns[key.name], [self.place[ids[i]][1] for i in where])
            for p, where in by_part.items()
        ]
        came = [i for where in by_part.values() for i in where]
        order = sorted(range(len(came)), key=came.__getitem__)
        return take(join_columns(str(key), pieces), order)

    def merge_metrics(self, rows: RowSet | None) -> None:
        """Merge the pieces' metrics in the order of their rows, whatever the order in which they came."""
        last = len(self.notes)
        position = rows.position if rows is not None else {}
        self.notes.sort(key=lambda note: position.get(note[0], last) if note[0] is not None else last)
        self.metrics = Metrics.merged(bag for _, bag in self.notes)


def seconds_busy(spans: list[Span]) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@dataclass
class StepRun:
    """One step of one flow: the serial executor, and the base of the concurrent one."""

    plan: Plan
    store: Store
    versions: dict[str, int]
    floor: Mapping[str, int]  # state -> the oldest version whose rows may be used in this step
    feed: Mapping[str, DataProto]  # input rows for loops, by frame
    executor: str = "serial"
    on_event: OnEvent | None = None
    allow_empty: bool = False  # a loop's body may filter everything away; the rest of it is then skipped
    cancel: threading.Event = field(default_factory=threading.Event)
    prefix: str = ""  # names of a loop's nodes are told as "loop/node"

    def __post_init__(self) -> None:
        self.cond = threading.Condition(threading.RLock())
        self.tasks = {node.name: Task(node) for node in self.plan.order}
        self.read: dict[str, dict[str, int]] = {}
        self._event_lock = threading.Lock()

    def run(self) -> None:
        """All nodes in the order of the plan, in this thread."""
        for task in self.tasks.values():
            try:
                self.run_task(task)
            except BaseException as error:
                told = blame(task.node, task.rows_in, error)
                if told is error:
                    raise
                raise told from error

    def run_task(self, task: Task) -> None:
        """Run one node whose sources have all ended."""
        node = task.node
        self.begin(task)
        if isinstance(node, Node):
            self._run_whole(task)
            self.finish(task)
        else:
            node.run(self, task)
        self.close(task)

    def begin(self, task: Task) -> None:
        with self.cond:
            self.read[task.node.name] = {state: self.versions[state] for state in task.node.reads}
        self.tell(task, "start", {})

    def close(self, task: Task) -> None:
        """Count what was written and tell that the node ended."""
        with self.cond:
            for state in () if task.skipped else task.node.writes:
                self.versions[state] += 1
        self.tell(
            task, "end", {"seconds": seconds_busy(task.spans), "rows": len(task.emitted), "skipped": task.skipped}
        )

    def tell(self, task: Task, event: str, info: dict[str, Any]) -> None:
        if self.on_event is not None:
            with self._event_lock:
                self.on_event(self.prefix + task.node.name, event, info)

    def _run_whole(self, task: Task) -> None:
        node = task.node
        with self.cond:
            rows = None if node.frame == STEP else self.store.rows(node.frame, self.plan.epoch[node.name])
            if (rows is not None and not len(rows)) or any(key not in self.store for key in node.needed):
                task.skipped = True  # everything was filtered away (a checked plan lacks keys for no other reason)
                return
        start = time.perf_counter()
        self.take_in(task, self.call(task, rows), rows)
        task.spans.append((self.prefix + node.name, start, time.perf_counter()))

    def call(self, task: Task, rows: RowSet | None) -> Any:
        """Call the node on ``rows`` of its frame. Keys that are still streamed come from their givers' pieces."""
        node = task.node
        task.rows_in = rows
        givers = self.plan.givers
        with self.cond:
            batch = self.store.batch(
                node.frame,
                node.call_names(node.needed, node.frame),
                rows,
                lambda key, ids: self.tasks[givers[key]].gather(key, ids),
            )
        return node.call(batch, **node.params)

    def take_in(self, task: Task, result: Any, rows: RowSet | None) -> None:
        """Wait for a future, run through an iterator of pieces, or take a result as it is."""
        if isinstance(result, Future):
            result = self._wait(result)
        elif isinstance(result, DataProtoFuture):
            result = result.get()
        if not isinstance(result, Iterator):
            self.absorb(task, result, rows)
            return
        try:
            if not task.node.per_row:
                raise DataflowError(f"{where(task.node)} returned an iterator of pieces: that needs per_row=True")
            for piece in result:
                self.absorb(task, piece, rows)
                if self.cancel.is_set():
                    raise Cancelled
        finally:
            if isinstance(result, Generator):
                result.close()

    def _wait(self, future: Future) -> Any:
        while True:
            try:
                return future.result(timeout=POLL_SECONDS)
            except FutureTimeout:
                if future.done():  # just now, or its own error is a TimeoutError: ask again
                    return future.result()
                if self.cancel.is_set():
                    future.cancel()
                    raise Cancelled from None

    def absorb(self, task: Task, result: Any, rows: RowSet | None) -> None:
        """Take in one result or piece and let those who stream from this node know."""
        node = task.node
        metrics = metrics_of(node, result)
        part, values = read_result(node, result, rows)
        with self.cond:
            task.values.update(values)
            if metrics is not None:
                task.notes.append((part.rows.ids[0] if part is not None and len(part.rows) else None, metrics))
            if part is not None:
                twice = [row for row in part.rows.ids if row in task.place]
                if twice:
                    raise DataflowError(f"{where(node)} returned rows twice: {some(twice)}")
                task.place.update((row, (len(task.parts), i)) for i, row in enumerate(part.rows.ids))
                task.parts.append(part)
                task.emitted.extend(zip(part.rows.ids, part.rows.uids, strict=True))
            self.cond.notify_all()
        if part is not None:
            self.tell(task, "rows", {"done": len(task.emitted), "total": self._rows_expected(node, rows)})

    def _rows_expected(self, node: Node, rows: RowSet | None) -> int | None:
        if rows is None or node.relation.kind not in ("same", "expand"):
            return None
        return len(rows) * node.relation.n

    def finish(self, task: Task) -> None:
        """The barrier: check all rows against the relation, sort them, and store the columns."""
        node = task.node
        with self.cond:
            epoch = self.plan.epoch[node.name]
            self.store.values.update(task.values)
            part = None
            if node.gives_rows:
                given = self.store.rows(node.frame, epoch)
                names = [key.name for key in node.given if key.frame != STEP]
                part = join_parts(task.parts, () if task.skipped else names)
                if not task.skipped:
                    there = node.relation.kind == "aggregate" and self.store.has_frame(node.out)
                    part = settle(node, part, given, self.store.rows(node.out, epoch) if there else None)
                self._store(node, part, epoch)
            task.merge_metrics(part.rows if part is not None else None)
            task.parts = []  # whoever still streams from here finds the columns in the store

    def _store(self, node: Node, part: Part, epoch: int) -> None:
        if not len(part.rows) and node.relation.kind != "same" and not self.allow_empty:
            raise DataflowError(
                f"node {node.name!r} left no rows in frame {node.out!r}: there is nothing to go on with"
            )
        if is_filter(node):
            epoch += 1
            self.store.add_filter(node.out, part.rows, epoch)
        elif not self.store.has_frame(node.out):
            self.store.make_frame(node.out, part.rows, epoch)
        for name, values in part.columns.items():
            self.store.put(Key(node.out, name), values, epoch)

    def result(self) -> StepResult:
        """Everything the step made; metrics are merged in the order of the plan."""
        epoch = self.plan.last_epoch
        timings: dict[str, float] = {}
        spans = [span for task in self.tasks.values() for span in task.spans]
        for name in dict.fromkeys(span[0] for span in spans):
            timings[name] = seconds_busy([span for span in spans if span[0] == name])
        return StepResult(
            step=self.store.step,
            frames={frame: self.store.all_columns(frame, epoch) for frame in self.store.frames},
            values=dict(self.store.values),
            metrics=Metrics.merged(task.metrics for task in self.tasks.values()),
            timings=timings,
            spans=spans,
            read=self.read,
        )
