"""The simple engine: greedy equals generate(), rows do not depend on their neighbours, stops, aborts, log-probs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, make_model, make_tokenizer

from verl.errors import RolloutError
from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFEngine

PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17], [20], [7, 8, 9]]


def engine_for(model, **settings):
    return HFEngine(make_twin(model), make_tokenizer(), eos_token_ids=(1,), **settings)


def requests_for(params, prompts=PROMPTS, seeds=None):
    return [Request(f"r{i}", np.array(p), params, seed=seeds[i] if seeds else 100 + i) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_equals_generate(family):
    model = make_model(family)
    done = engine_for(model).generate(requests_for(SamplingParams(24, temperature=0)))
    assert len({t for c in done for t in c.token_ids.tolist()}) >= 8  # the comparison is about something
    for prompt, completion in zip(PROMPTS, done, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=1, pad_token_id=0,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert completion.token_ids.tolist() == expected
        with torch.no_grad():
            logits = model(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits.double(), -1)
        theirs = table.gather(1, torch.tensor(expected)[:, None])[:, 0]
        np.testing.assert_allclose(completion.log_probs, theirs, atol=1e-4)


def test_a_sampled_row_does_not_depend_on_the_rows_around_it():
    model = make_model("llama", dtype=torch.float64)
    params = SamplingParams(12, temperature=1.1)
    together = engine_for(model).generate(requests_for(params))
    small_waves = engine_for(model, max_num_seqs=2).generate(requests_for(params))
    alone = [engine_for(model).generate([r])[0] for r in requests_for(params)]
    for a, b, c in zip(together, small_waves, alone, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() == c.token_ids.tolist()
    assert together[0].token_ids.tolist() != together[3].token_ids.tolist()  # same prompt, another seed


def test_samples_follow_the_distribution():
    model = make_model("llama")
    prompt = [7, 8, 9]
    with torch.no_grad():
        wanted = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / 0.8, -1).numpy()
    n = 4000
    done = engine_for(model, max_num_seqs=n).generate(
        requests_for(SamplingParams(1, temperature=0.8), [prompt] * n, seeds=list(range(n)))
    )
    counts = np.bincount([c.token_ids[0] for c in done], minlength=len(wanted))
    likely = wanted * n > 5
    chi = (((counts - wanted * n) ** 2) / np.maximum(wanted * n, 1e-9))[likely].sum()
    freedom = likely.sum() - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(
        [c.log_probs[0] for c in done], np.log(wanted[[c.token_ids[0] for c in done]]), atol=1e-4
    )


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}])
def test_filters_and_their_log_probs(settings):
    model = make_model("llama")
    with torch.no_grad():
        p = torch.softmax(model(torch.tensor([[7, 8, 9]])).logits[0, -1].double(), -1)
    order = p.argsort(descending=True)
    allowed = {
        "top_k": set(order[:3].tolist()),
        "top_p": set(order[: int((p[order].cumsum(0) < 0.3).sum()) + 1].tolist()),
        "min_p": set(torch.nonzero(p >= 0.5 * p.max())[:, 0].tolist()),
    }[next(iter(settings))]
    done = engine_for(model).generate(requests_for(SamplingParams(1, **settings), [[7, 8, 9]] * 200, list(range(200))))
    seen = {int(c.token_ids[0]) for c in done}
    assert seen <= allowed and (len(allowed) == 1 or len(seen) > 1)
    mass = sum(float(p[t]) for t in allowed)
    for c in done[:20]:
        token = int(c.token_ids[0])
        assert abs(c.log_probs[0] - float(p[token].log())) < 1e-4
        assert abs(c.sampled_log_probs[0] - float((p[token] / mass).log())) < 1e-4


def test_stops_and_finish_reasons():
    model = make_model("llama")
    tokenizer = make_tokenizer()
    free = engine_for(model).generate(requests_for(SamplingParams(12, temperature=0, ignore_eos=True)))[1]
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    third = int(free.token_ids[2])
    by_id = engine_for(model).generate(requests_for(SamplingParams(12, temperature=0, stop_token_ids=(third,))))[1]
    cut = free.token_ids.tolist().index(third) + 1
    assert by_id.finish_reason == "stop" and by_id.token_ids.tolist() == free.token_ids.tolist()[:cut]
    text = tokenizer.decode(free.token_ids[3:5])
    by_text = engine_for(model).generate(requests_for(SamplingParams(12, temperature=0, stop=(text,))))[1]
    assert by_text.finish_reason == "stop" and tokenizer.decode(by_text.token_ids).endswith(text)


def test_rows_leave_early_and_aborted_rows_come_out():
    model = make_model("llama")
    engine = engine_for(model)
    engine.submit([
        Request("short", np.array([7, 8]), SamplingParams(6, 1.0, ignore_eos=True), 1),
        Request("long", np.array([9, 8]), SamplingParams(6, 1.0, ignore_eos=True), 2),
        Request("later", np.array([9, 8]), SamplingParams(3, 1.0), 3),
    ])  # fmt: skip
    assert engine.poll() == [] and engine.pending == 3
    engine.abort(["short", "later"])
    aborted = {c.request_id: c for c in engine.poll()}
    assert aborted["short"].finish_reason == "abort" and len(aborted["short"].token_ids) == 1
    assert aborted["later"].finish_reason == "abort" and len(aborted["later"].token_ids) == 0
    with pytest.raises(RolloutError, match="weights changed"):
        engine.weights_changed()
    while engine.pending:
        last = engine.poll()
    assert [c.request_id for c in last] == ["long"] and len(last[0].token_ids) == 6


def test_the_twin_shares_storages_and_sees_an_optimizer_step():
    model = make_model("llama").train()
    twin = make_twin(model)
    assert [p.data_ptr() for p in twin.parameters()] == [p.data_ptr() for p in model.parameters()]
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = twin(ids).logits.clone()
        for p in model.parameters():
            p.add_(0.01)
        after = twin(ids).logits
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, model.eval()(ids).logits)


def test_bad_requests_are_refused():
    with pytest.raises(RolloutError, match="empty prompt"):
        engine_for(make_model("llama")).submit([Request("x", np.array([], np.int64), SamplingParams(4))])
    with pytest.raises(RolloutError, match="max_tokens"):
        SamplingParams(0)
    with pytest.raises(RolloutError, match="top_p"):
        SamplingParams(1, top_p=0.0)
