"""Drawing with per-row parameters, and the shared-prefix attention, against their plain counterparts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rollout import Request, SamplingParams
from verl.rollout.native.attention import Options
from verl.rollout.native.cache import CacheShape, PagedCache
from verl.rollout.native.cascade import Cascade, CascadeLayout
from verl.rollout.native.layouts import GatherLayout, PrefillLayout, decode_table
from verl.rollout.native.row_sampling import Adjusting, RowSampling, draw_per_row, kind_of
from verl.rollout.native.scheduler import Chunk
from verl.rollout.native.sequence import Sequence
from verl.rollout.sampling import draw

KINDS = st.builds(
    SamplingParams,
    max_tokens=st.just(4),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([-1, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 0.7]),
    min_tokens=st.sampled_from([0, 0, 2]),
)


@given(st.lists(KINDS, min_size=1, max_size=6), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_rows_of_any_parameters_draw_what_each_draws_alone(kinds, seed):
    torch.manual_seed(seed)
    logits = torch.randn(len(kinds), 301) * 3
    rows = [Sequence(Request(str(i), np.array([1]), k, seed=seed + i), i) for i, k in enumerate(kinds)]
    for i, row in enumerate(rows):
        row.tokens = torch.randint(301, (i % 4,)).tolist()
        row.stops = frozenset(logits[i].topk(i).indices.tolist())
    sampling = RowSampling.empty(len(rows), logits.device)
    sampling.fill(rows, 301)
    adjusting = Adjusting.of(rows, 301, logits.device)
    tokens, log_probs, sampled = draw_per_row(logits, sampling, kind=kind_of(rows), triton=False, adjusting=adjusting)
    for i, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        one = [torch.tensor([x], dtype=torch.int32) for x in (row.request.seed, len(row.tokens))]
        token, plain, cut = draw(logits[i : i + 1], kind, *one, [row.written()])
        assert int(tokens[i]) == int(token)
        torch.testing.assert_close(log_probs[i : i + 1], plain, atol=1e-5, rtol=1e-5)
        if kind.filtered:
            torch.testing.assert_close(sampled[i : i + 1], cut, atol=1e-5, rtol=1e-5)
        else:
            assert torch.isnan(sampled[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (9, 3)])
@pytest.mark.parametrize("slab_bytes", [0, 1 << 24])
def test_the_shared_prefix_is_read_once_with_the_same_result(dtype, heads, slab_bytes):
    """Groups of several sizes, prefix lengths and own lengths, and rows without a group, against gathered pages."""
    torch.manual_seed(0)
    h, g, d, page = *heads, 16, 4
    shape = CacheShape(1, g, d, page, dtype, torch.device("cpu"))
    caches = [PagedCache(shape) for _ in range(2)]
    caches[0].allocate(200)
    caches[0].data.normal_()
    caches[1].data = caches[0].data.clone()
    rows, free = [], iter(range(1, 200))
    for members, shared in ((3, 2), (2, 5), (1, 4), (4, 0), (5, 1)):
        prefix, group = [next(free) for _ in range(shared)], object()
        for _ in range(members):
            own = int(torch.randint(1, 17, ()))
            length = shared * page + own
            row = Sequence(Request(f"{len(rows)}", np.arange(length), SamplingParams(4)), len(rows))
            row.pages = prefix + [next(free) for _ in range(-(-own // page))]
            row.group, row.shared_pages = (group, shared) if members > 1 else (None, 0)
            rows.append(row)
    query, key, value = (torch.randn(len(rows), n, d, dtype=dtype) for n in (h, g, g))
    options = Options(0.25, None, None)
    cascade = Cascade(caches[0], slab_bytes)
    got = CascadeLayout(cascade, rows).attend(0, query, key, value, options)
    assert bool(cascade.bytes) == bool(slab_bytes)
    want = GatherLayout(caches[1], *decode_table(caches[1], rows)).attend(0, query, key, value, options)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    assert torch.equal(caches[0].data, caches[1].data)


@pytest.mark.parametrize("options", [Options(0.3, None, None), Options(0.3, 5, None), Options(0.3, 9, 4.0)])
def test_prefill_in_chunks_equals_prefill_at_once(options):
    torch.manual_seed(0)
    shape = CacheShape(1, 2, 8, 4, torch.float64, torch.device("cpu"))
    rows = [Sequence(Request(str(i), np.arange(n), SamplingParams(4)), i) for i, n in enumerate((13, 6))]
    rows[0].pages, rows[1].pages = [3, 1, 7, 2], [5, 4]
    q, k, v = (torch.randn(19, n, 8, dtype=torch.float64) for n in (4, 2, 2))

    def run(cuts):
        cache, out = PagedCache(shape), torch.empty_like(q)
        cache.allocate(8)
        for cut in cuts:
            chunks = [Chunk(rows[i], start, length) for i, start, length in cut]
            index = np.concatenate([np.arange(c.start, c.start + c.length) + 13 * c.sequence.order for c in chunks])
            out[index] = PrefillLayout(cache, chunks).attend(0, q[index], k[index], v[index], options)
        return out

    whole = run([[(0, 0, 13), (1, 0, 6)]])
    pieces = run([[(0, 0, 5)], [(0, 5, 7), (1, 0, 2)], [(0, 12, 1), (1, 2, 4)]])
    torch.testing.assert_close(pieces, whole, atol=1e-12, rtol=1e-12)
