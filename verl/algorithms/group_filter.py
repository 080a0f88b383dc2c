"""DAPO's dynamic sampling: leave out the prompts whose samples all got the same (arXiv:2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from verl.algorithms.groups import Groups
from verl.metrics import Metrics


def keep_varied_groups(
    values: Sequence[float] | np.ndarray | Tensor,
    index: Sequence[Any] | np.ndarray,
    score_valid: Sequence[bool] | np.ndarray | Tensor | None = None,
) -> tuple[np.ndarray, Metrics]:
    """(B,) bool: the rows of groups whose ``values`` (B,) differ; these alone have advantages other than 0.

    ``values`` is the metric of ``algorithm.filter_groups.metric`` (acc, score, seq_reward, ...). Rows that are not
    ``score_valid`` do not count as a difference, and are kept with their group. A group with fewer than two valid rows
    is left out. Metrics: ``training/filter_groups/kept`` and ``/dropped``, in groups.
    """
    numbers = np.asarray(values, dtype=np.float64)
    usable = None if score_valid is None else np.asarray(score_valid, dtype=bool)
    groups = Groups.of(index, usable)
    varied = groups.differs(numbers)
    metrics = Metrics()
    metrics.add("training/filter_groups/kept", float(varied.sum()), reduce="sum")
    metrics.add("training/filter_groups/dropped", float((~varied).sum()), reduce="sum")
    return varied[groups.group_of], metrics
