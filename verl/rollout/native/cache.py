"""The paged key-value cache: one tensor for all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class CacheShape:
    """What a page of the cache holds: ``layers`` layers of ``heads`` key-value heads of ``size`` numbers."""

    layers: int
    heads: int
    size: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def page_bytes(self) -> int:
        return self.layers * 2 * self.plane_bytes

    @property
    def plane_bytes(self) -> int:
        """Bytes of one page among the keys, or the values, of one layer."""
        return self.page_size * self.heads * self.size * self.dtype.itemsize


class PagedCache:
    """(layers, 2, pages, page_size, G, D) keys and values. Page 0 belongs to nobody.

    Attributes:
        num_pages: pages that sequences can own; ``data`` may have addresses for more.
    """

    def __init__(self, shape: CacheShape):
        self.shape = shape
        self.data: torch.Tensor | None = None
        self.num_pages = 0

    def allocate(self, num_pages: int) -> None:
        """Take memory for ``num_pages`` pages; what the old ones held is kept (also if it is never looked at)."""
        s = self.shape
        old = self.data
        size = (s.layers, 2, num_pages + 1, s.page_size, s.heads, s.size)
        if s.device.type == "cpu":  # numpy's zeros take memory only when they are written to
            flat = np.zeros(math.prod(size) * s.dtype.itemsize, np.uint8)
            data = torch.from_numpy(flat).view(s.dtype).view(size)
        else:
            data = torch.zeros(size, dtype=s.dtype, device=s.device)
        if old is not None:
            data[:, :, : self.num_pages + 1] = old[:, :, : self.num_pages + 1]
        self.data, self.num_pages = data, num_pages

    def release(self) -> None:
        self.data, self.num_pages = None, 0

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages (from, to), in every layer."""
        if pairs:
            assert self.data is not None
            source, target = torch.tensor(pairs, device=self.data.device).unbind(1)
            self.data[:, :, target] = self.data[:, :, source]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(pages, page_size, G, D) keys and values of one layer."""
        assert self.data is not None
        return self.data[layer, 0], self.data[layer, 1]
