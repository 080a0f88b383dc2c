"""The process in which an engine runs, seen from the trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from verl.errors import RolloutError

RESUME = "Run the same command again to go on from the last checkpoint."


@dataclass(frozen=True)
class Program:
    """What runs in the process.

    Attributes:
        title: of the engine, for people.
        adapter: the module whose ``Adapter`` the host drives.
        variables: environment variables, where the user has not set them.
        module: run with ``python -m``; another one serves tests.
    """

    title: str
    adapter: str
    variables: Mapping[str, str] = field(default_factory=dict)
    module: str = "verl.rollout.remote.host"


class EngineProcess:
    """Starts the process and talks to it. It ends with this object, with this process, or when told to.

    Args:
        environment: variables for the process, over this process's own.
    """

    def __init__(self, program: Program, environment: Mapping[str, str] | None = None):
        self.title = program.title
        self._folder = tempfile.TemporaryDirectory(prefix="verl-rollout-", ignore_cleanup_errors=True)
        self.log = Path(self._folder.name) / "engine.log"
        ours, theirs = socket.socketpair()
        # imports must find what this process finds, and no main module is run again as multiprocessing would
        paths = [str(Path(entry or ".").resolve()) for entry in sys.path]
        found = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        variables = {**program.variables, **os.environ, **found, **(environment or {})}
        with self.log.open("wb") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program.module, str(theirs.fileno()), program.adapter],
                pass_fds=[theirs.fileno()],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the trainer's; the whole group can be ended at once
            )
        self.connection = Connection(ours.detach())
        self._end = weakref.finalize(self, _end, self.process, self.connection, self._folder)

    @property
    def folder(self) -> Path:
        """A folder that lives as long as this object."""
        return Path(self._folder.name)

    def send(self, command: str, value: Any = None) -> None:
        try:
            self.connection.send((command, value))
        except ConnectionError:
            raise self._died() from None

    def receive(self, timeout_s: float | None) -> tuple[str, Any] | None:
        """The next message, or None if there is none in time.

        Raises:
            RolloutError: the engine failed, or its process is gone.
        """
        try:
            if not self.connection.poll(timeout_s):
                return None
            kind, value = self.connection.recv()
        except (EOFError, ConnectionError):
            raise self._died() from None
        if kind == "failed":
            raise RolloutError(f"{self.title} failed: {value} {self._kept_log()}{RESUME}")
        return kind, value

    def call(self, command: str, value: Any = None) -> Any:
        """Send a command and wait for its reply. Nothing may be being generated."""
        self.send(command, value)
        return self.expect("reply")

    def expect(self, kind: str) -> Any:
        message = self.receive(None)
        assert message is not None and message[0] == kind, message
        return message[1]

    def close(self) -> None:
        """End the process and its group."""
        self._end()

    def _died(self) -> RolloutError:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RolloutError(f"The {self.title} process {how} in the middle of the run. {self._kept_log()}{RESUME}")

    def _kept_log(self) -> str:
        """Copies the log to where it outlives this object; what to say of it."""
        text = self.log.read_text(errors="replace")
        if not text.strip():
            return ""
        descriptor, path = tempfile.mkstemp(prefix="verl-rollout-", suffix=".log")
        with os.fdopen(descriptor, "w") as kept:
            kept.write(text)
        return f"Its log is in {path}. "


def _end(process: subprocess.Popen, connection: Connection, folder: tempfile.TemporaryDirectory) -> None:
    with contextlib.suppress(OSError):  # it is gone already
        connection.send(("close", None))
    connection.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # workers that it left
    folder.cleanup()
