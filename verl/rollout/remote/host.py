"""The process in which an engine runs: ``python -m verl.rollout.remote.host FD ADAPTER`` over a connected socket.

ADAPTER is the module whose class ``Adapter`` drives the engine. The trainer sends (command, arguments) and gets (kind,
value): ``ready`` once, ``done`` with finished responses as they come, ``reply`` to a command that has an answer,
``failed`` with one line before the process ends. The trainer's end of the socket closing, however it came about, ends
the process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil


class _TrainerIsGone(Exception):
    pass


class Host:
    """Takes commands and steps the engine while there is work."""

    def __init__(self, connection: Connection, adapter: Callable[..., Any]):
        self.connection = connection
        self.closing = False
        command, arguments = self._receive()
        assert command == "start", command
        self.adapter = adapter(**arguments)
        self._send("ready", {"max_model_len": self.adapter.max_model_len})

    def run(self) -> None:
        while not self.closing:
            while not self.closing and self.connection.poll(0 if self.adapter.busy else None):
                command, value = self._receive()
                getattr(self, f"_on_{command}")(value)
            if self.adapter.busy and not self.closing:
                self._hand_over(self.adapter.step())

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            raise _TrainerIsGone from None

    def _send(self, kind: str, value: Any) -> None:
        try:
            self.connection.send((kind, value))
        except ConnectionError:
            raise _TrainerIsGone from None

    def _hand_over(self, done: list) -> None:
        if done:
            self._send("done", done)

    def _on_submit(self, requests: list) -> None:
        for request in requests:
            self.adapter.add(request)

    def _on_abort(self, ids: list[str] | None) -> None:
        self._hand_over(self.adapter.abort(ids))

    def _on_open_weights(self, table: list[tuple]) -> None:
        self._send("reply", self.adapter.open_weights(table))

    def _on_load_weights(self, _: None) -> None:
        self._send("reply", self.adapter.load_weights())

    def _on_sleep(self, _: None) -> None:
        self._send("reply", self.adapter.sleep())

    def _on_wake(self, tags: list[str]) -> None:
        self._send("reply", self.adapter.wake(tags))

    def _on_close(self, _: None) -> None:
        self.closing = True


def serve(connection: Connection, adapter: Callable[..., Any]) -> int:
    """Until told to close, or the engine fails; the exit code."""
    try:
        Host(connection, adapter).run()
    except _TrainerIsGone:
        return 0
    except BaseException as error:  # whatever ends the engine, the trainer is told why
        traceback.print_exc()
        connection.send(("failed", f"{type(error).__name__}: {_last_line(error)}"))
        return 1
    return 0


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else "no message"


if __name__ == "__main__":
    code = serve(Connection(int(sys.argv[1])), importlib.import_module(sys.argv[2]).Adapter)
    sys.stdout.flush()
    sys.stderr.flush()
    # the engine's threads must not hold the end up, and its workers must not outlive it
    for worker in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    os._exit(code)
