"""Triton kernels: attention over the paged cache, for one token a row and for chunks of prompts.

The cache of a layer is (pages, page_size, G, D). Soft-cap: c * tanh(s / c), written with exp as
c * (1 - 2 / (1 + exp(2 s / c))). Sums are float32; products of float32 inputs are IEEE, not TF32.

Dimension key: B rows, H query heads, G key-value heads, R = H / G, D head size, S parts of a long context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from verl.rollout.native.attention import Options

BLOCK_QUERIES = 64


@triton.jit
def _scores(q, k, scale, softcap, HAS_CAP: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_CAP:
        s = softcap * (1 - 2 / (1 + tl.exp(2 * s / softcap)))
    return s


@triton.jit
def _attend(
    query, keys, values, table_row, g, d, d_ok, seen_from, start, end, m, l, acc, scale, softcap,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, HAS_CAP: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Online softmax of (M, DP) queries over the cached positions ``start`` to ``end`` of one row's pages."""
    for at in range(start, end, BN):
        n = at + tl.arange(0, BN)
        ok = n < end
        page = tl.load(table_row + n // PAGE, mask=ok, other=0).to(tl.int64)
        slot = ((page * PAGE + n % PAGE) * G + g)[:, None] * D + d[None, :]
        k = tl.load(keys + slot, mask=ok[:, None] & d_ok[None, :], other=0.0)
        seen = ok[None, :]
        if WINDOWED:
            seen = seen & (n[None, :] >= seen_from[:, None])
        s = tl.where(seen, _scores(query, k, scale, softcap, HAS_CAP), -1e30)
        m_next = tl.maximum(m, tl.max(s, 1))
        p = tl.where(seen, tl.exp(s - m_next[:, None]), 0.0)
        shrink = tl.exp(m - m_next)
        l = l * shrink + tl.sum(p, 1)
        v = tl.load(values + slot, mask=ok[:, None] & d_ok[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_next
    return m, l, acc


@triton.jit
def _store_part(part, part_lse, place, d, d_ok, ok, m, l, acc, D: tl.constexpr):
    """What a part of the context gives by itself, and its log-sum-exp."""
    o = acc / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(part + place[:, None] * D + d[None, :], o, mask=ok[:, None] & d_ok[None, :])
    tl.store(part_lse + place, tl.where(l > 0, m + tl.log(tl.where(l > 0, l, 1.0)), -1e30), mask=ok)


@triton.jit
def _shared_kernel(
    q, keys, values, table, positions, shared, lead, part, part_lse,
    stride_q, stride_table, scale, softcap, window,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
    PAGE: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, SHARED: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """One program a part of the first ``shared`` tokens of ``lead`` neighbours, for all their queries of a head: the
    pages that these rows share are read once. Programs of rows that lead none have nothing to do."""
    b, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(lead + b)
    if count > 0:
        common = tl.load(shared + b)
        d = tl.arange(0, DP)
        d_ok = d < D
        i = tl.arange(0, M)
        ok = i < count * R
        row = b + i // R
        head = g * R + i % R
        query = tl.load(
            q + row[:, None] * stride_q + head[:, None] * D + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0
        )
        seen_from = tl.load(positions + row, mask=ok, other=0).to(tl.int32) - window + 1
        m = tl.full([M], -1e30, tl.float32)
        l = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        per_split = tl.cdiv(tl.cdiv(common, SHARED), BN) * BN
        start = split * per_split
        end = tl.minimum(start + per_split, common)
        m, l, acc = _attend(
            query, keys, values, table + b * stride_table, g, d, d_ok, seen_from, start, end, m, l, acc,
            scale, softcap, G, D, PAGE, BN, HAS_CAP, True,
        )  # fmt: skip
        _store_part(part, part_lse, (row * (G * R) + head) * SPLITS + split, d, d_ok, ok, m, l, acc, D)


@triton.jit
def _decode_kernel(
    q, k_new, v_new, keys, values, table, positions, shared, out, part, part_lse,
    stride_q, stride_kn, stride_vn, stride_table, scale, softcap, window,
    G: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, SHARED: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """One program a row, key-value head and part of the context. The first ``SHARED`` parts of a row with ``shared``
    tokens are :func:`_shared_kernel`'s. The first of the others writes the row's key and value to the cache, and
    takes them from the inputs instead of waiting for the write."""
    b, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    common = 0
    skipped = 0
    if SHARED > 0:
        common = tl.load(shared + b)
        skipped = tl.where(common > 0, SHARED, 0)
    if split >= skipped:
        position = tl.load(positions + b).to(tl.int32)
        d = tl.arange(0, DP)
        d_ok = d < D
        r = tl.arange(0, RP)
        r_ok = r < R
        heads = g * R + r
        both = r_ok[:, None] & d_ok[None, :]
        query = tl.load(q + b * stride_q + heads[:, None] * D + d[None, :], mask=both, other=0.0)
        first = tl.maximum(position - window + 1, common)
        per_split = tl.cdiv(tl.cdiv(position - first, SPLITS - skipped), BN) * BN
        start = first + (split - skipped) * per_split
        end = tl.minimum(start + per_split, position)
        m = tl.full([RP], -1e30, tl.float32)
        l = tl.zeros([RP], tl.float32)
        acc = tl.zeros([RP, DP], tl.float32)
        if split == skipped:
            k = tl.load(k_new + b * stride_kn + g * D + d, mask=d_ok, other=0.0)
            v = tl.load(v_new + b * stride_vn + g * D + d, mask=d_ok, other=0.0)
            page = tl.load(table + b * stride_table + position // PAGE).to(tl.int64)
            slot = ((page * PAGE + position % PAGE) * G + g) * D + d
            tl.store(keys + slot, k, mask=d_ok)
            tl.store(values + slot, v, mask=d_ok)
            s = tl.sum(query.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
            if HAS_CAP:
                s = softcap * (1 - 2 / (1 + tl.exp(2 * s / softcap)))
            m = s
            l += 1.0
            acc += v.to(tl.float32)[None, :]
        m, l, acc = _attend(
            query, keys, values, table + b * stride_table, g, d, d_ok, position, start, end, m, l, acc,
            scale, softcap, G, D, PAGE, BN, HAS_CAP, False,
        )  # fmt: skip
        if SPLITS == 1:
            o = (acc / l[:, None]).to(out.dtype.element_ty)
            tl.store(out + (b * G * R + heads)[:, None] * D + d[None, :], o, mask=both)
        else:
            _store_part(part, part_lse, (b * G * R + heads) * SPLITS + split, d, d_ok, r_ok, m, l, acc, D)


@triton.jit
def _combine_kernel(part, part_lse, out, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr):
    """Merge the parts of one row and head by their log-sum-exps."""
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, PADDED), tl.arange(0, DP)
    ok = s < SPLITS
    lse = tl.load(part_lse + row * SPLITS + s, mask=ok, other=-float("inf"))
    weight = tl.exp(lse - tl.max(lse, 0))
    weight = weight / tl.sum(weight, 0)
    there = ok[:, None] & (d < D)[None, :]
    x = tl.load(part + (row * SPLITS + s)[:, None] * D + d[None, :], mask=there, other=0.0)
    tl.store(out + row * D + d, tl.sum(x * weight[:, None], 0).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _prefill_kernel(
    q, keys, values, table, block_row, block_start, starts, lengths, offsets, out,
    stride_q, stride_table, scale, softcap, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """One program a block of a chunk's queries and a head; keys and values, its own too, come from the cache."""
    block, h = tl.program_id(0), tl.program_id(1)
    row = tl.load(block_row + block)
    local = tl.load(block_start + block) + tl.arange(0, BM)
    start, length = tl.load(starts + row), tl.load(lengths + row)
    token = tl.load(offsets + row) + local
    position = start + local
    d = tl.arange(0, DP)
    d_ok = d < D
    q_ok = local < length
    query = tl.load(q + token[:, None] * stride_q + h * D + d[None, :], mask=q_ok[:, None] & d_ok[None, :], other=0.0)
    m = tl.full([BM], -1e30, tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    first = tl.maximum(start + tl.load(block_start + block) - window + 1, 0) // BN * BN
    end = tl.minimum(start + tl.load(block_start + block) + BM, start + length)
    g = h // (H // G)
    for at in range(first, end, BN):
        n = at + tl.arange(0, BN)
        page = tl.load(table + row * stride_table + n // PAGE, mask=n < end, other=0).to(tl.int64)
        slot = ((page * PAGE + n % PAGE) * G + g)[:, None] * D + d[None, :]
        inside = (n < end)[:, None] & d_ok[None, :]
        k = tl.load(keys + slot, mask=inside, other=0.0)
        distance = position[:, None] - n[None, :]
        seen = (distance >= 0) & (distance < window) & (n < end)[None, :]
        s = tl.where(seen, _scores(query, k, scale, softcap, HAS_CAP), -1e30)
        m_next = tl.maximum(m, tl.max(s, 1))
        p = tl.where(seen, tl.exp(s - m_next[:, None]), 0.0)
        shrink = tl.exp(m - m_next)
        l = l * shrink + tl.sum(p, 1)
        v = tl.load(values + slot, mask=inside, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_next
    o = acc / tl.where(l > 0, l, 1.0)[:, None]
    where = token.to(tl.int64)[:, None] * (H * D) + h * D + d[None, :]
    tl.store(out + where, o.to(out.dtype.element_ty), mask=q_ok[:, None] & d_ok[None, :])


NO_WINDOW = 1 << 30


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _packed(x: torch.Tensor) -> torch.Tensor:
    """(T, heads, D) whose last two dimensions lie together; only the first may have a stride of its own."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@dataclass(frozen=True)
class Cut:
    """A context in ``parts``, read ``block`` positions at a time by ``warps`` with ``stages`` loads under way."""

    parts: int
    block: int
    warps: int = 4
    stages: int = 3


def cuts_for(rows: int, heads: int, size: int, itemsize: int, sharing: bool) -> tuple[Cut, Cut | None]:
    """How a row's own tokens are cut, and those that it shares; measured on an H200 at 64 to 640 tokens a row.

    Args:
        heads, size: key-value heads and their padded size. Where a token's keys are small, reading them for each row
            costs less than the second kernel.
    """
    parts = 1
    while rows * heads * parts < 512 and parts < 16:
        parts *= 2
    narrow = size * itemsize > 256
    if not sharing or heads * size * itemsize < 512:
        return Cut(parts, 32 if narrow else 64), None
    shared = min(4, max(2, 2048 // (rows * heads)))
    if parts == 1 and rows * heads < 2048:
        parts = 2
    return (Cut(parts, 32), Cut(2, 32, stages=2)) if narrow else (Cut(parts, 32, 2), Cut(shared, 32))


def neighbours(query_heads_a_key: int) -> int:
    """How many rows one program serves where they share pages."""
    return max(1, 64 // query_heads_a_key)


def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    table: torch.Tensor, positions: torch.Tensor, options: Options,
    sharing: tuple[torch.Tensor, torch.Tensor] | None = None, cuts: tuple[Cut, Cut | None] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write (B, G, D) keys and values to their pages and attend: (B, H, D) queries in, (B, H, D) out.

    Args:
        keys, values: (pages, page_size, G, D) of one layer. table: (B, W) int32 pages. positions: (B,) int.
        sharing: (B,) int32 each: how many first tokens of a row lie in pages that its neighbours have too, and, for
            the first of these rows, how many rows they are (at most ``neighbours(H / G)``; 0 for the others).
        cuts: instead of what :func:`cuts_for` says.
    """
    b, h, d = query.shape
    page, g = keys.shape[1], keys.shape[2]
    query, key, value = _packed(query), _packed(key), _packed(value)
    out = torch.empty(b, h, d, dtype=query.dtype, device=query.device)
    own, common = cuts or cuts_for(b, g, _padded(d), query.element_size(), sharing is not None)
    shared_parts = common.parts if common else 0
    splits = own.parts + shared_parts
    part, lse = out, out
    if splits > 1:
        part = torch.empty(b, h, splits, d, dtype=torch.float32, device=query.device)
        lse = torch.empty(b, h, splits, dtype=torch.float32, device=query.device)
    scalars = (options.scale, options.softcap or 1.0, options.window or NO_WINDOW)
    sizes = {"G": g, "R": h // g, "D": d, "DP": _padded(d), "PAGE": page}
    kinds = {"SPLITS": splits, "SHARED": shared_parts, "HAS_CAP": options.softcap is not None}
    shared = positions
    if common and sharing:
        shared, lead = sharing
        _shared_kernel[(b, g, shared_parts)](
            query, keys, values, table, positions, shared, lead, part, lse, query.stride(0), table.stride(0), *scalars,
            M=_padded(neighbours(h // g) * (h // g)), BN=common.block, num_warps=common.warps,
            num_stages=common.stages, **sizes, **kinds,
        )  # fmt: skip
    _decode_kernel[(b, g, splits)](
        query, key, value, keys, values, table, positions, shared, out, part, lse,
        query.stride(0), key.stride(0), value.stride(0), table.stride(0), *scalars,
        RP=_padded(h // g), BN=own.block, num_warps=own.warps, num_stages=own.stages, **sizes, **kinds,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(b * h,)](
            part, lse, out, D=d, DP=_padded(d), SPLITS=splits, PADDED=triton.next_power_of_2(splits), num_warps=1
        )
    return out


def prefill_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor], spans: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: Options,
) -> torch.Tensor:  # fmt: skip
    """(T, H, D) packed queries of chunks whose keys and values are in the cache already.

    Args:
        table: (chunks, W) int32 pages. blocks: for each block of ``BLOCK_QUERIES`` queries its chunk and its first
            query in it. spans: first position, length and first packed token of each chunk. All int32.
    """
    t, h, d = query.shape
    page, g = keys.shape[1], keys.shape[2]
    query = _packed(query)
    out = torch.empty(t, h, d, dtype=query.dtype, device=query.device)
    small = _padded(d) * query.element_size() <= 256
    _prefill_kernel[(len(blocks[0]), h)](
        query, keys, values, table, *blocks, *spans, out,
        query.stride(0), table.stride(0), options.scale, options.softcap or 1.0, options.window or NO_WINDOW,
        H=h, G=g, D=d, DP=_padded(d), PAGE=page, BM=BLOCK_QUERIES, BN=64 if small else 32,
        HAS_CAP=options.softcap is not None, num_warps=4, num_stages=3 if small else 2,
    )  # fmt: skip
    return out
