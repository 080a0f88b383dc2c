"""Metrics with a declared reducer each, so that no number depends on how the work was cut.

A metric's reducer is part of its declaration, never guessed from its name
(``env/terminal_rate`` contains "min", and is still a mean).

Numbers may be tensors with one element. They are read when somebody looks, all with one transfer: reading each as it
comes would make the host wait for the GPU.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

REDUCERS = ("mean", "sum", "max", "min", "last")


@dataclass
class Metric:
    """One running number. For ``mean``, ``value`` is the weighted sum and ``weight`` the total weight.

    A metric may also have ``weight`` 0 (a mean over nothing): it then has no result and is left out.

    ``rest`` is what rounding took from a sum (Shewchuk's partial sums, as in ``math.fsum``): a sum does not depend on
    how its terms came together, as rows arrive in pieces of any size.
    """

    value: float
    weight: float = 1.0
    reduce: str = "mean"
    rest: tuple[float, ...] = ()

    def merge(self, other: Metric) -> Metric:
        if self.reduce != other.reduce:
            raise ValueError(f"a metric was declared as {self.reduce} and as {other.reduce}")
        weight = self.weight + other.weight
        if self.reduce in ("mean", "sum"):
            *rest, value = _exact_sum([*self.rest, self.value], [*other.rest, other.value])
            return Metric(value, weight, self.reduce, tuple(rest))
        if self.reduce == "last":
            return Metric(other.value, weight, self.reduce)
        return Metric((max if self.reduce == "max" else min)(self.value, other.value), weight, self.reduce)

    def result(self) -> float:
        return self.total / self.weight if self.reduce == "mean" else self.total

    @property
    def total(self) -> float:
        """``value``, correctly rounded where it is a sum."""
        return math.fsum((*self.rest, self.value)) if self.rest else self.value


def _exact_sum(parts: list[float], more: list[float]) -> list[float]:
    """Floats that do not overlap, smallest first, whose sum is exactly that of all; one float if it is not finite."""
    for x in more:
        kept = []
        for y in parts:
            if abs(x) < abs(y):
                x, y = y, x
            high = x + y
            if not math.isfinite(high):
                return [math.nan if math.isnan(high) else sum([*parts, *more])]
            low = y - (high - x)
            if low:
                kept.append(low)
            x = high
        parts = [*kept, x]
    return parts


@dataclass(frozen=True)
class _Observation:
    """What :meth:`Metrics.add` was given, with tensors not yet read."""

    name: str
    value: Any
    weight: Any
    reduce: str
    times_weight: bool = False
    rest: tuple[float, ...] = ()

    def held(self) -> _Observation:
        """The same without the graph behind its tensors."""
        parts = {}
        for part, x in (("value", self.value), ("weight", self.weight)):
            if not _is_number(x):
                if x.numel() != 1:
                    raise ValueError(f"metric {self.name!r} needs one number, not a tensor of shape {tuple(x.shape)}")
                parts[part] = x.detach()
        return replace(self, **parts)

    def metric(self, value: float, weight: float) -> Metric | None:
        if weight == 0:
            return None
        return Metric(value * weight if self.times_weight else value, weight, self.reduce, self.rest)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def _read(waiting: list[_Observation]) -> Iterator[tuple[float, float]]:
    """(value, weight) of each, with one transfer from each device."""
    mixed = [x for one in waiting for x in (one.value, one.weight)]
    tensors = [x for x in mixed if not _is_number(x)]
    read: dict[int, float] = {}
    for device in {x.device for x in tensors}:
        import torch

        here = [x for x in tensors if x.device == device]
        # an exact type for all that are usual; Apple's GPUs have none wider than float32
        wide = torch.float32 if device.type == "mps" else torch.float64
        found = torch.stack([x.reshape(()).to(wide) for x in here]).tolist()
        read.update(zip(map(id, here), found, strict=True))
    flat = [float(x) if _is_number(x) else read[id(x)] for x in mixed]
    return zip(flat[::2], flat[1::2], strict=True)


class Metrics(Mapping[str, float]):
    """A bag of named metrics; reading a name gives the reduced number."""

    def __init__(self) -> None:
        self._known: dict[str, Metric] = {}
        self._waiting: list[_Observation] = []

    def add(self, name: str, value: Any, *, reduce: str = "mean", weight: Any = 1.0) -> None:
        """Add one observation: a number, or a tensor with one element.

        Args:
            weight: what a ``mean`` counts it by (say, the tokens it was taken over). An observation of weight 0 is left
                out.
        """
        self._add(_Observation(name, value, weight, reduce, times_weight=reduce == "mean"))

    def add_total(self, name: str, total: Any, weight: Any) -> None:
        """Add to a mean what is summed over ``weight`` things already."""
        self._add(_Observation(name, total, weight, "mean"))

    def _add(self, one: _Observation) -> None:
        if one.reduce not in REDUCERS:
            raise ValueError(f"unknown reducer {one.reduce!r} for metric {one.name!r}; there are {', '.join(REDUCERS)}")
        if self._waiting or not (_is_number(one.value) and _is_number(one.weight)):
            # in the order of arrival, so that sums do not depend on what is a tensor
            self._waiting.append(one.held())
        else:
            self._take(one.name, one.metric(float(one.value), float(one.weight)))

    def merge(self, other: Metrics, prefix: str = "") -> Metrics:
        """Take in another bag (of another micro-batch, rank or node), reducer by reducer."""
        if self._waiting or other._waiting:
            self._waiting += [
                _Observation(prefix + k, m.value, m.weight, m.reduce, rest=m.rest) for k, m in other._known.items()
            ]
            self._waiting += [replace(one, name=prefix + one.name) for one in other._waiting]
        else:
            for name, metric in other._known.items():
                self._take(prefix + name, metric)
        return self

    @property
    def _items(self) -> dict[str, Metric]:
        """Every metric; tensors that wait are read now."""
        waiting, self._waiting = self._waiting, []
        for one, (value, weight) in zip(waiting, _read(waiting), strict=True):
            self._take(one.name, one.metric(value, weight))
        return self._known

    def _take(self, name: str, metric: Metric | None) -> None:
        if metric is None:
            return
        mine = self._known.get(name)
        try:
            self._known[name] = metric if mine is None else mine.merge(metric)
        except ValueError as error:
            raise ValueError(f"metric {name!r}: {error}") from None

    @staticmethod
    def merged(bags: Iterable[Metrics]) -> Metrics:
        total = Metrics()
        for bag in bags:
            total.merge(bag)
        return total

    def prefixed(self, prefix: str) -> Metrics:
        return Metrics().merge(self, prefix)

    def with_scaled_sums(self, factor: float) -> Metrics:
        """A copy in which every ``sum`` metric is multiplied by ``factor``; the others are as they were."""
        scaled = Metrics()
        for name, metric in self._items.items():
            if metric.reduce == "sum":
                metric = Metric(metric.total * factor, metric.weight, metric.reduce)
            scaled._known[name] = metric
        return scaled

    def results(self) -> dict[str, float]:
        """Every metric as a plain float, in order of first appearance."""
        return {name: metric.result() for name, metric in self._items.items()}

    def finite(self) -> bool:
        return all(math.isfinite(value) for value in self.results().values())

    def __getitem__(self, name: str) -> float:
        return self._items[name].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": self._items, "_waiting": []}

    def __repr__(self) -> str:
        return f"Metrics({self.results()})"
