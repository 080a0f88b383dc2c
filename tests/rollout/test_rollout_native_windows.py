"""The steps of a GPU, run by the host: windows, their overlap, sampling on static tensors and stops, without graphs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_model, make_tokenizer

from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.native import NativeEngine
from verl.rollout.native.graphs import GraphRunner

PROMPTS = [[7, 8, 9], list(range(10, 50)), [20], [7, 8, 9], list(range(10, 26)), list(range(30, 63))]


class HostGraphRunner(GraphRunner):
    """A graph runner on a device that has no graphs."""

    begun_ahead = 0

    def allocate(self, num_pages: int, most: int) -> None:
        self.cache.allocate(num_pages)

    def _join_linears(self) -> None:
        pass

    def _launch_next(self, window, rows):
        begun = super()._launch_next(window, rows)
        self.begun_ahead += begun is not None
        return begun


class HostGraphEngine(NativeEngine):
    def _make_runner(self, twin, shape):
        return HostGraphRunner(twin, shape, self.settings)


@functools.cache
def model_of(family: str):
    return make_model(family, dtype=torch.float64)


def engine_for(kind, family="llama", **limits):
    limits = {"page_size": 4, **({"graphs": False, "triton": False} if kind is HostGraphEngine else {}), **limits}
    return kind(make_twin(model_of(family)), make_tokenizer(), (1,), **limits)


def requests_for(params, prompts=PROMPTS):
    return [Request(f"r{i}", np.array(p), params, seed=100 + i) for i, p in enumerate(prompts)]


def tokens_of(completions):
    return [(c.token_ids.tolist(), c.finish_reason) for c in completions]


KINDS = {
    "plain": SamplingParams(37, temperature=1.1),
    "filtered": SamplingParams(37, temperature=1.1, top_k=7),
    "adjusted": SamplingParams(37, temperature=1.1, repetition_penalty=1.4, min_tokens=20),
    "stop strings": SamplingParams(37, temperature=1.1, stop=("a", "7", "kL"), ignore_eos=True),
    "greedy": SamplingParams(37, temperature=0, ignore_eos=True),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_windows_write_what_single_steps_write(name, overlap):
    requests = requests_for(KINDS[name], PROMPTS * 2)
    wanted = engine_for(NativeEngine).generate(requests)
    engine = engine_for(HostGraphEngine, overlap=overlap, window=5)
    done = engine.generate(requests)
    assert tokens_of(done) == tokens_of(wanted)
    assert (engine.runner.begun_ahead > 0) == overlap
    for a, b in zip(done, wanted, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
        assert (a.sampled_log_probs is None) == (b.sampled_log_probs is None)
        if a.sampled_log_probs is not None:
            np.testing.assert_allclose(a.sampled_log_probs, b.sampled_log_probs, atol=1e-5)
    assert engine.blocks.used == 0


def test_a_window_that_was_begun_is_forgotten_with_the_weights():
    engine = engine_for(HostGraphEngine, window=4)
    params = SamplingParams(30, temperature=0, ignore_eos=True)
    engine.submit(requests_for(params))
    while engine.runner._begun is None:
        engine.poll()
    engine.abort()
    assert len(engine.poll()) == len(PROMPTS)
    engine.weights_changed()
    assert engine.runner._begun is None
    again = engine.generate(requests_for(params))
    assert tokens_of(again) == tokens_of(engine_for(NativeEngine).generate(requests_for(params)))


@given(
    family=st.sampled_from(["llama", "gemma2"]),
    chosen=st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 5)), min_size=1, max_size=8),
    pages=st.integers(30, 60),
    budget=st.integers(3, 40),
    rows=st.integers(1, 6),
    window=st.integers(1, 9),
    late=st.integers(0, 8),
    aborts=st.dictionaries(st.integers(0, 8), st.integers(1, 9), max_size=2),
)
@settings(max_examples=25, deadline=None)
def test_windows_under_random_mixes(family, chosen, pages, budget, rows, window, late, aborts):
    wanted = [Request(f"r{i}", np.array(PROMPTS[p]), KINDS[k], 100 + p) for i, (k, p) in enumerate(chosen)]
    alone = {r.id: tokens_of([lonely(family, k, p)])[0] for r, (k, p) in zip(wanted, chosen, strict=True)}
    engine = engine_for(
        HostGraphEngine, family, max_pages=pages, max_num_batched_tokens=budget, max_num_seqs=rows, window=window
    )
    engine.submit(wanted[: late + 1])
    rest, done, polls = wanted[late + 1 :], {}, 0
    while engine.pending or rest:
        polls += 1
        if polls == 3:
            engine.submit(rest)
            rest = []
        engine.abort([f"r{i}" for i, when in aborts.items() if when == polls])
        done.update((c.request_id, c) for c in engine.poll())
        assert polls < 3000
    assert set(done) == set(alone) and engine.blocks.used == 0
    for name, completion in done.items():
        tokens, reason = alone[name]
        got = completion.token_ids.tolist()
        assert (got, completion.finish_reason) == (tokens, reason) or (
            completion.finish_reason == "abort" and got == tokens[: len(got)]
        )


@functools.cache
def lonely(family: str, kind: str, prompt: int):
    return engine_for(NativeEngine, family).generate(
        [Request("alone", np.array(PROMPTS[prompt]), KINDS[kind], 100 + prompt)]
    )[0]
