"""Layouts for every device, built from torch's own operations: prompts, and one token a row.

Dimension key: T tokens, B rows, H query heads, G key-value heads, R = H / G, D head size, L cached positions.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from verl.models.sdpa import attend
from verl.rollout.native.attention import Layout, Options
from verl.rollout.native.cache import PagedCache
from verl.rollout.native.scheduler import Chunk
from verl.rollout.native.sequence import Sequence


def slots_of(pages: Many[int], start: int, length: int, page_size: int) -> np.ndarray:
    """(length,) places in the flattened cache of positions ``start ...`` of the sequence that owns ``pages``."""
    positions = np.arange(start, start + length)
    return np.asarray(pages, dtype=np.int64)[positions // page_size] * page_size + positions % page_size


def page_table(rows: Many[Many[int]], width: int) -> np.ndarray:
    """(B, width) page numbers; missing ones are the null page."""
    table = np.zeros((len(rows), width), np.int64)
    for i, pages in enumerate(rows):
        used = pages[:width]
        table[i, : len(used)] = used
    return table


class Writes(Layout):
    """Writes the new keys and values to their slots."""

    def __init__(self, cache: PagedCache, slots: torch.Tensor):
        self.cache, self.slots = cache, slots

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.cache.layer(layer)
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self.slots, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, self.slots, value)
        return keys, values


class PrefillLayout(Writes):
    """Packed chunks of several sequences; each attends to its own earlier positions."""

    def __init__(self, cache: PagedCache, chunks: list[Chunk]):
        page, device = cache.shape.page_size, cache.shape.device
        self.lengths = [(c.start, c.length) for c in chunks]
        own = [slots_of(c.sequence.pages, c.start, c.length, page) for c in chunks]
        super().__init__(cache, torch.from_numpy(np.concatenate(own)).to(device))
        self.history = [
            torch.from_numpy(slots_of(c.sequence.pages, 0, c.start + c.length, page)).to(device) if c.start else None
            for c in chunks
        ]

    def attend(self, layer, query, key, value, options):
        keys, values = (x.view(-1, *x.shape[2:]) for x in self.write(layer, key, value))
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        at = 0
        for (start, length), slots in zip(self.lengths, self.history, strict=True):
            own = slice(at, at + length)
            k, v = (key[own], value[own]) if slots is None else (keys[slots], values[slots])
            out[own] = self._segment(query[own], k, v, start, options)
            at += length
        return out

    @staticmethod
    def _segment(query, key, value, start: int, options: Options) -> torch.Tensor:
        """(T, H, D) outputs of queries at positions ``start ...`` to keys at 0 ... start + T."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        total = key.shape[0]
        if not start and options.softcap is None and (options.window is None or options.window >= total):
            out = attend(q, k, v, scale=options.scale)
        else:
            distance = torch.arange(start, total, device=q.device)[:, None] - torch.arange(total, device=q.device)
            mask = distance >= 0
            if options.window is not None:
                mask &= distance < options.window
            out = attend(q, k, v, mask, scale=options.scale, softcap=options.softcap)
        return out[0].transpose(0, 1)


class GatherLayout(Writes):
    """One token a row; the row's pages are gathered. Works on every device and with static tensors in a graph.

    Args:
        table: (B, W) pages. positions: (B,) position of each row's token.
    """

    def __init__(self, cache: PagedCache, table: torch.Tensor, positions: torch.Tensor):
        page = cache.shape.page_size
        slots = table.gather(1, positions[:, None] // page)[:, 0] * page + positions % page
        super().__init__(cache, slots)
        self.table = table
        self.distance = positions[:, None] - torch.arange(table.shape[1] * page, device=table.device)  # (B, L)

    def attend(self, layer, query, key, value, options):
        keys, values = self.write(layer, key, value)
        b, h, d = query.shape
        g = key.shape[1]
        k, v = (x[self.table].view(b, -1, g, d).transpose(1, 2) for x in (keys, values))
        mask = self.distance >= 0
        if options.window is not None:
            mask = mask & (self.distance < options.window)
        out = attend(
            query.reshape(b, g, h // g, d), k, v, mask[:, None, None], scale=options.scale, softcap=options.softcap
        )
        return out.reshape(b, h, d)


def decode_table(cache: PagedCache, rows: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, W) pages and (B,) positions of the rows' next tokens."""
    page, device = cache.shape.page_size, cache.shape.device
    lengths = np.array([s.length for s in rows])
    table = page_table([s.pages for s in rows], int(-(-lengths.max() // page)))
    return torch.from_numpy(table).to(device), torch.from_numpy(lengths - 1).to(device)
