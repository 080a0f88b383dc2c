"""Run a function of micro-batches over all rows of a batch and put the (B, R) results back in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from verl.models.packing import packed_lengths
from verl.protocol import DataProto
from verl.train_engine.memory import is_out_of_memory, release_memory
from verl.train_engine.microbatch import micro_batches
from verl.workers.fitting import TokenBudget
from verl.workers.settings import Cut


def groups_of(batch: DataProto) -> np.ndarray:
    """(B,) number of each row's prompt, so that its responses stay together."""
    _, groups = np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)
    return groups


def cut_rows(batch: DataProto, cut: Cut, rows: np.ndarray | None = None) -> list[np.ndarray]:
    """Row indices of each micro-batch."""
    rows = np.arange(len(batch)) if rows is None else rows
    return micro_batches(
        rows, packed_lengths(batch), groups_of(batch), max_tokens=cut.max_tokens, max_rows=cut.max_rows
    )


@torch.no_grad()
def over_micro_batches(
    batch: DataProto,
    cut: Cut,
    compute: Callable[[DataProto], Mapping[str, torch.Tensor]],
    budget: TokenBudget | None = None,
) -> dict[str, torch.Tensor]:
    """Keyed (B, R) grids on the CPU from ``compute`` on each micro-batch.

    With a ``budget``, a micro-batch that does not fit into memory is cut further, and so are all that follow.
    """
    grids: dict[str, torch.Tensor] = {}
    waiting = cut_rows(batch, budget.apply(cut) if budget else cut)
    lengths = packed_lengths(batch)
    while waiting:
        rows = waiting.pop(0)
        try:
            found = {key: values.cpu() for key, values in compute(batch.select_idxs(rows)).items()}
        except (RuntimeError, MemoryError) as error:
            if budget is None or not is_out_of_memory(error):
                raise
            found = None
        if found is None:
            assert budget is not None
            release_memory()
            budget.lower(len(rows), int(lengths[rows].sum()), cut)
            waiting = cut_rows(batch, budget.apply(cut), np.concatenate([rows, *waiting]))
            continue
        for key, values in found.items():
            if key not in grids:
                grids[key] = torch.zeros(len(batch), values.shape[1], dtype=values.dtype)
            grids[key][torch.from_numpy(rows)] = values
    return grids
