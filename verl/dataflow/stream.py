"""The concurrent executor: nodes on different pools run together, and rows flow between per_row nodes as they come.

Every pool has one thread, so its nodes run one at a time, in the order of the plan. That order is topological, so the
first node that has not ended can always run: nothing waits forever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from verl.dataflow.executor import POLL_SECONDS, StepRun, Task
from verl.dataflow.failures import Cancelled, blame
from verl.dataflow.node import Node
from verl.dataflow.rows import RowSet
from verl.notices import notice

GRACE_SECONDS = 30.0  # how long a failed step waits for calls that cannot be interrupted
INTERRUPT_GRACE_SECONDS = 2.0  # the same after Ctrl-C
CLOSE_SECONDS = 5.0  # how long closing waits for a thread that is still at work


class Lanes:
    """One daemon thread per name, kept from step to step (fresh threads would make torch start its own again)."""

    def __init__(self) -> None:
        self._queues: dict[str, queue.SimpleQueue] = {}
        self._threads: list[threading.Thread] = []

    def submit(self, name: str, work: Callable[[], None]) -> None:
        if name not in self._queues:
            self._queues[name] = queue.SimpleQueue()
            thread = threading.Thread(target=_serve, args=(self._queues[name],), name=f"dataflow-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._queues[name].put(work)

    def close(self) -> None:
        """Let every thread end after the work it has; later work gets fresh ones.

        They are waited for: a thread that has run torch and is still there when the interpreter ends aborts it.
        """
        for waiting in self._queues.values():
            waiting.put(None)
        threads, self._threads, self._queues = self._threads, [], {}
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)


def _serve(waiting: queue.SimpleQueue) -> None:
    while (work := waiting.get()) is not None:
        work()


class _Reader:
    """The rows of a streamed consumer: which ones all its sources have given, each told once."""

    def __init__(self, run: StepRun, task: Task) -> None:
        self.run = run
        self.node = task.node
        self.sources = [run.tasks[name] for name in sorted(run.plan.streams[task.node.name])]
        self.cursor = [0] * len(self.sources)
        self.count: dict[str, int] = {}

    def news(self) -> bool:
        return any(len(s.emitted) > at for s, at in zip(self.sources, self.cursor, strict=True))

    def ended(self) -> bool:
        return all(source.ended for source in self.sources) and not self.news()

    def ready(self) -> RowSet:
        """Rows that have become complete since the last call. The caller holds the run's lock."""
        rows = []
        epoch = self.run.plan.epoch[self.node.name]
        for i, source in enumerate(self.sources):
            for row, uid in source.emitted[self.cursor[i] :]:
                self.count[row] = self.count.get(row, 0) + 1
                if self.count[row] == len(self.sources) and self.run.store.survives(self.node.frame, row, uid, epoch):
                    rows.append((row, uid))
            self.cursor[i] = len(source.emitted)
        return RowSet(tuple(r for r, _ in rows), tuple(u for _, u in rows))


@dataclass
class ConcurrentRun(StepRun):
    """One step with overlap. Values, frames and metrics equal those of the serial executor."""

    lanes: Lanes = field(default_factory=Lanes)
    executor: str = "concurrent"

    def run(self) -> None:
        self.error: BaseException | None = None
        self.grad = torch.is_grad_enabled()  # a property of the thread, so it is handed to ours
        try:
            self._supervise()
        except BaseException:
            self._stop(INTERRUPT_GRACE_SECONDS)
            raise
        if self.error is not None:
            self._stop(GRACE_SECONDS)
            raise self.error

    def _supervise(self) -> None:
        with self.cond:
            while self.error is None and not all(task.ended for task in self.tasks.values()):
                if self.cancel.is_set():
                    if not self._running():
                        raise Cancelled
                else:
                    self._launch_ready()
                self.cond.wait(POLL_SECONDS)

    def _running(self) -> list[str]:
        return [name for name, task in self.tasks.items() if task.started and not task.ended]

    def _stop(self, grace: float) -> None:
        """Cancel what runs and wait for it, so that nothing works on the models while the error is handled."""
        self.cancel.set()
        with self.cond:
            self.cond.notify_all()
            self.cond.wait_for(lambda: not self._running(), timeout=grace)
            if still := self._running():
                notice(f"the step was cancelled, but calls of {', '.join(still)} have not returned after {grace:g} s")
                self.lanes.close()

    def _launch_ready(self) -> None:
        turn: dict[str, str] = {}  # pool -> the first node on it that has not ended
        for name, task in self.tasks.items():
            if not task.ended:
                for pool in task.node.pools:
                    turn.setdefault(pool, name)
        for name, task in self.tasks.items():
            if not task.started and self._may_start(task, turn):
                task.started = True
                lane = task.node.pool if isinstance(task.node, Node) else f"loop:{name}"
                self.lanes.submit(lane, lambda task=task: self._work(task))

    def _may_start(self, task: Task, turn: dict[str, str]) -> bool:
        name = task.node.name
        return (
            all(turn[pool] == name for pool in task.node.pools)
            and all(self.tasks[source].ended for source in self.plan.waits[name])
            and all(self.tasks[source].started for source in self.plan.streams[name])
        )

    def _work(self, task: Task) -> None:
        """What a lane does for one node. Every error ends in ``self.error``: the first one wins."""
        try:
            with torch.set_grad_enabled(self.grad):
                if all(self.tasks[source].ended for source in self.plan.streams[task.node.name]):
                    self.run_task(task)
                else:
                    self._run_streamed(task)
        except Cancelled:
            pass
        except BaseException as error:
            with self.cond:
                if self.error is None:
                    self.error = blame(task.node, task.rows_in, error)
            self.cancel.set()
        finally:
            with self.cond:
                task.ended = True
                self.cond.notify_all()

    def _run_streamed(self, task: Task) -> None:
        self.begin(task)
        if all(
            key in self.store or self.plan.givers[key] in self.plan.streams[task.node.name] for key in task.node.needed
        ):
            calls = _Calls(self, task)
            try:
                calls.run(_Reader(self, task))
            finally:
                calls.cancel()
        task.skipped = not task.spans  # no row came through: it was never called
        self.finish(task)
        self.close(task)


class _Calls:
    """Calls of one streamed node on the pieces of its input; those that return futures overlap."""

    def __init__(self, run: ConcurrentRun, task: Task) -> None:
        self.run_ = run
        self.task = task
        self.pending: dict[Future, tuple[RowSet, float]] = {}
        self.ended_at: dict[Future, float] = {}

    def run(self, reader: _Reader) -> None:
        cond = self.run_.cond
        while True:
            with cond:
                while not (self.run_.cancel.is_set() or reader.news() or reader.ended() or self.ended_at):
                    cond.wait(POLL_SECONDS)
                rows = reader.ready()
                ended = reader.ended()
                done = list(self.ended_at)
            if self.run_.cancel.is_set():
                raise Cancelled
            for future in done:
                self._collect(future)
            if len(rows):
                self._call(rows)
            if ended and not len(rows) and not self.pending:
                return
            if ended and self.pending and not len(rows):
                with cond:
                    while not (self.ended_at or self.run_.cancel.is_set()):
                        cond.wait(POLL_SECONDS)

    def _call(self, rows: RowSet) -> None:
        start = time.perf_counter()
        result = self.run_.call(self.task, rows)
        if isinstance(result, Future):
            self.pending[result] = (rows, start)
            result.add_done_callback(self._done)
        else:
            self.run_.take_in(self.task, result, rows)
            self._span(start, time.perf_counter())

    def _done(self, future: Future) -> None:
        with self.run_.cond:
            self.ended_at[future] = time.perf_counter()
            self.run_.cond.notify_all()

    def _collect(self, future: Future) -> None:
        rows, start = self.pending.pop(future)
        with self.run_.cond:
            end = self.ended_at.pop(future)
        self.task.rows_in = rows
        self._span(start, end)
        self.run_.absorb(self.task, future.result(), rows)

    def _span(self, start: float, end: float) -> None:
        self.task.spans.append((self.run_.prefix + self.task.node.name, start, end))

    def cancel(self) -> None:
        for future in self.pending:
            future.cancel()
