"""A long-lived pool of hosts: calls go in, outcomes come out as futures, and no call can hold up another.

Every slot (:mod:`verl.rewards.slot`) is a thread that owns one host, and takes calls from here.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from verl.errors import RewardError
from verl.rewards.hosts import ProcessHost, ThreadHost
from verl.rewards.slot import Call, Outcome, Slot


class CallPool:
    """Runs calls of one function on ``slots`` hosts, each call under ``timeout_s`` seconds (None: no limit).

    ``make_host`` starts a host; ``calls_per_host`` is how many calls one host may hold at once (above 1 only for async
    functions). Hosts start at once, in the background. ``submit`` never blocks. ``close`` ends every host; futures
    that are still open then fail.
    """

    def __init__(
        self,
        make_host: Callable[[], ProcessHost | ThreadHost],
        *,
        slots: int,
        timeout_s: float | None,
        calls_per_host: int = 1,
    ):
        self.timeout_s = timeout_s
        self.calls_per_host = calls_per_host
        self.load_error: str | None = None
        self._make_host = make_host
        self._condition = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._again: deque[Call] = deque()
        self._hosts: set[ProcessHost | ThreadHost] = set()
        self._closed = False
        self._threads = [
            threading.Thread(target=Slot(self).run, daemon=True, name=f"verl-reward-slot-{k}") for k in range(slots)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def submit(self, arguments: dict[str, Any]) -> Future[Outcome]:
        """Queue one call. Raises :class:`RewardError` after :meth:`close`."""
        call = Call(arguments)
        with self._condition:
            if self._closed:
                raise closed_error()
            self._waiting.append(call)
            self._condition.notify()
        return call.future

    def close(self) -> None:
        """End all hosts and fail what is still open. May be called twice."""
        with self._condition:
            self._closed = True
            left = [*self._waiting, *self._again]
            self._waiting.clear()
            self._again.clear()
            self._condition.notify_all()
            hosts = list(self._hosts)
        for host in hosts:
            host.end()
        for call in left:
            call.future.set_exception(closed_error())
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
        atexit.unregister(self.close)

    @property
    def closed(self) -> bool:
        return self._closed

    def take(self, busy: bool) -> Call | None:
        """The next call for a slot. A slot that is not ``busy`` waits for one, and may get one to be tried alone."""
        with self._condition:
            while not self._closed:
                if not busy and self._again:
                    return self._again.popleft()
                if self._waiting:
                    return self._waiting.popleft()
                if busy:
                    return None
                self._condition.wait()
        return None

    def try_alone(self, call: Call) -> None:
        """Put back a call whose host was lost together with other calls."""
        call.alone = True
        with self._condition:
            if not self._closed:
                self._again.append(call)
                self._condition.notify()
                return
        call.future.set_exception(closed_error())

    def start_host(self) -> ProcessHost | ThreadHost | None:
        """A new host, or None when the pool was closed meanwhile."""
        with self._condition:
            if self._closed:
                return None
            host = self._make_host()
            self._hosts.add(host)
            return host

    def end_host(self, host: ProcessHost | ThreadHost, *, died: bool = False) -> str:
        """End a host and say how it ended. ``died``: it was seen to go by itself, so its exit code is waited for."""
        with self._condition:
            self._hosts.discard(host)
        return host.end(died=died)


def closed_error() -> RewardError:
    return RewardError("the reward runner was closed: make a new one to score again")
