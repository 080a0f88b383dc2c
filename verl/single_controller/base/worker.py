"""Worker: one rank of a multi-controller program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.comm import Comm, SoloComm


class Worker:
    """Base class of SPMD code. ``rank``, ``world_size`` and ``comm`` are there before ``__init__`` runs.

    Made directly, a worker is the only rank; a worker group makes its workers with :meth:`create`.
    """

    comm: Comm = SoloComm()

    @classmethod
    def create(cls, comm: Comm, *args: Any, **kwargs: Any) -> Worker:
        """A worker for one rank of ``comm``."""
        worker = cls.__new__(cls)
        worker.comm = comm
        worker.__init__(*args, **kwargs)
        return worker

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    def enter_mode(self, mode: str) -> None:
        """Called before a method registered with this ``mode`` ("train" or "rollout"). Nothing to switch here."""

    def close(self) -> None:
        """Called when its group is shut down: end what it has started. Nothing here. It may be called twice."""


class ClassWithInitArgs:
    """A class and the arguments to make it with, later and elsewhere."""

    def __init__(self, cls: Callable[..., Any], *args: Any, **kwargs: Any):
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)
