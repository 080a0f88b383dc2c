"""Every sampling option in both engines against the slow obvious way: a whole forward and plain loops a token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import make_model, make_tokenizer

from verl.errors import RolloutError
from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.native import NativeEngine
from verl.rollout.native.row_sampling import Adjusting, RowSampling, draw_per_row, kind_of
from verl.rollout.native.sequence import Sequence
from verl.rollout.native.state import DecodeState
from verl.rollout.registry import make_engine
from verl.rollout.sampling import gumbel_noise

PROMPTS = [[7, 8, 9], list(range(10, 30)), [20], [7, 8, 9], [40, 41, 42, 43, 44]]
EOS = 1


def slow(model, prompt: list[int], params: SamplingParams, seed: int):
    """Tokens, log-probs of the plain and of the drawn-from distribution, finish reason."""
    tokenizer, tokens, plain, drawn_from = make_tokenizer(), [], [], []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    said = set()  # stop strings that were complete before min_tokens
    while True:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1].float().tolist()
        temperature = params.temperature or 1.0
        table = torch.log_softmax(torch.tensor(logits, dtype=torch.float64) / temperature, -1)
        for token in set(prompt + tokens):
            x = logits[token]
            logits[token] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        for token in stops if len(tokens) < params.min_tokens else ():
            logits[token] = -math.inf
        x = torch.tensor(logits, dtype=torch.float64) / temperature
        order = sorted(range(len(x)), key=lambda t: -float(x[t]))
        kept = set(order) if params.greedy else set(order[: params.top_k] if params.top_k > 0 else order)
        if not params.greedy:
            kept = {t for t in kept if float(x[t]) >= float(x[order[0]]) + math.log(params.min_p or 1e-300)}
            total, mass, nucleus = sum(math.exp(x[t]) for t in kept), 0.0, set()
            for token in order:
                if token in kept and (mass / total < params.top_p or not nucleus):
                    nucleus.add(token)
                    mass += math.exp(x[token])
            kept = nucleus
        y = torch.tensor([float(x[t]) if t in kept else -math.inf for t in range(len(x))], dtype=torch.float64)
        noise = gumbel_noise(
            torch.tensor([seed], dtype=torch.int32), torch.tensor([len(tokens)], dtype=torch.int32), len(x)
        )[0]
        token = int((y if params.greedy else y + noise).argmax())
        tokens.append(token)
        plain.append(float(table[token]))
        drawn_from.append(float(torch.log_softmax(y, -1)[token]))
        text = tokenizer.decode(tokens)
        complete = {(s, text.count(s)) for s in params.stop if s in text}
        if token in stops:
            return tokens, plain, drawn_from, "stop"
        if len(tokens) >= params.min_tokens and complete - said:
            return tokens, plain, drawn_from, "stop"
        said = complete
        if len(tokens) == params.max_tokens:
            return tokens, plain, drawn_from, "length"


OPTIONS = {
    "penalty": {"repetition_penalty": 1.7},
    "reward for repeating": {"repetition_penalty": 0.6},
    "penalty, greedy": {"repetition_penalty": 1.7, "temperature": 0},
    "minimum": {"min_tokens": 12, "stop_token_ids": tuple(range(2, 90, 3))},
    "minimum, greedy": {"min_tokens": 9, "temperature": 0, "stop_token_ids": tuple(range(3, 90, 3))},
    "stop strings after a minimum": {"min_tokens": 6, "stop": ("a", "b", "c", "7", "F", "H", "T")},
    "stop strings": {"stop": ("a", "b", "c", "7")},
    "stop ids, eos ignored": {"stop_token_ids": (11, 30, 31), "ignore_eos": True},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.6, "temperature": 0.8},
    "min-p": {"min_p": 0.2},
    "all together": {
        "top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3, "repetition_penalty": 1.2, "min_tokens": 5,
        "stop": ("a", "E"), "stop_token_ids": tuple(range(2, 90, 5)),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_an_option_does_what_the_slow_way_does(name, engine):
    model = make_model("llama", dtype=torch.float64)
    params = SamplingParams(18, **OPTIONS[name])
    requests = [Request(f"r{i}", np.array(p), params, seed=31 * i + 5) for i, p in enumerate(PROMPTS)]
    made = make_engine(engine, make_twin(model), make_tokenizer(), (EOS,), max_num_seqs=3)
    free = make_engine(engine, make_twin(model), make_tokenizer(), (EOS,)).generate(
        [Request(r.id, r.prompt_ids, SamplingParams(18, temperature=params.temperature), r.seed) for r in requests]
    )
    done = made.generate(requests)
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(done, free, strict=True))  # it does a thing
    for request, completion in zip(requests, done, strict=True):
        tokens, plain, drawn_from, reason = slow(model, request.prompt_ids.tolist(), params, request.seed)
        assert (completion.token_ids.tolist(), completion.finish_reason) == (tokens, reason)
        assert reason == "length" or len(tokens) >= params.min_tokens
        np.testing.assert_allclose(completion.log_probs, plain, atol=2e-5)
        assert (completion.sampled_log_probs is not None) == params.filtered
        if params.filtered:
            np.testing.assert_allclose(completion.sampled_log_probs, drawn_from, atol=2e-5)


def test_a_penalty_is_that_of_transformers():
    model = make_model("llama")
    params = SamplingParams(20, temperature=0, repetition_penalty=1.5)
    done = NativeEngine(make_twin(model), make_tokenizer(), (EOS,), page_size=4).generate(
        [Request(f"r{i}", np.array(p), params) for i, p in enumerate(PROMPTS)]
    )
    for prompt, completion in zip(PROMPTS, done, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.5, eos_token_id=EOS,
            pad_token_id=0, attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )[0, len(prompt) :]  # fmt: skip
        assert completion.token_ids.tolist() == expected.tolist()


def test_steps_on_static_tensors_note_what_was_written():
    """The work of a captured step, run on this device: penalty and minimum from tensors that the steps keep."""
    torch.manual_seed(0)
    kinds = [
        SamplingParams(9, temperature=0.9, repetition_penalty=3.0), SamplingParams(9, temperature=0),
        SamplingParams(9, min_tokens=5, stop_token_ids=(3, 4, 5)), SamplingParams(9, top_k=3, repetition_penalty=1.5),
    ]  # fmt: skip
    rows = [Sequence(Request(str(i), np.array([1, 2 + i]), k, seed=i), i) for i, k in enumerate(kinds)]
    for row in rows:
        row.stops = frozenset(row.request.params.stop_token_ids)
    state = DecodeState(8, 4, 8, 6, torch.device("cpu"))
    state.watch_seen(17)
    state.seen.fill_(True)  # whatever an earlier batch left
    state.fill(rows, 8, 17, np.zeros((2, 4), np.int32))
    table = torch.randn(6, 8, 17) * 2
    for step in range(6):
        adjusting = state.adjusting(8)
        drawn = draw_per_row(
            table[step], state.sampling.first(8), kind=kind_of(rows), triton=False, adjusting=adjusting
        )
        adjusting.seen.scatter_(1, drawn[0][:, None], True)
        state.advance(8, *drawn)
    read = state.take(4, 6).read()
    for i, row in enumerate(rows):
        for step in range(int(read.counts[i])):
            sampling = RowSampling.empty(1, torch.device("cpu"))
            sampling.fill([row], 17)
            one = draw_per_row(
                table[step, i : i + 1], sampling, kind=kind_of(rows), triton=False,
                adjusting=Adjusting.of([row], 17, torch.device("cpu")),
            )  # fmt: skip
            assert int(one[0]) == read.tokens[step, i]
            assert abs(float(one[1]) - read.log_probs[step, i]) < 1e-6
            row.tokens.append(int(one[0]))
        assert len(row.tokens) == 6 or (row.tokens[-1] in row.stops and len(row.tokens) > row.request.params.min_tokens)


def test_impossible_options_are_refused():
    with pytest.raises(RolloutError, match="repetition_penalty is 0"):
        SamplingParams(4, repetition_penalty=0.0)
    with pytest.raises(RolloutError, match="min_tokens is 5"):
        SamplingParams(4, min_tokens=5)
