"""Layouts for GPUs that run Triton."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from verl.rollout.native.attention import Layout
from verl.rollout.native.cache import PagedCache
from verl.rollout.native.kernels import BLOCK_QUERIES, decode_attention, prefill_attention
from verl.rollout.native.layouts import Writes, page_table, slots_of
from verl.rollout.native.scheduler import Chunk
from verl.rollout.native.sequence import Sequence


def sharing_of(rows: Many[Sequence], page_size: int, most: int) -> np.ndarray:
    """(2, B) int32: how many first tokens of each row lie in pages of its group, and, for the first of up to ``most``
    neighbours of a group, how many they are (0 for the others and where a row has no neighbour)."""
    out = np.zeros((2, len(rows)), np.int32)
    first = 0
    while first < len(rows):
        row, end = rows[first], first + 1
        if row.group is not None and row.shared_pages:
            while end < len(rows) and end - first < most and rows[end].group is row.group:
                end += 1
            if end - first > 1:
                out[0, first:end] = row.shared_pages * page_size
                out[1, first] = end - first
        first = end
    return out


class TritonDecodeLayout(Layout):
    """One token a row: page write and attention in one kernel. Static tensors, so it can be captured.

    Args:
        table: (B, W) int32 pages. positions: (B,) position of each row's token. sharing: (2, B), see
            :func:`sharing_of`.
    """

    def __init__(self, cache: PagedCache, table: torch.Tensor, positions: torch.Tensor, sharing: torch.Tensor):
        self.cache, self.table, self.positions = cache, table, positions
        self.sharing = (sharing[0], sharing[1])

    def attend(self, layer, query, key, value, options):
        keys, values = self.cache.layer(layer)
        return decode_attention(query, key, value, keys, values, self.table, self.positions, options, self.sharing)


class TritonPrefillLayout(Writes):
    """Packed chunks; keys and values are written first, then read from the pages."""

    def __init__(self, cache: PagedCache, chunks: list[Chunk]):
        page, device = cache.shape.page_size, cache.shape.device
        slots = [slots_of(c.sequence.pages, c.start, c.length, page) for c in chunks]
        super().__init__(cache, torch.from_numpy(np.concatenate(slots)).to(device))
        width = max(-(-(c.start + c.length) // page) for c in chunks)
        table = page_table([c.sequence.pages for c in chunks], width)
        lengths = np.array([c.length for c in chunks])
        block_row = np.repeat(np.arange(len(chunks)), -(-lengths // BLOCK_QUERIES))
        block_start = np.concatenate([np.arange(0, n, BLOCK_QUERIES) for n in lengths])
        offsets = lengths.cumsum() - lengths
        starts = np.array([c.start for c in chunks])

        def send(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(x.astype(np.int32)).to(device)

        self.table = send(table)
        self.blocks = (send(block_row), send(block_start))
        self.spans = (send(starts), send(lengths), send(offsets))

    def attend(self, layer, query, key, value, options):
        keys, values = self.write(layer, key, value)
        return prefill_attention(query, keys, values, self.table, self.blocks, self.spans, options)
