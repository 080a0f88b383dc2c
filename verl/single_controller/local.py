"""LocalWorkerGroup: the ranks of a program inside this process."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from verl.comm import SoloComm, ThreadComm
from verl.errors import ConfigError
from verl.single_controller.base.decorator import Registration
from verl.single_controller.base.dispatch import Split
from verl.single_controller.base.resource_pool import ResourcePool
from verl.single_controller.base.worker import ClassWithInitArgs, Worker
from verl.single_controller.calls import OrderedWorkerGroup, not_a_stream
from verl.single_controller.ranks import RankThreads, add_note


class LocalWorkerGroup(OrderedWorkerGroup):
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
        comms = [SoloComm()] if size == 1 else ThreadComm.create(size)
        self._threads = None if size == 1 else RankThreads(comms)
        makers = {
            comm.rank: self._noted(comm.rank, "__init__", lambda comm=comm: worker_cls.create(comm, *args, **kwargs))
            for comm in comms
        }
        self.workers: list[Worker] = self._run(makers)

    def shutdown(self) -> None:
        """Close the workers and end the rank threads, after the calls that are already made."""
        super().shutdown()
        for worker in self.workers:
            worker.close()
        if self._threads is not None:
            self._threads.shutdown()

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

    def _run_ranks(self, name: str, registration: Registration, split: Split) -> list[Any]:
        return self._run(self._rank_calls(name, registration, split))

    def _stream_ranks(self, name: str, registration: Registration, split: Split) -> Generator[Any, None, None]:
        def generator_on(rank: int, call: Callable[[], Any]) -> Callable[[], Generator[Any, None, None]]:
            def pieces() -> Generator[Any, None, None]:
                source = call()
                if not isinstance(source, Generator):
                    raise not_a_stream(self._label(name), source)
                try:
                    yield from source
                except Exception as error:
                    add_note(error, self._place(rank, name))
                    raise

            return pieces

        calls = {rank: generator_on(rank, c) for rank, c in self._rank_calls(name, registration, split).items()}
        return calls[0]() if self._threads is None else self._threads.stream(calls)
