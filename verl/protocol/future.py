"""DataProtoFuture: a result that is still being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.protocol.dataproto import DataProto


class FutureLike(Protocol):
    """What is awaited: ``concurrent.futures.Future`` or anything with the same two methods."""

    def result(self, timeout: float | None = None) -> Any: ...

    def done(self) -> bool: ...


def _only(results: list[Any]) -> Any:
    (result,) = results
    return result


@dataclass
class DataProtoFuture:
    """Results to come and how to put them together.

    ``collect_fn(list of results)`` makes the value when :meth:`get` is called. Mostly the value is a DataProto;
    a worker method that returns something else (metrics, a path) yields that.
    ``dispatch_fn``, if given, picks from the collected value (it is how :meth:`chunk` works).
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: Sequence[FutureLike]
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def of(future: FutureLike) -> DataProtoFuture:
        """One future whose result is the value."""
        return DataProtoFuture(_only, [future])

    @staticmethod
    def concat(data: Sequence[FutureLike]) -> DataProtoFuture:
        """The concatenation of several DataProtos to come."""
        return DataProtoFuture(DataProto.concat, list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """One future for each of ``chunks`` equal parts, without waiting."""

        def part(number: int) -> Callable[[Any], Any]:
            def pick(data: DataProto) -> DataProto:
                whole = data if self.dispatch_fn is None else self.dispatch_fn(data)
                return whole.chunk(chunks)[number]

            return pick

        return [DataProtoFuture(self.collect_fn, self.futures, part(number)) for number in range(chunks)]

    def done(self) -> bool:
        """Whether :meth:`get` would return at once."""
        return all(future.done() for future in self.futures)

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the value. An error of the computation is raised here; ``timeout`` is in seconds per future."""
        data = self.collect_fn([future.result(timeout) for future in self.futures])
        return data if self.dispatch_fn is None else self.dispatch_fn(data)
