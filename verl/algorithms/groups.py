"""Rows grouped by prompt, and statistics of one number per row over those groups.

One value per row is little data, so this is numpy in float64: the same on every device, and a group of equal scores has
a spread of exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Groups:
    """``group_of`` (B,) int: the group of each row. ``usable`` (B,) bool: the rows that enter statistics."""

    group_of: np.ndarray
    usable: np.ndarray
    number: int

    @staticmethod
    def of(index: Sequence[Any] | np.ndarray, usable: np.ndarray | None = None) -> Groups:
        """Group rows by equal ``index`` (prompt uid), wherever they lie in the batch."""
        numbers: dict[Any, int] = {}
        keys = index.tolist() if isinstance(index, np.ndarray) else list(index)
        group_of = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
        usable = np.ones(len(keys), dtype=bool) if usable is None else usable
        return Groups(group_of, usable, len(numbers))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over the usable rows of each group, (number,)."""
        return np.bincount(self.group_of, weights=np.where(self.usable, values, 0.0), minlength=self.number)

    def counts(self) -> np.ndarray:
        """Usable rows of each group, (number,)."""
        return self.sums(np.ones(len(self.group_of)))

    def means(self, values: np.ndarray) -> np.ndarray:
        return self.sums(values) / np.maximum(self.counts(), 1)

    def highest(self, values: np.ndarray) -> np.ndarray:
        """Maximum over usable rows, (number,); -inf for a group without any."""
        result = np.full(self.number, -np.inf)
        np.maximum.at(result, self.group_of[self.usable], values[self.usable])
        return result

    def stds(self, values: np.ndarray) -> np.ndarray:
        """Unbiased standard deviation; 0 for fewer than two usable rows."""
        deviation = np.where(self.usable, values - self.means(values)[self.group_of], 0.0)
        return np.sqrt(self.sums(deviation**2) / np.maximum(self.counts() - 1, 1))

    def differs(self, values: np.ndarray) -> np.ndarray:
        """(number,) bool: the usable rows of the group do not all have one value (False for fewer than two)."""
        return self.highest(values) > -self.highest(-values)
