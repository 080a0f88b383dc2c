"""Simulated ranks: one thread each, whose failures never leave the others waiting."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from verl.comm import CommAbortedError, ThreadComm

_DONE = object()


def add_note(error: BaseException, note: str) -> None:
    """Say where an error happened without changing its type. (Python 3.10 shows no notes: it joins the message.)"""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        add_note_to_message(error, note)


def add_note_to_message(error: BaseException, note: str) -> None:
    """The Python 3.10 way: kept as a note for programs, and in the first argument for people."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


class RankThreads:
    """``len(comms)`` ranks, each with a thread of its own that lives as long as this object.

    The same thread serves a rank in every call, so thread-local state (gradient mode, current device) persists.
    """

    def __init__(self, comms: list[ThreadComm]):
        self.meeting = comms[0].meeting
        self._executors = [ThreadPoolExecutor(1, thread_name_prefix=f"rank-{comm.rank}") for comm in comms]

    def run(self, calls: Mapping[int, Callable[[], Any]]) -> list[Any]:
        """Run one call on each of these ranks at the same time; results in rank order.

        If a rank raises, the waiting of the others ends, and when all are done the first error is raised.
        """
        running = _Running(self.meeting, self._executors, calls)
        running.wait()
        running.raise_first_error()
        return [future.result() for future in running.futures.values()]

    def stream(self, calls: Mapping[int, Callable[[], Generator[Any, None, None]]]) -> Generator[Any, None, None]:
        """Pieces of all ranks' generators in the order in which they come.

        Ranks run ahead of the consumer. If a rank raises, or the consumer closes the stream, every rank stops at its
        next piece or collective, its generator is closed, and only then does this generator end.
        """
        pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stop = threading.Event()

        def drain(make: Callable[[], Generator[Any, None, None]]) -> Callable[[], None]:
            def pump() -> None:
                source = make()
                try:
                    while not stop.is_set():
                        pieces.put(next(source))
                except StopIteration:
                    pass
                finally:
                    source.close()

            return pump

        running = _Running(self.meeting, self._executors, {rank: drain(make) for rank, make in calls.items()})
        for future in running.futures.values():
            future.add_done_callback(lambda _: pieces.put(_DONE))
        left = len(calls)
        try:
            while left and not running.failures:
                piece = pieces.get()
                if piece is _DONE:
                    left -= 1
                else:
                    yield piece
        finally:
            stop.set()
            if left:
                self.meeting.abort("the stream was closed")
            running.wait()
            running.raise_first_error(closed=bool(left))

    def shutdown(self) -> None:
        for executor in self._executors:
            executor.shutdown(wait=False)


class _Running:
    """One call in progress on several ranks."""

    def __init__(
        self, meeting: Any, executors: list[ThreadPoolExecutor], calls: Mapping[int, Callable[[], Any]]
    ) -> None:
        self.failures: list[BaseException] = []  # in order of time; list.append is atomic
        self._meeting = meeting
        meeting.begin(calls.keys())
        self.futures: dict[int, Future[Any]] = {
            rank: executors[rank].submit(self._rank, rank, call) for rank, call in calls.items()
        }

    def _rank(self, rank: int, call: Callable[[], Any]) -> Any:
        try:
            value = call()
        except BaseException as error:
            self.failures.append(error)
            self._meeting.abort(f"rank {rank} failed: {error}")
            raise
        self._meeting.leave(rank)
        return value

    def wait(self) -> None:
        try:
            wait(self.futures.values())
        except BaseException:  # the user's Ctrl-C comes to the controller's thread only
            self._meeting.abort("the controller was interrupted")
            wait(self.futures.values())
            raise

    def raise_first_error(self, closed: bool = False) -> None:
        """The first failure that is not merely the echo of another one, or of closing the stream."""
        causes = [error for error in self.failures if not isinstance(error, CommAbortedError)]
        if causes or (self.failures and not closed):
            raise (causes or self.failures)[0]
