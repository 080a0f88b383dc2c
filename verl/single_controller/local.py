"""LocalWorkerGroup: the ranks of a program inside this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from verl.comm import SoloComm, ThreadComm
from verl.errors import ConfigError, DataflowError
from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base.decorator import Registration
from verl.single_controller.base.dispatch import Padding, Split, strip_padding
from verl.single_controller.base.resource_pool import ResourcePool
from verl.single_controller.base.worker import ClassWithInitArgs, Worker
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ranks import RankThreads, Turns, add_note


class LocalWorkerGroup(WorkerGroup):
    """``world_size`` workers in this process, behind the same split and collect as on a cluster.

    One rank runs in the caller's thread. Several ranks are simulated, a thread each, with collectives that work
    (:class:`verl.comm.ThreadComm`). Calls on one group are made one after the other, in the order of the calls.
    An error of a rank is raised as it is, with a note that names rank and method.

    Args:
        worker_cls: a Worker class, or a ClassWithInitArgs.
        args, kwargs: for the worker's ``__init__``, the same on every rank.
        world_size: the number of ranks, default that of ``resource_pool``, else 1.
        resource_pool: where the group lives.
    """

    def __init__(
        self,
        worker_cls: type[Worker] | ClassWithInitArgs,
        *args: Any,
        world_size: int | None = None,
        resource_pool: ResourcePool | None = None,
        **kwargs: Any,
    ):
        if isinstance(worker_cls, ClassWithInitArgs):
            args, kwargs = (*worker_cls.args, *args), {**worker_cls.kwargs, **kwargs}
            worker_cls = worker_cls.cls
        if not (isinstance(worker_cls, type) and issubclass(worker_cls, Worker)):
            raise ConfigError(f"a worker group is made of a Worker class, not of {worker_cls!r}")
        self.resource_pool = resource_pool or ResourcePool([1 if world_size is None else world_size])
        size = self.resource_pool.world_size if world_size is None else world_size
        if size != self.resource_pool.world_size:
            raise ConfigError(f"world_size={size} does not fit {self.resource_pool!r}: leave world_size out")
        super().__init__(worker_cls, size)
        self._turns = Turns()
        self._background: ThreadPoolExecutor | None = None
        self._pending: Future[Any] | None = None
        self._pending_lock = threading.Lock()
        comms = [SoloComm()] if size == 1 else ThreadComm.create(size)
        self._threads = None if size == 1 else RankThreads(comms)
        makers = {
            comm.rank: self._noted(comm.rank, "__init__", lambda comm=comm: worker_cls.create(comm, *args, **kwargs))
            for comm in comms
        }
        self.workers: list[Worker] = self._run(makers)

    def shutdown(self) -> None:
        """End the rank threads, after the calls that are already made."""
        if self._background is not None:
            self._background.shutdown(wait=True)
        if self._threads is not None:
            self._threads.shutdown()

    def _call(self, name: str, registration: Registration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if registration.streaming:
            self._wait_for_pending()
            split = self._split(name, registration, args, kwargs)
            if split.padding is not None and not split.padding.by_id:
                raise DataflowError(
                    f"{self._label(name)} streams over {self.world_size} ranks, which do not divide the rows: give "
                    "the batch a uid column, by which the added rows can be taken out again"
                )
            return self._stream(name, registration, split)
        if registration.blocking:
            self._wait_for_pending()
            return self._execute(name, registration, args, kwargs)
        with self._pending_lock:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix=f"{self.worker_cls.__name__}-calls")
            self._pending = self._background.submit(self._execute, name, registration, args, kwargs)
            return DataProtoFuture.of(self._pending)

    def _wait_for_pending(self) -> None:
        """Let the non-blocking calls made before be done first; their errors stay with their futures."""
        with self._pending_lock:
            pending = self._pending
        if pending is not None:
            wait([pending])

    def _execute(self, name: str, registration: Registration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        split = self._split(name, registration, args, kwargs)
        self._turns.take(self._label(name))
        try:
            outputs = self._run(self._rank_calls(name, registration, split))
        finally:
            self._turns.give_back()
        return self._collect(registration, split, outputs)

    def _run(self, calls: dict[int, Callable[[], Any]]) -> list[Any]:
        return [calls[0]()] if self._threads is None else self._threads.run(calls)

    def _rank_calls(self, name: str, registration: Registration, split: Split) -> dict[int, Callable[[], Any]]:
        def call_on(rank: int) -> Callable[[], Any]:
            def call() -> Any:
                worker = self.workers[rank]
                args, kwargs = split.of(rank)
                if registration.mode is not None:
                    worker.enter_mode(registration.mode)
                return getattr(worker, name)(*args, **kwargs)

            return self._noted(rank, name, call)

        return {rank: call_on(rank) for rank in self._ranks_of(registration)}

    def _noted(self, rank: int, name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        def noted() -> Any:
            try:
                return call()
            except Exception as error:
                add_note(error, self._place(rank, name))
                raise

        return noted

    def _place(self, rank: int, name: str) -> str:
        return f"in {self._label(name)} on rank {rank} of {self.world_size}"

    def _stream(self, name: str, registration: Registration, split: Split) -> Generator[Any, None, None]:
        def generator_on(rank: int, call: Callable[[], Any]) -> Callable[[], Generator[Any, None, None]]:
            def pieces() -> Generator[Any, None, None]:
                source = call()
                if not isinstance(source, Generator):
                    raise DataflowError(f"{self._label(name)} is registered as streaming, but returned {source!r:.80}")
                try:
                    yield from source
                except Exception as error:
                    add_note(error, self._place(rank, name))
                    raise

            return pieces

        calls = {rank: generator_on(rank, c) for rank, c in self._rank_calls(name, registration, split).items()}
        self._turns.take(self._label(name), streaming=True)
        try:
            source = calls[0]() if self._threads is None else self._threads.stream(calls)
            for piece in source:
                kept = _without_padding(piece, split.padding, self._label(name))
                if kept is not None:
                    yield kept
        finally:
            source.close()
            self._turns.give_back()


def _without_padding(piece: Any, padding: Padding | None, label: str) -> Any | None:
    """A piece without added rows; None if it had no others."""
    if padding is None or not isinstance(piece, DataProto):
        return piece
    if not {"uid", "sample_id"} & set(piece.non_tensor_batch):
        raise DataflowError(f"{label} gave a piece without uid or sample_id, so added rows cannot be told apart")
    kept = strip_padding(piece, padding)
    return kept if len(kept) or not len(piece) else None
