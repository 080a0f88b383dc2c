"""Where a reward function runs, seen from the driver: a process of its own, or a thread where it cannot be sent."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.rewards.wire import QueueChannel, SocketChannel
from verl.rewards.worker import serve, serve_async

# The child gets the driver's import path as it is now, and never sees the driver's main script.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv.pop(1).split(sys.argv.pop(1)); parent, fd = map(int, sys.argv[1:]); "
    "del sys.argv[1:]; from verl.rewards.worker import main; main(fd, parent)"
)


class ProcessHost:
    """A worker process. Everything it started dies with it (it leads a process group of its own)."""

    pickled = True

    def __init__(self, packed: bytes, is_async: bool, take_first: bool, timeout_s: float | None):
        ours, theirs = socket.socketpair()
        with theirs:
            package_home = str(Path(__file__).resolve().parents[2])
            paths = [*(os.path.abspath(p) for p in sys.path), package_home]
            numbers = [str(os.getpid()), str(theirs.fileno())]
            command = [sys.executable, "-c", _BOOTSTRAP, os.pathsep.join(paths), os.pathsep, *numbers]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # Many workers share the cores: one thread each, unless the user decided otherwise.
                env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ},
            )
        self._channel = SocketChannel(ours)
        self._ending = threading.Lock()
        self._how: str | None = None
        with contextlib.suppress(OSError):  # it died at once: the first receive says so
            self._channel.send(("load", packed, is_async, take_first, timeout_s))

    def send(self, number: int, arguments: dict[str, Any]) -> None:
        """Start a call. Raises OSError when the process is gone; pickling errors pass through."""
        self._channel.send(("row", number, pickle.dumps(arguments, protocol=pickle.HIGHEST_PROTOCOL)))

    def receive(self, timeout_s: float | None) -> tuple[Any, ...] | None:
        """The worker's next message, None when it died. Raises TimeoutError."""
        return self._channel.receive(timeout_s)

    def end(self, *, died: bool = False) -> str:
        """Kill it with all that it started; says how it had ended if it was dead already.

        ``died``: its end of the stream is gone, so its exit code will be there in a moment.
        """
        with self._ending:
            if self._how is None:
                self._how = self._kill(patience_s=2.0 if died else 0.0)
            return self._how

    def _kill(self, patience_s: float) -> str:
        try:
            code: int | None = self._process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left in the group (EPERM: macOS)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()
        if code is None:
            return "was ended"
        return f"died of signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with code {code}"


class ThreadHost:
    """A thread of the driver. It cannot be ended: ``end`` abandons it, and its late answers go nowhere."""

    pickled = False

    def __init__(self, fn: Callable[..., Any], is_async: bool, finish: Callable[[Any], Any], timeout_s: float | None):
        self._channel, theirs = QueueChannel.pair()
        run = serve_async if is_async else serve
        theirs.send(("ready",))
        threading.Thread(
            target=run, args=(theirs, fn, timeout_s, finish), kwargs={"pickled": False}, daemon=True, name="verl-reward"
        ).start()

    def send(self, number: int, arguments: dict[str, Any]) -> None:
        self._channel.send(("row", number, arguments))

    def receive(self, timeout_s: float | None) -> tuple[Any, ...] | None:
        return self._channel.receive(timeout_s)

    def end(self, *, died: bool = False) -> str:
        self._channel.close()
        return "was abandoned"
