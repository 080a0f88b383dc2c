"""RayWorkerGroup: the ranks of a program as processes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from verl.errors import ConfigError
from verl.single_controller.base.decorator import Registration
from verl.single_controller.base.dispatch import Split
from verl.single_controller.base.worker import ClassWithInitArgs, Worker
from verl.single_controller.calls import OrderedWorkerGroup
from verl.single_controller.ray.hosts import HostSet
from verl.single_controller.ray.pool import RayResourcePool
from verl.single_controller.ray.wire import Packed, pack


class RayWorkerGroup(OrderedWorkerGroup):
    """One process a rank, behind the same split and collect as :class:`verl.single_controller.LocalWorkerGroup`.

    Ranks talk through a torch.distributed process group (``worker.comm``), which roles in the same processes share.
    An error of a rank is raised as it is, with a note that names rank and method and its traceback as cause. When a
    process dies, or a rank waits for one that has failed, all processes are ended and the error says which and where.

    Args:
        worker_cls: a Worker class, or a ClassWithInitArgs.
        args, kwargs: for the worker's ``__init__``, the same on every rank.
        role: its name among the roles in the same processes; default the class's.
        world_size: the number of ranks, default that of ``resource_pool``, else 1.
        resource_pool: where the group lives; default a pool of its own.
        hosts: processes of a pool that are there already.
    """

    def __init__(
        self,
        worker_cls: type[Worker] | ClassWithInitArgs,
        *args: Any,
        role: str | None = None,
        world_size: int | None = None,
        resource_pool: RayResourcePool | None = None,
        hosts: HostSet | None = None,
        **kwargs: Any,
    ):
        if isinstance(worker_cls, ClassWithInitArgs):
            args, kwargs = (*worker_cls.args, *args), {**worker_cls.kwargs, **kwargs}
            worker_cls = worker_cls.cls
        if not (isinstance(worker_cls, type) and issubclass(worker_cls, Worker)):
            raise ConfigError(f"a worker group is made of a Worker class, not of {worker_cls!r}")
        if hosts is None:
            self.resource_pool = resource_pool or RayResourcePool([1 if world_size is None else world_size])
            hosts = self.resource_pool.host_set()
        else:
            self.resource_pool = hosts.pool
        if world_size is not None and world_size != hosts.world_size:
            raise ConfigError(f"world_size={world_size} does not fit {self.resource_pool!r}: leave world_size out")
        super().__init__(worker_cls, hosts.world_size, hosts.turns)
        self.hosts = hosts
        self.role = role or worker_cls.__name__
        hosts.join(self.role, pack((worker_cls, args, kwargs)), worker_cls.__name__)

    def shutdown(self) -> None:
        """Take the role out of its processes, which end with their last role."""
        if self.hosts.failure is None:
            super().shutdown()
        self.hosts.leave(self.role)

    def _run_ranks(self, name: str, registration: Registration, split: Split) -> list[Any]:
        packed = self._packed(registration, split)
        return self.hosts.call(self.role, self._label(name), name, registration.mode, packed)

    def _stream_ranks(self, name: str, registration: Registration, split: Split) -> Generator[Any, None, None]:
        packed = self._packed(registration, split)
        return self.hosts.stream(self.role, self._label(name), name, registration.mode, packed)

    def _packed(self, registration: Registration, split: Split) -> dict[int, Packed]:
        """Every rank's arguments; one message where all ranks get the same objects."""
        ranks = self._ranks_of(registration)
        values = [*split.args, *split.kwargs.values()]
        if all(value[rank] is value[ranks[0]] for value in values for rank in ranks):
            return dict.fromkeys(ranks, pack(split.of(ranks[0])))
        return {rank: pack(split.of(rank)) for rank in ranks}
