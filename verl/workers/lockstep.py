"""Forward passes of a model that is spread over ranks: all ranks make equally many, and go on together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.protocol import DataProto
from verl.train_engine.spread import SpreadModule
from verl.workers.fitting import TokenBudget
from verl.workers.settings import Cut

if TYPE_CHECKING:
    from verl.workers.forward import RowCosts

Found = list[tuple[np.ndarray, Mapping[str, torch.Tensor]]]


def in_lockstep(
    batch: DataProto,
    cut: Cut,
    compute: Callable[[DataProto], Mapping[str, torch.Tensor]],
    budget: TokenBudget,
    costs: RowCosts,
    lockstep: SpreadModule,
) -> Found:
    """(rows, ``compute`` of them) of every micro-batch. A rank with fewer than others passes over nothing.

    Where memory ran out on some rank, all cut what they have left by what the smallest failure taught.
    """
    done: Found = []
    waiting = costs.cut(budget.apply(cut))
    while True:
        passes = lockstep.together([batch.select_idxs(rows) for rows in waiting])
        turns = max(lockstep.comm.all_gather_object(len(passes)))
        if not turns:
            return done
        failed = None
        left: list[np.ndarray] = []
        computed: list[tuple[np.ndarray | None, Mapping[str, torch.Tensor]]] = []
        for turn in range(turns):
            micro, number = passes[turn] if turn < len(passes) else (None, None)
            rows = None if number is None else waiting[number]
            if micro is None or failed is not None:
                lockstep.infer_nothing()
                left += [] if rows is None else [rows]
                continue
            found = lockstep.infer(lambda micro=micro: compute(micro))
            if found is not None:
                computed.append((rows, found))
            elif rows is not None:
                failed = (len(rows), costs.tokens(rows))
                left.append(rows)
        settled = lockstep.settle([found for _, found in computed])
        done += [(rows, found) for (rows, _), found in zip(computed, settled, strict=True) if rows is not None]
        failures = [f for f in lockstep.comm.all_gather_object(failed) if f is not None]
        if failures:
            budget.lower(*min(failures), cut)
        waiting = costs.cut(budget.apply(cut), np.concatenate(left)) if left else []
