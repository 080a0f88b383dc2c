"""Decoding on a CPU: the prompt that the samples of a group share is read once for all of them.

A row's context falls into the pages that it shares with its group and its own tokens. The rows of a group become the
queries of one attention call over the shared part; own parts of like length are one call too; the two partial
softmaxes are merged by their log-sum-exps:

    out = out_own + (out_shared - out_own) * sigmoid(lse_shared - lse_own)

Both parts are read from slabs: copies of the pages' keys and values, context by context, which live from step to step
and get each new token as it comes. Without slabs (they have a cap) the pages are gathered each step.

Between the parts, queries and outputs are (B, R, G, D): in this order the rows of a group are the queries of one call,
and its outputs theirs, without a copy.

Dimension key as in ``layouts``; X rows or groups of a slab, N rows of a group, C tokens that a slab can hold.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from verl.rollout.native.attention import Options
from verl.rollout.native.cache import PagedCache
from verl.rollout.native.layouts import GatherLayout, Writes, decode_table, page_table, slots_of
from verl.rollout.native.sequence import Sequence

MOST_SLABS = 4
"""Own slabs side by side; more are made into one."""


class Slab:
    """Keys and values of X contexts, (layers, X, C, G, D) each, float32 at least.

    Attributes:
        owners: what each context belongs to: a sequence, or the group whose prompt it is.
        pages: the page lists that own slabs were copied from; another list means that the row was preempted since.
        start: (X,) first position of each context. held: (X,) tokens in it.
    """

    def __init__(self, cache: PagedCache, sources: Many[tuple[object, list[int], int, int]], capacity: int):
        shape = cache.shape
        self.dtype = torch.promote_types(shape.dtype, torch.float32)
        self.owners = [owner for owner, *_ in sources]
        self.pages = [pages for _, pages, *_ in sources]
        self.start = np.array([start for *_, start, _ in sources])
        self.held = np.array([held for *_, held in sources])
        self.data = torch.zeros(
            2, shape.layers, len(sources), capacity, shape.heads, shape.size, dtype=self.dtype, device=shape.device
        )
        assert cache.data is not None
        page = shape.page_size
        for x, (_, pages, start, held) in enumerate(sources):
            used = torch.tensor(pages[start // page : -(-(start + held) // page)], dtype=torch.long)
            for which in range(2):
                # not index_select, which would copy the whole cache first: this view of it is not contiguous
                self.data[which, :, x, :held] = cache.data[:, which][:, used].flatten(1, 2)[:, :held]

    @property
    def capacity(self) -> int:
        return self.data.shape[3]

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass
class _Part:
    """Like contexts of one attention call.

    Attributes:
        rows: (X, N) row of each query (a padding query repeats another row).
        real: (X * N,) places of the real queries, or None if all are.
        mask: (X, 1, 1, L) additive, or None if every position is seen.
        length: L, of the slab's tokens. table: (X * W,) pages where there is no slab.
        new: places in the slab, (X * C) of them, that get this step's tokens, and the rows that these come from.
    """

    rows: torch.Tensor
    real: torch.Tensor | None
    mask: torch.Tensor | None
    length: int
    slab: Slab | None = None
    table: torch.Tensor | None = None
    new: tuple[torch.Tensor, torch.Tensor | slice] | None = None

    def __post_init__(self) -> None:
        """``where``: the rows that the real queries are."""
        flat = self.rows.view(-1)
        self.flat = _as_slice(flat)
        self.where = self.flat if self.real is None else flat[self.real]

    def context(self, cache: PagedCache, layer: int, key: torch.Tensor, value: torch.Tensor):
        """(X, G, L, D) keys and values, this step's among them."""
        if self.slab is None:
            assert self.table is not None
            x = self.rows.shape[0]
            pages = (c.index_select(0, self.table) for c in cache.layer(layer))
            return tuple(p.view(x, -1, *p.shape[2:])[:, : self.length].transpose(1, 2) for p in pages)
        context = self.slab.data[:, layer]
        if self.new is not None:
            places, rows = self.new
            for which, fresh in enumerate((key, value)):
                context[which].flatten(0, 1).index_copy_(0, places, fresh[rows].to(self.slab.dtype))
        return tuple(c[:, : self.length].transpose(1, 2) for c in context)

    def attend(self, query: torch.Tensor, context, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, R, G, D) partial outputs and (rows, R, G) log-sum-exps of the rows ``where``, in ``query``'s type."""
        keys, values = context
        x, n = self.rows.shape
        _, r, g, d = query.shape
        q = query[self.flat].view(x, n * r, g, d).transpose(1, 2)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.to(keys.dtype), keys, values, 0.0, False, attn_mask=self.mask, scale=scale
        )
        out = out.transpose(1, 2).reshape(x * n, r, g, d)
        lse = lse.transpose(1, 2).reshape(x * n, r, g)
        if self.real is not None:
            out, lse = out[self.real], lse[self.real]
        return out.to(query.dtype), lse.to(query.dtype)


def _as_slice(index: torch.Tensor) -> torch.Tensor | slice:
    """The same places as a slice, where they lie behind one another: reading them is then no copy."""
    first = int(index[0])
    if torch.equal(index, torch.arange(first, first + len(index))):
        return slice(first, first + len(index))
    return index


def in_buckets(rows: list[Sequence]) -> list[Sequence]:
    """The rows in an order in which those of one call lie behind one another: by the length of their shared prompt."""
    return sorted(rows, key=lambda s: _bucket(s.shared_pages) if s.group is not None and s.shared_pages else -1)


def _bucket(pages: int) -> int:
    """Contexts of more than half and up to ``2 ** bucket`` pages are one call."""
    return int(pages - 1).bit_length()


class Cascade:
    """The slabs of the running rows, from step to step.

    Args:
        most_bytes: what slabs may take together; 0 for none.
    """

    def __init__(self, cache: PagedCache, most_bytes: int):
        self.cache, self.most_bytes = cache, most_bytes
        self.longest = 0  # a layer whose window is shorter than this reads pages from then on: its slabs have gaps
        self._own: list[Slab] = []
        self._shared: list[Slab] = []

    def drop(self) -> None:
        self.longest, self._own, self._shared = 0, [], []

    @property
    def bytes(self) -> int:
        return sum(slab.bytes for slab in (*self._own, *self._shared))

    def parts(self, rows: list[Sequence]) -> tuple[list[_Part], list[_Part]]:
        """Own parts, which cover every row once, and shared parts."""
        groups: dict[object, list[int]] = {}
        for i, s in enumerate(rows):
            if s.group is not None and s.shared_pages:
                groups.setdefault(s.group, []).append(i)
        return self._own_parts(rows), self._shared_parts(rows, groups)

    def _mask(self, seen: np.ndarray, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        """(X, 1, 1, L) additive mask of the first ``seen`` positions."""
        if (seen == width).all():
            return None
        hidden = torch.from_numpy(np.arange(width)[None] >= seen[:, None])[:, None, None]
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))

    # own parts

    def _start(self, s: Sequence) -> int:
        return s.shared_pages * self.cache.shape.page_size if s.group is not None else 0

    def _own_parts(self, rows: list[Sequence]) -> list[_Part]:
        index = {id(s): i for i, s in enumerate(rows)}
        kept, left = self._kept(rows, index)
        if len(kept) > MOST_SLABS:
            kept, left = {}, list(range(len(rows)))
        self._own = [slab for slab, _ in kept.values()]
        page = self.cache.shape.page_size
        buckets: dict[int, list[int]] = {}
        for i in left:
            own = rows[i].length - self._start(rows[i])
            buckets.setdefault(_bucket(-(-own // page)), []).append(i)
        parts = [self._slab_part(slab, live) for slab, live in kept.values()]
        for members in buckets.values():
            parts.append(self._new_part(rows, members))
        return parts

    def _kept(self, rows: list[Sequence], index: dict[int, int]):
        """Slabs that go on, with the row of each live context; and the rows that no slab has."""
        kept: dict[int, tuple[Slab, dict[int, int]]] = {}
        covered: set[int] = set()
        for slab in self._own:
            live: dict[int, int] = {}
            for x, s in enumerate(slab.owners):
                assert isinstance(s, Sequence)
                i = index.get(id(s))
                if i is None or slab.pages[x] is not s.pages or slab.start[x] != self._start(s):
                    continue
                if slab.held[x] == s.length - 1 - slab.start[x] and slab.held[x] < slab.capacity:
                    live[x] = i
            if live and 4 * len(live) >= 3 * len(slab.owners):
                kept[id(slab)] = (slab, live)
                covered.update(live.values())
        return kept, [i for i in range(len(rows)) if i not in covered]

    def _slab_part(self, slab: Slab, live: dict[int, int]) -> _Part:
        contexts, rows = (torch.tensor(list(x)) for x in (live.keys(), live.values()))
        places = contexts * slab.capacity + torch.from_numpy(slab.held[contexts.numpy()])
        slab.held[contexts.numpy()] += 1
        length = int(slab.held[contexts.numpy()].max())
        every = torch.full((len(slab.owners), 1), int(rows[0]))
        every[contexts, 0] = rows
        real = None if len(live) == len(slab.owners) else contexts
        mask = self._mask(np.minimum(slab.held, length), length, slab.dtype)
        return _Part(every, real, mask, length, slab=slab, new=(places, _as_slice(rows)))

    def _new_part(self, rows: list[Sequence], members: list[int]) -> _Part:
        """A slab for these rows, with room for a while; gathered pages where the slabs' cap does not allow one."""
        page = self.cache.shape.page_size
        starts = [self._start(rows[i]) for i in members]
        own = np.array([rows[i].length - start for i, start in zip(members, starts, strict=True)])
        longest = int(own.max())
        ahead = max(1 + rows[i].remaining for i in members)
        capacity = -(-(longest + min(ahead, max(32, longest // 2))) // 16) * 16
        if self._fits(len(members), capacity):
            sources = [(rows[i], rows[i].pages, start, rows[i].length - 1 - start)
                       for i, start in zip(members, starts, strict=True)]  # fmt: skip
            slab = Slab(self.cache, sources, capacity)
            self._own.append(slab)
            return self._slab_part(slab, dict(enumerate(members)))
        table = page_table([rows[i].pages[start // page :] for i, start in zip(members, starts, strict=True)],
                           -(-longest // page))  # fmt: skip
        width = table.shape[1] * page
        mask = self._mask(own, width, self.cache.shape.dtype)
        return _Part(torch.tensor(members)[:, None], None, mask, width, table=torch.from_numpy(table).view(-1))

    def _fits(self, contexts: int, capacity: int) -> bool:
        shape = self.cache.shape
        itemsize = torch.promote_types(shape.dtype, torch.float32).itemsize
        wanted = 2 * shape.layers * contexts * shape.heads * capacity * shape.size * itemsize
        return self.bytes + wanted <= self.most_bytes

    # shared parts

    def _shared_parts(self, rows: list[Sequence], groups: dict[object, list[int]]) -> list[_Part]:
        self._shared = [s for s in self._shared if 2 * sum(o in groups for o in s.owners) >= len(s.owners)]
        covered = {owner for slab in self._shared for owner in slab.owners}
        page = self.cache.shape.page_size
        buckets: dict[int, list[object]] = {}
        for group, members in groups.items():
            if group not in covered:
                buckets.setdefault(_bucket(rows[members[0]].shared_pages), []).append(group)
        parts = []
        for batch in buckets.values():
            seen = np.array([rows[groups[g][0]].shared_pages * page for g in batch])
            if self._fits(len(batch), int(seen.max())):
                sources = [(g, rows[groups[g][0]].pages, 0, int(n)) for g, n in zip(batch, seen, strict=True)]
                self._shared.append(Slab(self.cache, sources, int(seen.max())))
                continue
            table = page_table([rows[groups[g][0]].pages[: n // page] for g, n in zip(batch, seen, strict=True)],
                               int(seen.max()) // page)  # fmt: skip
            mask = self._mask(seen, int(seen.max()), self.cache.shape.dtype)
            queries, real = _queries([groups[g] for g in batch])
            parts.append(_Part(queries, real, mask, int(seen.max()), table=torch.from_numpy(table).view(-1)))
        for slab in self._shared:
            queries, real = _queries([groups.get(owner, []) for owner in slab.owners])
            parts.append(_Part(queries, real, self._mask(slab.held, slab.capacity, slab.dtype), slab.capacity, slab))
        return parts


def _queries(members: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(X, N) rows, padded with any, and the places of the real ones (None if all are)."""
    most, some = max(len(m) for m in members), next(m[0] for m in members if m)
    index = torch.tensor([m + [some] * (most - len(m)) for m in members])
    real = [x * most + j for x, m in enumerate(members) for j in range(len(m))]
    return index, None if len(real) == index.numel() else torch.tensor(real)


class CascadeLayout(Writes):
    """One token a row on a CPU. Layers with a soft-cap, or whose window is shorter than a row, gather instead."""

    def __init__(self, cascade: Cascade, rows: list[Sequence]):
        cache = cascade.cache
        page = cache.shape.page_size
        slots = [slots_of(s.pages, s.length - 1, 1, page)[0] for s in rows]
        super().__init__(cache, torch.from_numpy(np.array(slots)))
        self._rows, self._cascade = rows, cascade
        cascade.longest = max(cascade.longest, max(s.length for s in rows))
        self._gather: GatherLayout | None = None
        self._parts: tuple[list[_Part], list[_Part]] | None = None

    def attend(self, layer, query, key, value, options: Options):
        if options.softcap is not None or (options.window is not None and options.window < self._cascade.longest):
            if self._gather is None:
                self._gather = GatherLayout(self.cache, *decode_table(self.cache, self._rows))
            return self._gather.attend(layer, query, key, value, options)
        self.write(layer, key, value)
        if self._parts is None:
            self._parts = self._cascade.parts(self._rows)
        own, shared = self._parts
        (b, h, d), g = query.shape, key.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        q = query.view(b, g, h // g, d).transpose(1, 2).to(wide).contiguous()
        if len(own) == 1 and isinstance(own[0].where, slice):  # it is all rows then
            out, lse = own[0].attend(q, own[0].context(self.cache, layer, key, value), options.scale)
        else:
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
            for part in own:
                context = part.context(self.cache, layer, key, value)
                out[part.where], lse[part.where] = part.attend(q, context, options.scale)
        for part in shared:
            partial, partial_lse = part.attend(q, part.context(self.cache, layer, key, value), options.scale)
            share = torch.sigmoid(partial_lse - lse[part.where])[..., None]
            out[part.where] = torch.lerp(out[part.where], partial, share)
        return out.transpose(1, 2).reshape(b, h, d).to(query.dtype)
