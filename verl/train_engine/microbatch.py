"""Cut rows into micro-batches: by a budget of computed tokens, or by a fixed number of rows."""

from __future__ import annotations

import numpy as np


def micro_batches(
    rows: np.ndarray,
    lengths: np.ndarray,
    groups: np.ndarray,
    *,
    shared: np.ndarray | None = None,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> list[np.ndarray]:
    """Rows of each micro-batch. Rows of one prompt stay together as far as they fit; a row is never dropped.

    Args:
        rows: indices to spread. lengths, groups: per index of the whole batch.
        shared: per index, the tokens of a row that the others of its group in the same micro-batch need not compute
            again: those of its prompt. None: nothing is shared.
        max_tokens: a micro-batch costs at most this many tokens (a single longer row gets one of its own).
        max_rows: at most this many rows.
    """
    longest: dict[int, int] = {}
    for row in rows.tolist():
        longest[int(groups[row])] = max(longest.get(int(groups[row]), 0), int(lengths[row]))
    order = sorted(rows.tolist(), key=lambda r: (-longest[int(groups[r])], int(groups[r]), r))
    batches: list[list[int]] = []
    tokens, present = 0, set[int]()
    for row in order:
        cost, group = int(lengths[row]), int(groups[row])
        saved = int(shared[row]) if shared is not None and cost and group in present else 0
        full = not batches or (max_rows is not None and len(batches[-1]) >= max_rows)
        if full or (max_tokens is not None and tokens + cost - saved > max_tokens):
            batches.append([])
            tokens, saved, present = 0, 0, set()
        batches[-1].append(row)
        tokens += cost - saved
        if cost:  # a row without a trained token takes no part
            present.add(group)
    return [np.array(b, dtype=np.int64) for b in batches]


def computed(rows: np.ndarray, lengths: np.ndarray, groups: np.ndarray, shared: np.ndarray | None = None) -> int:
    """Tokens that these rows cost in one micro-batch; arguments as for :func:`micro_batches`."""
    total = int(lengths[rows].sum())
    if shared is None:
        return total
    costly = rows[lengths[rows] > 0]
    _, first = np.unique(groups[costly], return_index=True)
    return total - int(shared[costly].sum()) + int(shared[costly][first].sum())
