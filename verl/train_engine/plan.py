"""The mini-batch plan: which rows make which optimizer step, made once on the controller.

Global counts are fixed here, so that the gradient of a step does not depend on how its rows are later spread over
ranks and micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl.algorithms.aggregation import GlobalCounts
from verl.protocol import DataProto


@dataclass(frozen=True)
class MiniBatch:
    """Rows (indices into the batch at hand) of one optimizer step, and the counts of the whole step over all ranks."""

    rows: np.ndarray
    counts: GlobalCounts
    seed: int


@dataclass(frozen=True)
class MiniBatchPlan:
    """All optimizer steps of one update, in order (epochs one behind the other).

    Attributes:
        lengths: (B,) tokens that each row costs. groups: (B,) number of the row's prompt.
    """

    mini_batches: list[MiniBatch]
    lengths: np.ndarray
    groups: np.ndarray

    def split(self, world_size: int) -> list[tuple[np.ndarray, MiniBatchPlan]]:
        """Spread every mini-batch over ranks, balanced by tokens. Returns (rows, plan over those rows) for each rank.

        The responses of a prompt stay together while there are enough prompts, so that their prompt is computed once.
        """
        if world_size == 1:
            rows = np.arange(len(self.lengths))
            return [(rows, self)]
        shares: list[list[np.ndarray]] = [[] for _ in range(world_size)]
        assigned: dict[bytes, list[np.ndarray]] = {}
        for mini in self.mini_batches:
            # the same rows come again in every epoch and go to the same rank
            parts = assigned.setdefault(np.sort(mini.rows).tobytes(), self._balance(np.sort(mini.rows), world_size))
            for rank, part in enumerate(parts):
                shares[rank].append(part)
        return [self._rank_plan(parts) for parts in shares]

    def _balance(self, rows: np.ndarray, world_size: int) -> list[np.ndarray]:
        units: dict[int, list[int]] = {}
        for row in rows:
            units.setdefault(int(self.groups[row]), []).append(int(row))
        lots = list(units.values()) if len(units) >= 2 * world_size else [[int(row)] for row in rows]
        load = [0] * world_size
        members: list[list[int]] = [[] for _ in range(world_size)]
        for lot in sorted(lots, key=lambda lot: (-int(self.lengths[lot].sum()), lot[0])):
            rank = min(range(world_size), key=lambda r: (load[r], r))
            load[rank] += int(self.lengths[lot].sum())
            members[rank] += lot
        return [np.array(sorted(m), dtype=np.int64) for m in members]

    def _rank_plan(self, parts: list[np.ndarray]) -> tuple[np.ndarray, MiniBatchPlan]:
        rows = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
        place = {int(row): i for i, row in enumerate(rows)}
        minis = [
            MiniBatch(np.array([place[int(r)] for r in part], dtype=np.int64), mini.counts, mini.seed)
            for part, mini in zip(parts, self.mini_batches, strict=True)
        ]
        return rows, MiniBatchPlan(minis, self.lengths[rows], self.groups[rows])


def make_plan(
    response_mask: np.ndarray,
    uids: np.ndarray,
    lengths: np.ndarray,
    *,
    mini_batch_prompts: int,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int = 0,
) -> MiniBatchPlan:
    """Cut the batch into mini-batches of ``mini_batch_prompts`` prompts, with all responses of a prompt together.

    Args:
        response_mask: (B, R). uids: (B,). lengths: (B,) tokens a row costs.
        shuffle: a new order of the prompts in every epoch, from ``seed``.
    """
    names = {uid: i for i, uid in enumerate(dict.fromkeys(uids.tolist()))}
    groups = np.array([names[uid] for uid in uids.tolist()], dtype=np.int64)
    mask = np.asarray(response_mask).astype(bool)
    minis: list[MiniBatch] = []
    for epoch in range(epochs):
        order = np.arange(len(names))
        if shuffle:
            order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(order)
        for i in range(0, len(order), mini_batch_prompts):
            rows = np.flatnonzero(np.isin(groups, order[i : i + mini_batch_prompts]))
            counts = GlobalCounts(
                tokens=float(mask[rows].sum()),
                sequences=float(mask[rows].any(1).sum()),
                horizon=float(mask.shape[1]),
            )
            minis.append(MiniBatch(rows, counts, seed=seed * 1000003 + len(minis)))
    return MiniBatchPlan(minis, np.asarray(lengths), groups)


def plan_for(batch: DataProto, lengths: np.ndarray, **settings) -> MiniBatchPlan:
    """:func:`make_plan` for a sample batch."""
    mask = batch.batch["response_mask"].cpu().numpy()
    return make_plan(mask, batch.non_tensor_batch["uid"], lengths, **settings)
