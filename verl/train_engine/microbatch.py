"""Cut rows into micro-batches: by a token budget, or by a fixed number of rows."""

from __future__ import annotations

import numpy as np


def micro_batches(
    rows: np.ndarray,
    lengths: np.ndarray,
    groups: np.ndarray,
    *,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> list[np.ndarray]:
    """Rows of each micro-batch. Rows of one prompt stay together as far as they fit; a row is never dropped.

    Args:
        rows: indices to spread. lengths, groups: per index of the whole batch.
        max_tokens: a micro-batch costs at most this many tokens (a single longer row gets one of its own).
        max_rows: at most this many rows.
    """
    longest: dict[int, int] = {}
    for row in rows.tolist():
        longest[int(groups[row])] = max(longest.get(int(groups[row]), 0), int(lengths[row]))
    order = sorted(rows.tolist(), key=lambda r: (-longest[int(groups[r])], int(groups[r]), r))
    batches: list[list[int]] = []
    tokens = 0
    for row in order:
        full = not batches or (max_rows is not None and len(batches[-1]) >= max_rows)
        if full or (max_tokens is not None and tokens + int(lengths[row]) > max_tokens):
            batches.append([])
            tokens = 0
        batches[-1].append(row)
        tokens += int(lengths[row])
    return [np.array(b, dtype=np.int64) for b in batches]
