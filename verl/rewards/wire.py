"""Messages between the driver and what runs reward functions: tuples, over a socket or between two threads.

A message to a worker is ``("load", packed function, timeout)`` or ``("row", number, pickled arguments)``; a worker
answers ``("ready",)``, ``("unloadable", text)``, ``("done", number, seconds, value)``, ``("late", number)`` or
``("again", number)``. The end of the stream is ``None``. Imported by worker processes: no torch here.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import queue
import select
import socket
import struct
import threading
import time
from typing import Any, Protocol

# A worker whose interpreter is held by C code does not read; a full socket must not hold up the driver for ever.
_SEND_LIMIT_S = 30.0
_LENGTH = struct.Struct("!Q")


class Channel(Protocol):
    """One end of a two-way stream of messages."""

    def send(self, message: tuple[Any, ...]) -> None:
        """Raises OSError when the other end is gone or does not read."""

    def receive(self, timeout_s: float | None = None) -> tuple[Any, ...] | None:
        """The next message, or None at the end of the stream. Raises TimeoutError when none came in time."""

    def close(self) -> None: ...


class SocketChannel:
    """Length-prefixed pickles. A message that has arrived in part stays in the buffer over a time-out.

    One thread may send while another receives, so the socket's time-out is never changed: a ``recv`` that begins as
    another thread calls ``settimeout`` asks the kernel again and again, without a pause, for as long as it waits.
    """

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._sock.settimeout(_SEND_LIMIT_S)
        self._buffer = bytearray()
        self._writing = threading.Lock()

    def send(self, message: tuple[Any, ...]) -> None:
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._writing:
            self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, timeout_s: float | None = None) -> tuple[Any, ...] | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            body = self._complete_message()
            if body is not None:
                return pickle.loads(body)
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            try:
                if not self._readable(remaining):
                    raise TimeoutError
                data = self._sock.recv(1 << 20)
            except TimeoutError:
                raise
            except (OSError, ValueError):  # reset by the peer, or closed by another thread of ours
                return None
            if not data:
                return None
            self._buffer += data

    def _readable(self, timeout_s: float | None) -> bool:
        """Wait for something to read, or for the end of the stream. ValueError if the socket is closed."""
        waiting = select.poll()
        waiting.register(self._sock.fileno(), select.POLLIN)
        return bool(waiting.poll(None if timeout_s is None else math.ceil(1000 * timeout_s)))

    def _complete_message(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end may be gone already
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that is reading
        self._sock.close()


class QueueChannel:
    """The same between two threads of one process; nothing is copied."""

    def __init__(self, inbox: queue.SimpleQueue[Any], outbox: queue.SimpleQueue[Any]):
        self._inbox, self._outbox = inbox, outbox

    @staticmethod
    def pair() -> tuple[QueueChannel, QueueChannel]:
        one: queue.SimpleQueue[Any] = queue.SimpleQueue()
        two: queue.SimpleQueue[Any] = queue.SimpleQueue()
        return QueueChannel(one, two), QueueChannel(two, one)

    def send(self, message: tuple[Any, ...]) -> None:
        self._outbox.put(message)

    def receive(self, timeout_s: float | None = None) -> tuple[Any, ...] | None:
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """The end of the stream for both sides."""
        self._outbox.put(None)
        self._inbox.put(None)
