"""Metrics with a declared reducer each, so that no number depends on how the work was cut.

A metric's reducer is part of its declaration, never guessed from its name
(``env/terminal_rate`` contains "min", and is still a mean).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

REDUCERS = ("mean", "sum", "max", "min", "last")


@dataclass
class Metric:
    """One running number. For ``mean``, ``value`` is the weighted sum and ``weight`` the total weight.

    A metric may also have ``weight`` 0 (a mean over nothing): it then has no result and is left out.
    """

    value: float
    weight: float = 1.0
    reduce: str = "mean"

    def merge(self, other: Metric) -> Metric:
        if self.reduce != other.reduce:
            raise ValueError(f"a metric was declared as {self.reduce} and as {other.reduce}")
        weight = self.weight + other.weight
        if self.reduce in ("mean", "sum"):
            return Metric(self.value + other.value, weight, self.reduce)
        if self.reduce == "last":
            return Metric(other.value, weight, self.reduce)
        return Metric((max if self.reduce == "max" else min)(self.value, other.value), weight, self.reduce)

    def result(self) -> float:
        return self.value / self.weight if self.reduce == "mean" else self.value


class Metrics(Mapping[str, float]):
    """A bag of named metrics; reading a name gives the reduced number."""

    def __init__(self) -> None:
        self._items: dict[str, Metric] = {}

    def add(self, name: str, value: float, *, reduce: str = "mean", weight: float = 1.0) -> None:
        """Add one observation. ``weight`` counts for ``mean`` only (say, the tokens it was taken over)."""
        if reduce not in REDUCERS:
            raise ValueError(f"unknown reducer {reduce!r} for metric {name!r}; there are {', '.join(REDUCERS)}")
        if reduce == "mean" and weight == 0:
            return
        value = float(value)
        self._merge_one(name, Metric(value * weight if reduce == "mean" else value, weight, reduce))

    def merge(self, other: Metrics, prefix: str = "") -> Metrics:
        """Take in another bag (of another micro-batch, rank or node), reducer by reducer."""
        for name, metric in other._items.items():
            self._merge_one(prefix + name, metric)
        return self

    def _merge_one(self, name: str, metric: Metric) -> None:
        mine = self._items.get(name)
        try:
            self._items[name] = metric if mine is None else mine.merge(metric)
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
            value = metric.value * factor if metric.reduce == "sum" else metric.value
            scaled._items[name] = Metric(value, metric.weight, metric.reduce)
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

    def __repr__(self) -> str:
        return f"Metrics({self.results()})"
