"""Ranks that are threads of this process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from verl.comm.base import Comm, CommAbortedError, CommError, check_src

if TYPE_CHECKING:
    import torch


class ThreadComm(Comm):
    """One rank of several that are threads of this process; make all of them with :meth:`create`.

    Sums are formed once, in rank order, and copied to every rank, so the bits depend neither on timing nor on the
    rank that looks. The ranks of one set share a :class:`Meeting`, through which a controller can end their waiting.
    """

    def __init__(self, rank: int, meeting: Meeting):
        self.rank = rank
        self.world_size = meeting.size
        self.meeting = meeting

    @staticmethod
    def create(world_size: int) -> list[ThreadComm]:
        """The comms of ranks 0 .. world_size - 1."""
        meeting = Meeting(world_size)
        return [ThreadComm(rank, meeting) for rank in range(world_size)]

    def all_reduce_sum(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copy_into(tensors, self.meeting.exchange(self.rank, "all_reduce_sum", list(tensors), _sum_in_rank_order))

    def all_gather_object(self, obj: Any) -> list[Any]:
        pickled = self.meeting.exchange(self.rank, "all_gather_object", pickle.dumps(obj), list)
        return [obj if rank == self.rank else pickle.loads(data) for rank, data in enumerate(pickled)]

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        check_src(src, self.world_size)

        def of_source(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            _check_same_shapes("broadcast", ranks)
            return [tensor.detach().clone() for tensor in ranks[src]]

        self._copy_into(tensors, self.meeting.exchange(self.rank, f"broadcast from {src}", list(tensors), of_source))

    def barrier(self) -> None:
        self.meeting.exchange(self.rank, "barrier", None, lambda ranks: None)

    def _copy_into(self, tensors: Sequence[torch.Tensor], values: list[torch.Tensor]) -> None:
        import torch

        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)


class Meeting:
    """Where threads meet: the last to arrive combines what all brought, and everybody gets the result.

    Nobody waits in vain: :meth:`abort` wakes all who wait, and so does :meth:`leave` of a rank for which they wait.
    """

    def __init__(self, size: int):
        self.size = size
        self._condition = threading.Condition()
        self._count = 0
        self._result: Any = None
        self.begin()

    def begin(self, ranks: Collection[int] | None = None) -> None:
        """Start afresh with these ranks taking part (default all). No rank may be inside :meth:`exchange`."""
        with self._condition:
            self._left = set(range(self.size)) - set(range(self.size) if ranks is None else ranks)
            self._arrived: dict[int, Any] = {}
            self._call = ""
            self._failure: CommError | None = None

    def abort(self, reason: str) -> None:
        """End every wait, now and until the next :meth:`begin`, with CommAbortedError."""
        with self._condition:
            self._fail(CommAbortedError(reason))

    def leave(self, rank: int) -> None:
        """This rank will make no more calls: whoever waits for it gets a CommError."""
        with self._condition:
            self._left.add(rank)
            if self._arrived:
                self._fail(CommError(self._absence()))

    def exchange(self, rank: int, call: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Wait for all ranks, then return ``combine(values in rank order)``, the same object for everybody."""
        with self._condition:
            if self._failure is None and self._arrived and call != self._call:
                self._fail(CommError(f"rank {rank} calls {call} while others are in {self._call}"))
            if self._failure is None and self._left:
                self._call, self._arrived[rank] = call, value
                self._fail(CommError(self._absence()))
            self._raise_failure()
            self._call, self._arrived[rank] = call, value
            if len(self._arrived) == self.size:
                self._complete(combine)
                return self._result
            count = self._count
            while self._count == count:
                self._raise_failure()
                self._condition.wait()
            return self._result

    def _complete(self, combine: Callable[[list[Any]], Any]) -> None:
        try:
            self._result = combine([self._arrived[rank] for rank in range(self.size)])
        except BaseException as error:
            self._fail(CommAbortedError(f"{self._call} failed: {error}"))
            raise
        self._arrived = {}
        self._count += 1
        self._condition.notify_all()

    def _absence(self) -> str:
        return f"rank(s) {sorted(self._arrived)} wait in {self._call} for rank(s) {sorted(self._left)}, which are done"

    def _fail(self, error: CommError) -> None:
        if self._failure is None:
            self._failure = error
        self._condition.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)


def _sum_in_rank_order(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    _check_same_shapes("all_reduce_sum", ranks)
    totals = [tensor.detach().clone() for tensor in ranks[0]]
    for tensors in ranks[1:]:
        for total, tensor in zip(totals, tensors, strict=True):
            total += tensor.detach()
    return totals


def _check_same_shapes(call: str, ranks: list[list[torch.Tensor]]) -> None:
    def kinds(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
        return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]

    for rank, tensors in enumerate(ranks):
        if kinds(tensors) != kinds(ranks[0]):
            raise CommError(f"{call}: rank 0 brings {kinds(ranks[0])}, rank {rank} brings {kinds(tensors)}")
