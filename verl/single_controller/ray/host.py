"""RankHost: the process of one rank. It holds a worker of every role that lives in it."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl.comm import Comm, SoloComm, TorchDistComm, init_process_group_from, open_store
from verl.notices import add_sink
from verl.single_controller.ray.wire import Packed, pack, unpack

ENVIRONMENT = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "NCCL_", "GLOO_", "VERL_", "OMP_", "MKL_", "PYTORCH_", "TORCH_")
"""Variables with these beginnings go from the controller's environment to the ranks'."""


@dataclass(frozen=True)
class HostSettings:
    """What every process of a pool is started with.

    Attributes:
        device: "cuda" or "cpu".
        timeout_s: for meeting, and for each collective.
        log_folder: where each rank's output goes; None: a temporary folder.
        setup: called first in every process with (rank, processes on its node).
        environment: variables of the controller.
    """

    device: str = "cpu"
    timeout_s: float = 600.0
    log_folder: str | None = None
    setup: Callable[[int, int], None] | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: passed_on(os.environ))


class Place(NamedTuple):
    """Where a rank lives. ``log``: the file with its output, on its node."""

    host: str
    address: str
    node_id: str
    pid: int
    log: str


class Look(NamedTuple):
    """Attributes:
    doing: the call in progress.
    waiting_in: the collective in which it waits for other ranks; ``calls``: its number.
    stack: where it is in Python.
    """

    doing: str | None
    waiting_in: str | None
    calls: int
    stack: str


class Reply(NamedTuple):
    """What a rank answers. ``kind``: value, piece or error; ``notices`` are those of the call."""

    kind: str
    value: Packed
    notices: list[str]


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(ENVIRONMENT)}


class RankHost:
    """Methods are called by Ray: those about work in one thread, one after the other; those of control beside them.

    Errors of workers are answers, not exceptions: they arrive as they are, with their traceback as a note.
    """

    def __init__(self, name: str, log_folder: str | None, rank: int, local_rank: int, sizes: tuple[int, int]):
        self.rank, self.local_rank = rank, local_rank
        self.world_size, self.local_size = sizes
        self.log = _redirect_output(log_folder, name, rank)
        self.comm: Comm = SoloComm()
        self.workers: dict[str, Any] = {}
        self._store: Any = None
        self._notices: list[str] = []
        self._thread: int | None = None
        self._doing: str | None = None
        self._stopped: set[int] = set()
        faulthandler.enable(all_threads=True)
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    # ---- starting --------------------------------------------------------------------------------------------------

    def place(self) -> Place:
        import ray

        return Place(
            socket.gethostname(),
            ray.util.get_node_ip_address(),
            ray.get_runtime_context().get_node_id(),
            os.getpid(),
            self.log,
        )

    def meeting_place(self) -> tuple[str, int]:
        """Rank 0's address and a free port, on which it listens from now on."""
        self._store = open_store(self.place().address)
        return self.place().address, self._store.port

    def start(self, address: str, port: int, paths: tuple[str, ...], packed: Packed) -> Reply:
        """Prepare this process by its HostSettings, and meet the other ranks.

        ``paths`` are the controller's, so that what it could import is found here too.
        """

        def body() -> None:
            sys.path.extend(path for path in paths if path not in sys.path)
            settings: HostSettings = unpack(packed)
            os.environ.update(settings.environment)
            os.environ.update(self._rank_environment(settings, address, port))
            add_sink(self._notices.append)
            if settings.device == "cuda":
                import torch

                torch.cuda.set_device(0)  # Ray lets each process see its own device only
            if settings.setup is not None:
                settings.setup(self.rank, self.local_size)
            if self.world_size > 1:
                self.comm = init_process_group_from(
                    self.rank, self.world_size, address, port, settings.device, settings.timeout_s, self._store
                )

        return self._answer("start", body)

    def _rank_environment(self, settings: HostSettings, address: str, port: int) -> dict[str, str]:
        own_device = settings.device == "cuda"  # the only visible one has the number 0
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": "0" if own_device else str(self.local_rank),
            "LOCAL_WORLD_SIZE": "1" if own_device else str(self.local_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }

    def create(self, role: str, packed: Packed) -> Reply:
        """Make the worker of a role from (class, args, kwargs)."""

        def body() -> None:
            worker_cls, args, kwargs = unpack(packed)
            self.workers[role] = worker_cls.create(self.comm, *args, **kwargs)

        return self._answer(f"{role}.__init__", body)

    def drop(self, role: str) -> None:
        """Close a role's worker and forget it."""
        worker = self.workers.pop(role, None)
        if worker is not None:
            worker.close()

    # ---- work ------------------------------------------------------------------------------------------------------

    def call(self, role: str, name: str, mode: str | None, packed: Packed) -> Reply:
        return self._answer(f"{role}.{name}", lambda: self._method(role, name, mode, packed))

    def stream(self, number: int, role: str, name: str, mode: str | None, packed: Packed) -> Iterator[Reply]:
        """Pieces as they come, until the end or until :meth:`stop_stream` names this ``number``."""
        source: Any = None

        def opened() -> None:
            nonlocal source
            source = self._method(role, name, mode, packed)
            if not isinstance(source, Generator):
                from verl.single_controller.calls import not_a_stream

                raise not_a_stream(f"{type(self.workers[role]).__name__}.{name}", source)

        label = f"{role}.{name}"
        reply = self._answer(label, opened)
        if reply.kind == "error":
            yield reply
            return
        while number not in self._stopped:
            reply = self._answer(label, lambda: next(source, _END), kind="piece")
            if reply.kind == "end":
                return
            yield reply
            if reply.kind == "error":
                return
        reply = self._answer(label, source.close)
        if reply.kind == "error":
            yield reply

    def _method(self, role: str, name: str, mode: str | None, packed: Packed) -> Any:
        args, kwargs = unpack(packed)
        worker = self.workers[role]
        if mode is not None:
            worker.enter_mode(mode)
        return getattr(worker, name)(*args, **kwargs)

    def _answer(self, doing: str, body: Callable[[], Any], kind: str = "value") -> Reply:
        self._thread, self._doing = threading.get_ident(), doing
        try:
            value = body()
            if value is _END:
                kind, value = "end", None
            packed = pack(value)
        except Exception as error:
            kind, packed = "error", _pack_error(error)
            traceback.print_exc()  # into the log of this rank
        finally:
            self._doing = None
            sys.stdout.flush()
        told, self._notices[:] = list(self._notices), []
        return Reply(kind, packed, told)

    # ---- control ---------------------------------------------------------------------------------------------------

    def stop_stream(self, number: int) -> None:
        """End a stream at its next piece."""
        self._stopped.add(number)

    def look(self) -> Look:
        """What this rank does just now."""
        frame = sys._current_frames().get(self._thread or 0)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        if isinstance(self.comm, TorchDistComm):
            return Look(self._doing, self.comm.waiting_in, self.comm.calls, stack)
        return Look(self._doing, None, 0, stack)


_END = object()


def _pack_error(error: Exception) -> Packed:
    """The error with where it was raised; one that cannot travel becomes a RuntimeError with its text."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error.__cause__ = error.__context__ = None
    try:
        packed = pack((error, trace))
        unpack(packed)
    except Exception:
        packed = pack((RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return packed


def _redirect_output(folder: str | None, name: str, rank: int) -> str:
    """Let everything that this process prints go to a file of its own, if there is a folder; the file's path."""
    if folder is None:
        return os.path.realpath("/proc/self/fd/1")  # the file of Ray's session
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"{name}-rank{rank}.log"
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    return str(path)
