"""The engine over the real vLLM, without training around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import make_model, make_tokenizer
from vllm_runs import WIDE

from verl.errors import RolloutError
from verl.hybrid import make_twin
from verl.models.lora import add_adapters
from verl.models.settings import LoraSettings
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFEngine
from verl.rollout.native import NativeEngine
from verl.rollout.remote.probe import model_log_probs
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.vllm.engine import VLLMEngine

PROMPTS = ([7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17], [20])


def engine_for(model, eos=(1,), **settings):
    settings = RemoteSettings(**{"max_model_len": 96, "max_num_seqs": 16, **settings})
    return VLLMEngine(make_twin(model), make_tokenizer(), eos, settings)


def requests_for(params, name, n=1):
    return [
        Request(f"{name}/{i}/{k}", np.array(prompt), params, seed=100 * i + k)
        for i, prompt in enumerate(PROMPTS)
        for k in range(n)
    ]


def shift(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def shared(request):
    model = make_model("llama", tie_word_embeddings=request.param, **WIDE)
    engine = engine_for(model)
    yield model, engine
    engine.close()


def test_greedy_is_the_native_engines_before_and_after_an_update(shared):
    model, engine = shared
    native = NativeEngine(make_twin(model), make_tokenizer(), (1,))
    written = []
    for round_ in range(2):
        requests = requests_for(SamplingParams(24, temperature=0), f"greedy{round_}")
        ours, theirs = engine.generate(requests), native.generate(requests)
        for request, a, b in zip(requests, ours, theirs, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist() and a.finish_reason == b.finish_reason
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
            np.testing.assert_allclose(a.log_probs, model_log_probs(model, request, a), atol=1e-4)
        written.append([a.token_ids.tolist() for a in ours])
        assert engine.take_metrics()["rollout/weight_probe_diff"] < 1e-5
        shift(model)
        engine.weights_changed()
        native.weights_changed()
    assert written[0] != written[1]


@pytest.mark.parametrize("params", [
    SamplingParams(16, temperature=0.7),
    SamplingParams(16, temperature=1.3, top_k=5, top_p=0.9),
    SamplingParams(16, min_p=0.1),
    SamplingParams(16, repetition_penalty=1.5, min_tokens=8),
])  # fmt: skip
def test_sampled_rows_have_the_log_probs_of_the_temperature_and_are_reproducible(shared, params):
    model, engine = shared
    tag = str(params)
    first, again = (engine.generate(requests_for(params, f"{tag}{k}", n=4)) for k in range(2))
    assert len({tuple(done.token_ids.tolist()) for done in first}) == len(first)
    for request, a, b in zip(requests_for(params, tag, n=4), first, again, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()  # the seed decides
        np.testing.assert_allclose(a.log_probs, model_log_probs(model, request, a), atol=1e-4)
        if params.filtered:
            assert (a.sampled_log_probs != a.log_probs).all() and a.sampled_log_probs.max() <= 1e-6
        else:
            assert a.sampled_log_probs is None


def test_a_penalty_and_a_minimum_are_those_of_the_simple_engine(shared):
    model, engine = shared
    here = HFEngine(make_twin(model), make_tokenizer(), (1,))
    params = SamplingParams(16, temperature=0, repetition_penalty=2.0, min_tokens=4, stop_token_ids=(17, 48, 64))
    ours, theirs = (one.generate(requests_for(params, "adjusted")) for one in (engine, here))
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and len(a.token_ids) >= 4
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
        assert a.sampled_log_probs is None


def test_samples_follow_the_distribution(shared):
    model, engine = shared
    prompt, n = [7, 8, 9], 1500
    with torch.no_grad():
        wanted = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / 0.8, -1).numpy()
    requests = [Request(f"d{i}", np.array(prompt), SamplingParams(1, temperature=0.8), seed=i) for i in range(n)]
    counts = np.bincount([done.token_ids[0] for done in engine.generate(requests)], minlength=len(wanted))
    likely = wanted * n > 5
    chi = (((counts - wanted * n) ** 2) / np.maximum(wanted * n, 1e-9))[likely].sum()
    freedom = likely.sum() - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom)


def test_what_ends_a_response(shared):
    _, engine = shared
    free = engine.generate(requests_for(SamplingParams(12, temperature=0, ignore_eos=True), "free"))[1]
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    ids = free.token_ids.tolist()
    by_id = SamplingParams(12, temperature=0, stop_token_ids=(ids[2],))
    done = engine.generate(requests_for(by_id, "by id"))[1]
    assert done.finish_reason == "stop" and done.token_ids.tolist() == ids[: ids.index(ids[2]) + 1]
    tokenizer = make_tokenizer()
    text = tokenizer.decode(ids[3:5])
    done = engine.generate(requests_for(SamplingParams(12, temperature=0, stop=(text,)), "by text"))[1]
    assert done.finish_reason == "stop" and tokenizer.decode(done.token_ids).endswith(text)
    assert len(done.log_probs) == len(done.token_ids) < 12


def test_the_models_own_end(shared):
    model, _ = shared
    here = HFEngine(make_twin(model), make_tokenizer(), ())
    ids = here.generate(requests_for(SamplingParams(12, temperature=0), "x"))[1].token_ids.tolist()
    engine = engine_for(model, eos=(ids[4],))
    done = engine.generate(requests_for(SamplingParams(12, temperature=0), "eos"))[1]
    assert done.finish_reason == "stop" and done.token_ids.tolist() == ids[: ids.index(ids[4]) + 1]
    done = engine.generate(requests_for(SamplingParams(12, temperature=0, ignore_eos=True), "on"))[1]
    assert done.finish_reason == "length" and done.token_ids.tolist() == ids
    engine.close()


def test_rows_stream_and_aborted_ones_bring_what_they_have(shared):
    _, engine = shared
    long = SamplingParams(80, ignore_eos=True)
    short = Request("short", np.array([7, 8]), SamplingParams(2, ignore_eos=True), 1)
    engine.submit([short, *(Request(f"long{i}", np.array([7, 8]), long, i) for i in range(2))])
    first = []
    while not first:
        first = engine.poll()
    assert [done.request_id for done in first] == ["short"] and engine.pending == 2
    engine.abort(["long0"])
    rest = {done.request_id: done for done in engine.poll()}
    aborted = rest["long0"]
    assert aborted.finish_reason == "abort" and 2 <= len(aborted.token_ids) == len(aborted.log_probs) < 80
    engine.abort()
    while engine.pending:
        engine.poll()


def test_a_killed_engine_is_one_sentence():
    engine = engine_for(make_model("llama", **WIDE))
    engine.submit([Request("long", np.array([7, 8]), SamplingParams(80, ignore_eos=True), 1)])
    engine.process.process.kill()
    with pytest.raises(RolloutError, match=r"was killed by SIGKILL in the middle of the run.*last checkpoint"):
        while engine.pending:
            engine.poll()


def test_what_vllm_refuses_is_one_sentence():
    with pytest.raises(RolloutError, match=r"^vLLM failed: [^\n]*no_such_argument[^\n]*$"):
        engine_for(make_model("llama", **WIDE), engine_kwargs={"no_such_argument": 1})


def test_adapters_are_merged():
    model = make_model("llama", **WIDE)
    add_adapters(model, LoraSettings(rank=4))
    engine = engine_for(model)
    engine.weights_changed()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    engine.weights_changed()
    requests = requests_for(SamplingParams(12, temperature=0), "lora")
    for request, done in zip(requests, engine.generate(requests), strict=True):
        np.testing.assert_allclose(done.log_probs, model_log_probs(model, request, done), atol=1e-4)
    engine.close()


def test_weights_that_do_not_arrive_stop_the_run(monkeypatch):
    model = make_model("llama", **WIDE)
    engine = engine_for(model)
    engine.weights_changed()
    monkeypatch.setattr(engine.weights, "refresh", lambda: None)
    shift(model)
    with pytest.raises(RolloutError, match="vLLM does not compute what is being trained"):
        engine.weights_changed()
    engine.close()
