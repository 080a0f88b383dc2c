"""Run a function of micro-batches over all rows of a batch and put the (B, R) results back in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from verl.models.backbone import may_share_prompts, runs_packed
from verl.models.packing import rows_of
from verl.models.value import ValueModel
from verl.protocol import DataProto
from verl.train_engine.memory import is_out_of_memory, release_memory
from verl.train_engine.microbatch import computed, micro_batches
from verl.train_engine.spread import SpreadModule
from verl.workers.fitting import TokenBudget
from verl.workers.lockstep import Found, in_lockstep
from verl.workers.settings import Cut


def shares_prompts(module: nn.Module) -> bool:
    """Whether the model (a causal LM or a value model) computes a prompt once for all its responses."""
    model = module.model if isinstance(module, ValueModel) else module
    return isinstance(model, PreTrainedModel) and runs_packed(model) and may_share_prompts(model)


@dataclass(frozen=True)
class RowCosts:
    """What the rows of a batch cost, in tokens that a forward pass computes.

    Attributes:
        lengths: (B,) tokens of a row by itself. groups: (B,) number of its prompt, so that its responses stay together.
        shared: (B,) tokens of its prompt; None if the model computes a prompt again for every response.
    """

    lengths: np.ndarray
    groups: np.ndarray
    shared: np.ndarray | None

    @staticmethod
    def of(batch: DataProto, *, shares_prompts: bool) -> RowCosts:
        rows = rows_of(batch)
        prompts = [row.prompt.tobytes() for row in rows]
        numbers = {prompt: number for number, prompt in enumerate(sorted(set(prompts)))}
        return RowCosts(
            np.array([row.packed_length for row in rows], dtype=np.int64),
            np.array([numbers[prompt] for prompt in prompts], dtype=np.int64),
            np.array([len(row.prompt) for row in rows], dtype=np.int64) if shares_prompts else None,
        )

    def cut(self, cut: Cut, rows: np.ndarray | None = None, *, together: int = 1) -> list[np.ndarray]:
        """Row indices of each micro-batch.

        Args:
            together: so many rows, from a multiple of it on, are never separated: 2 for the sides of pairs.
        """
        rows = np.arange(len(self.lengths)) if rows is None else rows
        if together > 1:
            return self._cut_units(cut, np.unique(rows // together), together)
        return micro_batches(
            rows, self.lengths, self.groups, shared=self.shared, max_tokens=cut.max_tokens, max_rows=cut.max_rows
        )

    def _cut_units(self, cut: Cut, units: np.ndarray, together: int) -> list[np.ndarray]:
        members = np.arange(len(self.lengths)).reshape(-1, together)
        costs = np.array([self.tokens(rows) for rows in members], dtype=np.int64)
        most = None if cut.max_rows is None else max(1, cut.max_rows // together)
        parts = micro_batches(units, costs, self.groups[::together], max_tokens=cut.max_tokens, max_rows=most)
        return [members[part].reshape(-1) for part in parts]

    def tokens(self, rows: np.ndarray) -> int:
        """What these rows cost together."""
        return computed(rows, self.lengths, self.groups, self.shared)


def cut_rows(batch: DataProto, cut: Cut, rows: np.ndarray | None = None) -> list[np.ndarray]:
    """Row indices of each micro-batch, with every prompt counted for every row."""
    return RowCosts.of(batch, shares_prompts=False).cut(cut, rows)


@torch.no_grad()
def over_micro_batches(
    batch: DataProto,
    cut: Cut,
    compute: Callable[[DataProto], Mapping[str, torch.Tensor]],
    budget: TokenBudget | None = None,
    lockstep: SpreadModule | None = None,
) -> dict[str, torch.Tensor]:
    """Keyed (B, R) grids on the CPU from ``compute`` on each micro-batch.

    With a ``budget``, a micro-batch that does not fit into memory is cut further, and so are all that follow.
    With ``lockstep``, the sharded model that ``compute`` uses, all ranks call this together.
    """
    costs = RowCosts.of(batch, shares_prompts=budget is not None and budget.shares_prompts)
    if lockstep is not None:
        assert budget is not None
        return _grids(in_lockstep(batch, cut, compute, budget, costs, lockstep), len(batch))
    waiting = costs.cut(budget.apply(cut) if budget else cut)
    done: Found = []
    while waiting:
        rows = waiting.pop(0)
        try:
            found = compute(batch.select_idxs(rows))
        except (RuntimeError, MemoryError) as error:
            if budget is None or not is_out_of_memory(error):
                raise
            found = None
        if found is not None:
            done.append((rows, found))
            continue
        assert budget is not None
        release_memory()
        budget.lower(len(rows), costs.tokens(rows), cut)
        waiting = costs.cut(budget.apply(cut), np.concatenate([rows, *waiting]))
    return _grids(done, len(batch))


def _grids(done: Found, rows_of_batch: int) -> dict[str, torch.Tensor]:
    grids: dict[str, torch.Tensor] = {}
    for rows, found in done:  # read when all is under way: reading sooner would make the host wait
        for key, values in found.items():
            if key not in grids:
                grids[key] = torch.zeros(rows_of_batch, values.shape[1], dtype=values.dtype)
            grids[key][torch.from_numpy(rows)] = values.cpu()
    return grids
