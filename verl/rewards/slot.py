"""One slot of the pool: a thread that owns one host and answers for every call that it gave to it.

A call's limit runs from the moment the host has it; starting the host and importing the user's module do not count.
The host of a call that overran is killed and replaced. A host that is lost while several async calls were in it does
not say which one was to blame, so each of them is tried again alone.
"""

from __future__ import annotations

import itertools
import math
import pickle
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.rewards.hosts import ProcessHost, ThreadHost

if TYPE_CHECKING:
    from verl.rewards.pool import CallPool

_LOAD_LIMIT_S = 300.0
_LOAD_ATTEMPTS = 3
# An async call is ended by its own timer; only when its loop is blocked must the driver end the host, this much later.
_ASYNC_GRACE_S = 0.5
# How often a slot with room for more async calls looks for new ones while it waits for answers.
_POLL_S = 0.02


@dataclass
class Outcome:
    """How one call ended: the worker's ``value``, or an ``error`` text with the cause in its last line."""

    value: Any = None
    error: str | None = None
    timed_out: bool = False
    seconds: float = 0.0


@dataclass
class Call:
    """One call on its way. ``alone`` marks a second try on a host that holds nothing else."""

    arguments: dict[str, Any]
    future: Future[Outcome] = field(default_factory=Future)
    sent: float = 0.0
    alone: bool = False


class Slot:
    def __init__(self, pool: CallPool):
        self._pool = pool
        self._host: ProcessHost | ThreadHost | None = None
        self._running: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._is_async = pool.calls_per_host > 1
        self._limit_s = math.inf if pool.timeout_s is None else pool.timeout_s
        if self._is_async:
            self._limit_s += _ASYNC_GRACE_S

    def run(self) -> None:
        while not self._pool.closed:
            if self._host is None and self._pool.load_error is None:
                self._host = self._start()
            self._fill()
            if self._running:
                self._listen()
        self._lose()

    def _start(self) -> ProcessHost | ThreadHost | None:
        """A host that has loaded the function; None when the pool closed or the function cannot be loaded."""
        reason = ""
        for _ in range(_LOAD_ATTEMPTS):
            try:
                host = self._pool.start_host()
            except OSError as error:  # no more processes or files
                reason = f"a worker process cannot be started: {type(error).__name__}: {error}"
                continue
            if host is None:
                return None
            try:
                message = host.receive(_LOAD_LIMIT_S)
            except TimeoutError:
                self._pool.end_host(host)
                reason = f"loading the reward function took more than {_LOAD_LIMIT_S:.0f} s"
                continue
            if message == ("ready",):
                return host
            how = self._pool.end_host(host, died=message is None)
            if message is not None:
                reason = f"the reward function cannot be loaded in a worker process:\n{message[1]}"
                break
            reason = f"a worker process {how} while loading the reward function"
        if not self._pool.closed:
            self._pool.load_error = reason
        return None

    def _fill(self) -> None:
        while len(self._running) < self._pool.calls_per_host:
            if any(call.alone for call in self._running.values()):
                return
            call = self._pool.take(busy=bool(self._running))
            if call is None:
                return
            if not call.alone and not call.future.set_running_or_notify_cancel():
                continue
            if self._pool.load_error is not None:
                self._finish(call, error=self._pool.load_error)
            elif self._host is None:  # the pool was closed while this slot waited for a host
                self._pool.try_alone(call)
                return
            elif not self._send(call):
                return

    def _send(self, call: Call) -> bool:
        """Give the call to the host; False when the host turned out to be dead."""
        number = next(self._numbers)
        call.sent = time.monotonic()
        try:
            self._host.send(number, call.arguments)
        except OSError:
            # It died with nothing to do, so this call is not to blame the first time.
            self._running[number] = call
            self._lose(died=True, blame=call.alone)
            return False
        except Exception as error:  # pickling runs code of any class in the row
            self._finish(call, error=f"the row cannot be sent to a worker process: {type(error).__name__}: {error}")
            return True
        self._running[number] = call
        return True

    def _listen(self) -> None:
        first_deadline = min(call.sent for call in self._running.values()) + self._limit_s
        wait = None if math.isinf(first_deadline) else max(first_deadline - time.monotonic(), 0.0)
        has_room = self._is_async and len(self._running) < self._pool.calls_per_host
        try:
            message = self._host.receive(_POLL_S if has_room and (wait is None or wait > _POLL_S) else wait)
        except TimeoutError:
            if time.monotonic() >= first_deadline:
                self._lose(timed_out=True)
            return
        if message is None:
            self._lose(died=True)
        else:
            self._answer(*message)

    def _answer(self, kind: str, number: int, seconds: float = 0.0, value: Any = None) -> None:
        call = self._running.pop(number)
        if kind == "late" or (kind == "again" and call.alone):
            self._finish(call, error=self._timeout_text(), timed_out=True)
        elif kind == "again":
            self._pool.try_alone(call)
        elif self._host.pickled:
            try:
                answer = pickle.loads(value)
            except Exception as error:  # a class that only the worker can import
                self._finish(call, error=f"the result cannot be read here: {type(error).__name__}: {error}")
            else:
                self._finish(call, value=answer, seconds=seconds)
        else:
            self._finish(call, value=value, seconds=seconds)

    def _lose(self, *, died: bool = False, timed_out: bool = False, blame: bool = True) -> None:
        """End the host, unless it died by itself. Its only call failed; of several, each is tried again alone."""
        how = self._pool.end_host(self._host, died=died) if self._host is not None else ""
        self._host = None
        calls = list(self._running.values())
        self._running.clear()
        for call in calls:
            if len(calls) > 1 or not blame or self._pool.closed:
                self._pool.try_alone(call)
            elif timed_out:
                self._finish(call, error=self._timeout_text(), timed_out=True)
            else:
                self._finish(call, error=f"the worker process {how} while it scored this row")

    def _timeout_text(self) -> str:
        return f"TimeoutError: no result after {self._pool.timeout_s:g} s"

    def _finish(self, call: Call, **outcome: Any) -> None:
        outcome.setdefault("seconds", time.monotonic() - call.sent if call.sent else 0.0)
        call.future.set_result(Outcome(**outcome))
