"""The native engine: greedy equals generate(), log-probs, stops, aborts, sharing, weight changes, memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, make_model, make_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from verl import notices
from verl.errors import RolloutError
from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.native import NativeEngine
from verl.rollout.registry import make_engine

# lengths on both sides of page borders (4) and of the sliding window (6)
PROMPTS = [[7, 8, 9], list(range(10, 30)), [20], [7, 8, 9], list(range(10, 26)), list(range(30, 38))]


def engine_for(model, **settings) -> NativeEngine:
    engine = make_engine("native", make_twin(model), make_tokenizer(), (1,), **{"page_size": 4, **settings})
    assert engine.name == "native"
    return engine


def requests_for(params, prompts=PROMPTS):
    return [Request(f"r{i}", np.array(p), params, seed=100 + i) for i, p in enumerate(prompts)]


def tokens_of(completions):
    return [c.token_ids.tolist() for c in completions]


def check_against_generate(model, engine, new: int = 24, eos: int = 1) -> None:
    """Ids and the log-prob of every step. A differing id passes only where the two best logits are a tie."""
    done = engine.generate(requests_for(SamplingParams(new, temperature=0, stop_token_ids=(eos,))))
    ties = 0
    for prompt, completion in zip(PROMPTS, done, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=[1, eos], pad_token_id=0,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )[0, len(prompt) :].tolist()  # fmt: skip
        got = completion.token_ids.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1].double()
        table = torch.log_softmax(logits, -1)
        if got != expected:
            at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b)
            best = logits[at].topk(2).values
            assert best[0] - best[1] < 1e-5, (got, expected)
            ties += 1
        theirs = table.gather(1, torch.tensor(got)[:, None])[:, 0]
        np.testing.assert_allclose(completion.log_probs, theirs, atol=1e-4)
        assert np.abs(completion.log_probs - theirs.numpy()).mean() < 1e-5
    assert ties <= 1


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_equals_generate(family):
    model = make_model(family)
    engine = engine_for(model)
    free = engine.generate(requests_for(SamplingParams(24, temperature=0)))
    assert len({t for c in free for t in c.token_ids.tolist()}) >= 8  # the comparison is about something
    early = int(max(free, key=lambda c: len(c.token_ids)).token_ids[5])  # an id that ends some rows early
    check_against_generate(model, engine)
    check_against_generate(model, engine, eos=early)
    check_against_generate(model, engine_for(model, max_num_seqs=2, max_num_batched_tokens=7))


def test_models_that_do_not_qualify_fall_back_with_the_reason():
    torch.manual_seed(0)
    config = CONFIG_MAPPING["bloom"](vocab_size=96, hidden_size=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = make_engine("native", make_twin(model), make_tokenizer(), (1,), max_num_seqs=4)
    assert engine.name == "hf"
    assert any("Bloom" in text and "attention" in text for text in notices.seen())
    assert len(engine.generate(requests_for(SamplingParams(3, temperature=0)))) == len(PROMPTS)


def test_attention_sinks_are_refused():
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gpt_oss"](
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    twin = make_twin(model)
    before = twin.config._attn_implementation
    with pytest.raises(RolloutError, match="s_aux"):
        NativeEngine(twin, make_tokenizer(), (1,))
    assert twin.config._attn_implementation == before


def test_samples_of_a_prompt_share_its_pages_and_its_computation():
    model = make_model("llama", dtype=torch.float64)
    engine = engine_for(model)
    prompt = list(range(10, 29))
    engine.submit(requests_for(SamplingParams(8, ignore_eos=True), [prompt] * 6))
    engine.poll()
    assert engine.tokens["prefill"] == len(prompt)
    rows = engine.scheduler.running
    assert len(rows) == 6 and len({tuple(r.pages[:4]) for r in rows}) == 1
    assert engine.blocks.used == 4 + 6  # four full pages once, the partly filled one for each
    while engine.pending:
        engine.poll()
    assert engine.blocks.used == 0
    # a later request with the same beginning computes only the rest
    engine.generate(requests_for(SamplingParams(2, ignore_eos=True), [[*prompt[:17], 3, 4]]))
    assert engine.tokens["prefill"] == len(prompt) + 3


def test_a_weight_change_leaves_no_stale_page():
    model = make_model("llama", dtype=torch.float64)
    engine = engine_for(model)
    params = SamplingParams(10, temperature=0, ignore_eos=True)
    first = engine.generate(requests_for(params))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.3)
    engine.weights_changed()
    second = engine.generate(requests_for(params))
    fresh = engine_for(model).generate(requests_for(params))
    assert tokens_of(second) == tokens_of(fresh) != tokens_of(first)
    np.testing.assert_allclose(second[1].log_probs, fresh[1].log_probs, atol=1e-6)


def test_the_twin_shares_storages_before_and_after_rounds():
    model = make_model("qwen2", tie_word_embeddings=True)
    twin = make_twin(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    engine = NativeEngine(twin, make_tokenizer(), (1,), page_size=4)
    for _ in range(2):
        engine.generate(requests_for(SamplingParams(5)))
        engine.release()
        engine.weights_changed()
    assert [p.data_ptr() for p in model.parameters()] == pointers == [p.data_ptr() for p in twin.parameters()]


def test_release_gives_the_cache_back_and_ten_cycles_stay_flat():
    model = make_model("llama")
    engine = engine_for(model)
    wanted = tokens_of(engine.generate(requests_for(SamplingParams(12))))
    counts = []
    for _ in range(10):
        engine.release()
        assert engine.runner.cache.data is None
        engine.weights_changed()
        assert tokens_of(engine.generate(requests_for(SamplingParams(12)))) == wanted
        gc.collect()
        counts.append(sum(o.numel() for o in gc.get_objects() if type(o) is torch.Tensor))
    assert max(counts[1:]) == min(counts[1:])


def test_stops_and_finish_reasons():
    model, tokenizer = make_model("llama"), make_tokenizer()
    free = engine_for(model).generate(requests_for(SamplingParams(12, temperature=0, ignore_eos=True)))[1]
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    third = int(free.token_ids[2])
    by_id = engine_for(model).generate(requests_for(SamplingParams(12, temperature=0, stop_token_ids=(third,))))[1]
    cut = free.token_ids.tolist().index(third) + 1
    assert by_id.finish_reason == "stop" and by_id.token_ids.tolist() == free.token_ids.tolist()[:cut]
    text = tokenizer.decode(free.token_ids[3:5])
    by_text = engine_for(model).generate(requests_for(SamplingParams(12, temperature=0, stop=(text,))))[1]
    assert by_text.finish_reason == "stop" and tokenizer.decode(by_text.token_ids).endswith(text)
    assert len(by_text.log_probs) == len(by_text.token_ids)


def test_requests_of_different_parameters_run_together():
    model = make_model("llama", dtype=torch.float64)
    kinds = [
        SamplingParams(9, temperature=0), SamplingParams(5, temperature=1.3), SamplingParams(7, top_k=4),
        SamplingParams(6, top_p=0.5, temperature=0.7), SamplingParams(8, min_p=0.2), SamplingParams(4),
    ]  # fmt: skip
    mixed = [Request(f"r{i}", np.array(p), k, 100 + i) for i, (p, k) in enumerate(zip(PROMPTS, kinds, strict=True))]
    together = engine_for(model).generate(mixed)
    for request, completion in zip(mixed, together, strict=True):
        alone = engine_for(model).generate([request])[0]
        assert alone.token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(alone.log_probs, completion.log_probs, atol=1e-6)
        assert (completion.sampled_log_probs is not None) == request.params.filtered
        if request.params.filtered:
            assert len(completion.sampled_log_probs) == len(completion.token_ids)


def test_the_simple_engine_draws_the_same_tokens():
    model = make_model("gemma3_text", dtype=torch.float64)
    params = SamplingParams(20, temperature=1.1)
    native = engine_for(model).generate(requests_for(params))
    simple = make_engine("hf", make_twin(model), make_tokenizer(), (1,)).generate(requests_for(params))
    assert tokens_of(native) == tokens_of(simple)


def test_rows_leave_early_and_aborted_rows_come_out():
    engine = engine_for(make_model("llama"), max_num_seqs=2)
    endless = SamplingParams(6, ignore_eos=True)
    engine.submit([Request(name, np.array([7, 8, i]), endless, i) for i, name in enumerate(("short", "long", "later"))])
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
    assert engine.blocks.used == 0


def test_bad_requests_and_settings_are_refused():
    model = make_model("llama")
    with pytest.raises(RolloutError, match="empty prompt"):
        engine_for(model).submit([Request("x", np.array([], np.int64), SamplingParams(4))])
    with pytest.raises(RolloutError, match="may need 23 tokens, but the cache holds 16"):
        engine_for(model, max_pages=4).submit([Request("x", np.array([5] * 3), SamplingParams(20))])
    with pytest.raises(RolloutError, match="256 positions"):
        engine_for(make_model("opt")).submit([Request("x", np.array([5] * 3), SamplingParams(254))])
    with pytest.raises(RolloutError, match="compile"):
        engine_for(model, compile="maybe")
    with pytest.raises(RolloutError, match="no rollout engine 'nativ'"):
        make_engine("nativ", make_twin(model), make_tokenizer(), ())
