"""What local and distributed groups do in the same way around a call: order, futures, streams, padding."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from verl.errors import DataflowError
from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base.decorator import Registration
from verl.single_controller.base.dispatch import Padding, Split, strip_padding
from verl.single_controller.base.worker_group import WorkerGroup


class OrderedWorkerGroup(WorkerGroup):
    """A group whose calls are made one after the other, in the order of the calls.

    A subclass says how ranks run a method (:meth:`_run_ranks`) and how they stream (:meth:`_stream_ranks`).

    Args:
        turns: shared by groups whose ranks are the same processes.
    """

    def __init__(self, worker_cls: type, world_size: int, turns: Turns | None = None):
        super().__init__(worker_cls, world_size)
        self._turns = turns or Turns()
        self._background: ThreadPoolExecutor | None = None
        self._pending: Future[Any] | None = None
        self._pending_lock = threading.Lock()

    @abstractmethod
    def _run_ranks(self, name: str, registration: Registration, split: Split) -> list[Any]:
        """Run the method on its ranks at the same time; results in rank order. The first error of a rank is raised."""

    @abstractmethod
    def _stream_ranks(self, name: str, registration: Registration, split: Split) -> Generator[Any, None, None]:
        """The pieces of all ranks in the order in which they come. When it is closed, no rank goes on."""

    def shutdown(self) -> None:
        """Wait for the calls that are already made."""
        if self._background is not None:
            self._background.shutdown(wait=True)

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
            outputs = self._run_ranks(name, registration, split)
        finally:
            self._turns.give_back()
        return self._collect(registration, split, outputs)

    def _place(self, rank: int, name: str) -> str:
        return f"in {self._label(name)} on rank {rank} of {self.world_size}"

    def _stream(self, name: str, registration: Registration, split: Split) -> Generator[Any, None, None]:
        self._turns.take(self._label(name), streaming=True)
        source: Generator[Any, None, None] | None = None
        try:
            source = self._stream_ranks(name, registration, split)
            for piece in source:
                kept = _without_padding(piece, split.padding, self._label(name))
                if kept is not None:
                    yield kept
        finally:
            try:
                if source is not None:
                    source.close()
            finally:
                self._turns.give_back()


def not_a_stream(label: str, value: Any) -> DataflowError:
    """The error for a method that is registered as streaming and is no generator."""
    return DataflowError(f"{label} is registered as streaming, but returned {value!r:.80}")


def _without_padding(piece: Any, padding: Padding | None, label: str) -> Any | None:
    """A piece without added rows; None if it had no others."""
    if padding is None or not isinstance(piece, DataProto):
        return piece
    if not {"uid", "sample_id"} & set(piece.non_tensor_batch):
        raise DataflowError(f"{label} gave a piece without uid or sample_id, so added rows cannot be told apart")
    kept = strip_padding(piece, padding)
    return kept if len(kept) or not len(piece) else None


class Turns:
    """One call at a time on a group; a stream holds its turn until it ends."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._holder: str | None = None
        self._streaming = False

    def take(self, label: str, streaming: bool = False) -> None:
        """Wait for the turn. Behind a stream there is no waiting (its consumer may be the caller): DataflowError."""
        with self._condition:
            while self._holder is not None:
                if self._streaming:
                    raise DataflowError(
                        f"{label} was called while the group still streams {self._holder}: finish or close the stream"
                    )
                self._condition.wait()
            self._holder, self._streaming = label, streaming

    def give_back(self) -> None:
        with self._condition:
            self._holder = None
            self._condition.notify_all()
