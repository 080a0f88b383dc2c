"""The native engine under random mixes of requests, tiny page pools and budgets, and aborts: every request ends with
the tokens that it gets alone."""

from __future__ import annotations

import functools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_model, make_tokenizer

from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.native import NativeEngine
from verl.rollout.native.blocks import BlockManager
from verl.rollout.native.runner import Runner

ROOTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21], list(range(30, 47))]


class GrowingRunner(Runner):
    """Takes memory piece by piece, like a large cache on a GPU."""

    grows = True

    def allocate(self, num_pages: int, most: int) -> None:
        self.cache.allocate(min(most, num_pages + num_pages % 3))


class GrowingEngine(NativeEngine):
    take_at_once = 0

    def _make_runner(self, twin, shape):
        return GrowingRunner(twin, shape, self.settings)


@functools.cache
def model_of(family: str):
    return make_model(family, dtype=torch.float64)


@functools.cache
def alone(family: str, prompt: tuple[int, ...], params: SamplingParams, seed: int):
    engine = NativeEngine(make_twin(model_of(family)), make_tokenizer(), (1,), page_size=3)
    done = engine.generate([Request("alone", np.array(prompt), params, seed)])[0]
    return done.token_ids.tolist(), done.log_probs, done.finish_reason


@st.composite
def requests(draw):
    prompts = st.builds(
        lambda root, cut, tail: tuple(root[: max(1, cut)] + tail),
        st.sampled_from(ROOTS), st.integers(1, 17), st.lists(st.integers(5, 60), max_size=2),
    )  # fmt: skip
    params = st.builds(
        lambda least, more, **others: SamplingParams(max_tokens=least + more, min_tokens=least, **others),
        least=st.sampled_from([0, 0, 1, 6]),
        more=st.integers(1, 14),
        temperature=st.sampled_from([0.0, 1.0, 1.4]),
        top_k=st.sampled_from([-1, 5]),
        stop=st.sampled_from([(), ("a",), ("b", "7", "cd"), tuple("EFGHIJKLM")]),
        stop_token_ids=st.sampled_from([(), (30, 31, 32), tuple(range(2, 60, 4))]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.6, 0.8]),
        ignore_eos=st.booleans(),
    )
    distinct = draw(st.lists(st.tuples(prompts, params), min_size=1, max_size=5))
    chosen = draw(st.lists(st.tuples(st.sampled_from(distinct), st.integers(0, 5)), min_size=1, max_size=9))
    return [Request(f"r{i}", np.array(p), k, seed) for i, ((p, k), seed) in enumerate(chosen)]


@given(
    family=st.sampled_from(["llama", "gemma2"]),
    wanted=requests(),
    pages=st.integers(14, 40),
    budget=st.integers(1, 30),
    rows=st.integers(1, 6),
    late=st.integers(0, 8),
    aborts=st.dictionaries(st.integers(0, 8), st.integers(1, 12), max_size=2),
    kind=st.sampled_from([NativeEngine, GrowingEngine]),
    slabs=st.sampled_from([0, 20_000, 1 << 30]),
)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_with_the_tokens_that_it_gets_alone(
    family, wanted, pages, budget, rows, late, aborts, kind, slabs
):
    engine = kind(
        make_twin(model_of(family)), make_tokenizer(), (1,), page_size=3, max_pages=pages,
        max_num_batched_tokens=budget, max_num_seqs=rows, host_slab_bytes=slabs,
    )  # fmt: skip
    first, rest = wanted[: late + 1], wanted[late + 1 :]
    engine.submit(first)
    done, polls = {}, 0
    while engine.pending or rest:
        polls += 1
        if rest and polls == 3:
            engine.submit(rest)
            rest = []
        engine.abort([f"r{i}" for i, when in aborts.items() if when == polls])
        done.update((c.request_id, c) for c in engine.poll())
        assert polls < 2000
        held = [p for s in [*engine.scheduler.running, *engine.scheduler.prefilling] for p in s.pages]
        assert engine.blocks.used == len(set(held)) <= engine.runner.cache.num_pages <= pages
        assert engine.runner.cascade.bytes <= slabs
    assert set(done) == {r.id for r in wanted} and engine.blocks.used == 0
    for request in wanted:
        tokens, log_probs, reason = alone(family, tuple(request.prompt_ids), request.params, request.seed)
        got = done[request.id]
        if got.finish_reason == "abort":
            assert got.token_ids.tolist() == tokens[: len(got.token_ids)]
        else:
            assert (got.token_ids.tolist(), got.finish_reason) == (tokens, reason)
        np.testing.assert_allclose(got.log_probs, log_probs[: len(got.token_ids)], atol=1e-5)


def test_preempted_rows_write_the_same_tokens():
    prompts = [list(range(10, 10 + n)) for n in (3, 9, 14, 5, 9)]
    params = SamplingParams(30, temperature=1.2, ignore_eos=True)
    wanted = [Request(f"r{i}", np.array(p), params, i) for i, p in enumerate(prompts)]

    def run(**limits):
        engine = NativeEngine(make_twin(model_of("llama")), make_tokenizer(), (1,), page_size=3, **limits)
        return engine, [c.token_ids.tolist() for c in engine.generate(wanted)]

    roomy, expected = run()
    tight, got = run(max_pages=17)
    assert roomy.scheduler.preemptions == 0 and tight.scheduler.preemptions > 0
    assert got == expected


@given(st.lists(st.tuples(st.sampled_from("tgsmpf"), st.integers(0, 6)), max_size=60))
@settings(deadline=None)
def test_every_page_is_free_idle_or_owned(steps):
    """Random takes, gives, shares, matches and publications against a plain count of owners."""
    blocks, tokens = BlockManager(9, 2), np.arange(100)
    held: list[list[int]] = []
    for kind, n in steps:
        if kind == "t" and (pages := blocks.take(n)) is not None:
            assert len(set(pages)) == n and not set(pages) & {p for h in held for p in h}
            held.append(pages)
        elif kind == "g" and held:
            blocks.give(held.pop(n % len(held)))
        elif kind == "s" and held:
            blocks.share(held[n % len(held)])
            held.append(list(held[n % len(held)]))
        elif kind == "p" and held:
            pages = held[n % len(held)]
            blocks.publish(tokens[n : n + 2 * len(pages)], pages)
        elif kind == "m":
            held.append(blocks.match(tokens[n : n + 9]))
        elif kind == "f":
            blocks.forget()
            assert blocks.match(tokens) == []
        owned = {p for h in held for p in h}
        assert blocks.used == len(owned) and blocks.available == 9 - len(owned) and 0 not in owned
    for pages in held:
        blocks.give(pages)
    assert blocks.available == 9
