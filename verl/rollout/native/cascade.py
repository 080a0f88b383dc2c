"""Decoding on a CPU: the prompt that the samples of a group share is read once for all of them.

A row's context falls into the pages that it shares with its group and its own pages. The rows of a group become the
queries of one attention call over the shared part; the rows' own parts are gathered in batches of like length; the
two partial softmaxes are merged by their log-sum-exps:

    out = out_own + (out_shared - out_own) * sigmoid(lse_shared - lse_own)

Dimension key as in ``layouts``; N rows of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl.rollout.native.attention import Options
from verl.rollout.native.cache import PagedCache
from verl.rollout.native.layouts import GatherLayout, _Writes, decode_table, page_table, slots_of
from verl.rollout.native.sequence import Sequence


@dataclass
class _Part:
    """Like batches of one attention call.

    Attributes:
        rows: (X, N) row of each query (a padding query repeats row ``rows[x, 0]``).
        real: (X * N,) places of the real queries, or None if all are.
        table: (X * W,) pages, flattened. mask: (X, 1, 1, L) additive, or None if every position is seen.
    """

    rows: torch.Tensor
    real: torch.Tensor | None
    table: torch.Tensor
    mask: torch.Tensor | None

    def attend(self, query, keys, values, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows,) row numbers, (rows, H, D) partial outputs and (rows, H) log-sum-exps, in float32 at least."""
        x, n = self.rows.shape
        _, h, d = query.shape
        g = keys.shape[2]
        q = query[self.rows.view(-1)].view(x, n, g, h // g, d).transpose(1, 2).reshape(x, g, n * (h // g), d)
        k, v = (c.index_select(0, self.table).view(x, -1, g, d).transpose(1, 2) for c in (keys, values))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=self.mask, scale=scale
        )
        out = out.view(x, g, n, h // g, d).transpose(1, 2).reshape(x * n, h, d)
        lse = lse.view(x, g, n, h // g).transpose(1, 2).reshape(x * n, h)
        rows = self.rows.view(-1)
        if self.real is not None:
            rows, out, lse = rows[self.real], out[self.real], lse[self.real]
        return rows, out, lse


class CascadeLayout(_Writes):
    """One token a row on a CPU. Layers with a soft-cap, or whose window is shorter than a row, gather instead."""

    def __init__(self, cache: PagedCache, rows: list[Sequence]):
        page = cache.shape.page_size
        slots = [slots_of(s.pages, s.length - 1, 1, page)[0] for s in rows]
        super().__init__(cache, torch.from_numpy(np.array(slots)))
        self._rows = rows
        self._longest = max(s.length for s in rows)
        self._gather: GatherLayout | None = None
        members: dict[object, list[int]] = {}
        for i, s in enumerate(rows):
            if s.group is not None and s.shared_pages:
                members.setdefault(s.group, []).append(i)
        groups = [m for m in members.values() if len(m) > 1]
        shared = {i: rows[i].shared_pages for m in groups for i in m}
        self._parts = self._own_parts(rows, shared)
        self._shared = self._shared_parts(rows, groups)

    def _mask(self, seen: np.ndarray, width: int) -> torch.Tensor | None:
        """(X, 1, 1, L) additive mask of the first ``seen`` positions."""
        if (seen == width).all():
            return None
        hidden = torch.from_numpy(np.arange(width)[None] >= seen[:, None])[:, None, None]
        mask = torch.zeros(hidden.shape, dtype=self.cache.shape.dtype)
        return mask.masked_fill_(hidden, float("-inf"))

    def _own_parts(self, rows: list[Sequence], shared: dict[int, int]) -> list[_Part]:
        page = self.cache.shape.page_size
        own = np.array([s.length - shared.get(i, 0) * page for i, s in enumerate(rows)])
        pages = -(-own // page)
        buckets: dict[int, list[int]] = {}
        for i, count in enumerate(pages):
            buckets.setdefault(int(count - 1).bit_length(), []).append(i)
        parts = []
        for indices in buckets.values():
            width = int(pages[indices].max())
            table = page_table([rows[i].pages[shared.get(i, 0) :] for i in indices], width)
            mask = self._mask(own[indices], width * page)
            parts.append(_Part(torch.tensor(indices)[:, None], None, torch.from_numpy(table).view(-1), mask))
        return parts

    def _shared_parts(self, rows: list[Sequence], groups: list[list[int]]) -> list[_Part]:
        page = self.cache.shape.page_size
        buckets: dict[tuple[int, int], list[list[int]]] = {}
        for group in groups:
            key = (int(rows[group[0]].shared_pages - 1).bit_length(), int(len(group) - 1).bit_length())
            buckets.setdefault(key, []).append(group)
        parts = []
        for batch in buckets.values():
            most = max(len(g) for g in batch)
            seen = np.array([rows[g[0]].shared_pages for g in batch])
            index = torch.tensor([g + [g[0]] * (most - len(g)) for g in batch])
            real = torch.tensor([x * most + j for x, g in enumerate(batch) for j in range(len(g))])
            table = page_table([rows[g[0]].pages[: rows[g[0]].shared_pages] for g in batch], int(seen.max()))
            mask = self._mask(seen * page, int(seen.max()) * page)
            whole = None if len(real) == index.numel() else real
            parts.append(_Part(index, whole, torch.from_numpy(table).view(-1), mask))
        return parts

    def attend(self, layer, query, key, value, options: Options):
        if options.softcap is not None or (options.window is not None and options.window < self._longest):
            if self._gather is None:
                self._gather = GatherLayout(self.cache, *decode_table(self.cache, self._rows))
            return self._gather.attend(layer, query, key, value, options)
        keys, values = self.write(layer, key, value)
        query = query.contiguous()
        if len(self._parts) == 1 and not self._shared:
            return self._parts[0].attend(query, keys, values, options.scale)[1]
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for part in self._parts:
            rows, partial, partial_lse = part.attend(query, keys, values, options.scale)
            out[rows], lse[rows] = partial, partial_lse.to(lse.dtype)
        for part in self._shared:
            rows, partial, partial_lse = part.attend(query, keys, values, options.scale)
            share = torch.sigmoid(partial_lse - lse[rows])[..., None].to(lse.dtype)
            mine = out[rows].to(lse.dtype)
            out[rows] = (mine + (partial - mine) * share).to(out.dtype)
        return out
