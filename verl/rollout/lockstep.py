"""An engine that several ranks drive together, each with its part of the model.

All ranks of a group must run the same forwards on the same rows. So each submits the requests of all ranks, in the same
order, and what the engine decides then (which rows are computed next, preempted, finished) is the same everywhere: it
depends on requests and seeds alone. A rank gets back the completions of its own requests.

Ranks meet at every :meth:`LockstepEngine.poll`: a small sum tells whether one of them has new requests, or is done.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from verl.comm import Comm
from verl.errors import RolloutError
from verl.metrics import Metrics
from verl.rollout.base import Completion, Request, RolloutEngine
from verl.rollout.native import NativeEngine


class LockstepEngine(RolloutEngine):
    """See :class:`~verl.rollout.base.RolloutEngine`.

    Args:
        inner: this rank's engine.
        comm: the ranks of the group. All of them poll until they are done, and :meth:`release` together.
    """

    meets_others = True

    def __init__(self, inner: RolloutEngine, comm: Comm):
        self.inner, self.comm = inner, comm
        self.name = inner.name
        self._new: list[Request] = []
        self._aborted: list[str] = []
        self._mine: set[str] = set()  # not returned yet
        self._failed = False
        if isinstance(inner, NativeEngine):
            inner.least = lambda pages: min(comm.all_gather_object(pages))

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        self._new += requests
        self._mine.update(request.id for request in requests)

    @property
    def pending(self) -> int:
        """This rank's own."""
        return len(self._mine)

    def abort(self, ids: Iterable[str] | None = None) -> None:
        self._aborted += self._mine if ids is None else ids

    def written(self) -> Iterator[tuple[str, list[int], list[float]]]:
        own = f"{self.comm.rank}:"
        for name, tokens, log_probs in self.inner.written():
            if name.startswith(own):
                yield name.removeprefix(own), tokens, log_probs

    def weights_changed(self) -> None:
        self.inner.weights_changed()

    def poll(self) -> list[Completion]:
        return self._step(leaving=False)[0]

    def release(self) -> None:
        """Work for the other ranks until all are done, then give the memory back."""
        self.abort()
        while not self._failed and self._step(leaving=True)[1]:
            pass
        if self.inner.pending:  # after a failure
            self.inner.abort()
            self.inner.poll()
        self.inner.release()

    def close(self) -> None:
        self.inner.close()

    def take_metrics(self) -> Metrics:
        """What was measured, once for the group."""
        metrics = self.inner.take_metrics()
        return metrics if self.comm.rank == 0 else Metrics()

    def _step(self, *, leaving: bool) -> tuple[list[Completion], bool]:
        """Meet the others and work; what finished of this rank's, and whether some rank has more to do."""
        try:
            stay = self._meet(leaving)
            finished = self.inner.poll() if self.inner.pending else []
        except BaseException:
            self._failed = True  # the others may be elsewhere: nobody is waited for any more
            raise
        own, mine = f"{self.comm.rank}:", []
        for done in finished:
            if done.request_id.startswith(own):
                done.request_id = done.request_id.removeprefix(own)
                self._mine.discard(done.request_id)
                mine.append(done)
        return mine, stay

    def _meet(self, leaving: bool) -> bool:
        """Hand over what is new; whether any rank stays."""
        told = bool(self._new or self._aborted)
        drawn = self._fingerprint()
        sums = torch.tensor([int(told), int(not leaving), drawn])
        self.comm.all_reduce_sum([sums])
        anybody, staying, total = sums.tolist()
        if total != self.comm.world_size * drawn:
            raise RolloutError(
                "The ranks that generate together have drawn different tokens: do their devices and library versions "
                "differ? Use ranks that are alike, or rollout.tensor_model_parallel_size=1."
            )
        if anybody:
            self._take_over()
        return bool(staying)

    def _take_over(self) -> None:
        everybody = self.comm.all_gather_object((self._new, self._aborted))
        self._new, self._aborted = [], []
        for rank, (requests, aborted) in enumerate(everybody):
            self.inner.submit([dataclasses.replace(r, id=f"{rank}:{r.id}") for r in requests])
            self.inner.abort([f"{rank}:{name}" for name in aborted])

    def _fingerprint(self) -> int:
        """Of the rows being written: how long they are, and their last tokens."""
        rows = [(len(tokens), tokens[-1] if tokens else -1) for _, tokens, _ in self.inner.written()]
        return zlib.crc32(np.array(rows, dtype=np.int64).tobytes())
