"""The native engine on a CUDA device: captured steps, Triton kernels, device sampling, giving memory back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, make_model, make_tokenizer

from verl import notices
from verl.errors import RolloutError
from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.native import NativeEngine
from verl.rollout.sampling import draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = [[7, 8, 9], list(range(10, 50)), [20], [7, 8, 9], list(range(10, 26)), list(range(30, 63))]


def engine_for(model, **settings):
    settings = {"page_size": 4, "max_pages": 400, **settings}
    return NativeEngine(make_twin(model), make_tokenizer(), (1,), **settings)


def requests_for(params, prompts=PROMPTS):
    return [Request(f"r{i}", np.array(p), params, seed=100 + i) for i, p in enumerate(prompts)]


def tokens_of(completions):
    return [c.token_ids.tolist() for c in completions]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("triton", [True, False])
def test_greedy_equals_generate(family, triton):
    model = make_model(family).cuda()
    engine = engine_for(model, triton=triton)
    assert engine.runner.triton == triton
    done = engine.generate(requests_for(SamplingParams(40, temperature=0)))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        with torch.no_grad():
            whole = torch.cat([ids, torch.from_numpy(completion.token_ids)[None].cuda()], 1)
            logits = model(whole).logits[0, len(prompt) - 1 : -1].double()
        table = torch.log_softmax(logits, -1)
        chosen = table.gather(1, whole[0, len(prompt) :, None])[:, 0].cpu().numpy()
        np.testing.assert_allclose(completion.log_probs, chosen, atol=1e-4)
        best = table.max(-1).values.cpu().numpy()
        assert (best - chosen < 1e-5).all()  # each token is the best one, or tied with it


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0}, {"repetition_penalty": 1.3},
        {"min_tokens": 3, "stop_token_ids": (7, 9)}, {"temperature": 0, "repetition_penalty": 1.5},
    ],
)  # fmt: skip
@pytest.mark.parametrize("triton", [True, False])
def test_device_sampling_draws_what_the_reference_draws(settings, triton):
    from verl.rollout.native.row_sampling import Adjusting, RowSampling, draw_per_row, kind_of
    from verl.rollout.native.sequence import Sequence

    params = SamplingParams(4, **{"temperature": 0.8, **settings})
    logits = torch.randn(16, 20001, device="cuda") * 3
    rows = [Sequence(Request(str(i), np.array([1]), params, seed=i * 7919), i) for i in range(16)]
    for i, row in enumerate(rows):
        row.tokens = [0] * i
    sampling = RowSampling.empty(16, logits.device)
    sampling.fill(rows, 20001)
    adjusting = Adjusting.of(rows, 20001, logits.device)
    got = draw_per_row(logits, sampling, kind=kind_of(rows), triton=triton, adjusting=adjusting)
    seeds = torch.tensor([r.request.seed for r in rows], dtype=torch.int32, device="cuda")
    written = [row.written() for row in rows]
    want = draw(logits, params, seeds, torch.arange(16, dtype=torch.int32, device="cuda"), written)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], atol=2e-5, rtol=1e-5)
    if params.filtered:
        torch.testing.assert_close(got[2], want[2], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_graphs_batches_and_preemption_change_nothing(dtype):
    model = make_model("llama", dtype=dtype).cuda()
    for params in (
        SamplingParams(30, temperature=1.1),
        SamplingParams(30, temperature=1.1, top_k=7),
        SamplingParams(30, temperature=1.1, repetition_penalty=1.4, min_tokens=20),
    ):
        requests = requests_for(params, PROMPTS * 2)
        plain = tokens_of(engine_for(model, graphs=False).generate(requests))
        assert tokens_of(engine_for(model).generate(requests)) == plain
        assert tokens_of(engine_for(model, window=3, max_num_seqs=3).generate(requests)) == plain
        tight = engine_for(model, max_pages=24, max_num_batched_tokens=11)
        assert tokens_of(tight.generate(requests)) == plain
        assert tight.scheduler.preemptions > 0


def test_ten_cycles_keep_memory_flat_and_replay_right():
    model = make_model("llama").cuda()
    engine = engine_for(model, max_pages=None, gpu_memory_utilization=0.05)
    pointers = [p.data_ptr() for p in model.parameters()]
    used, cache = [], set()
    for cycle in range(10):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
        engine.weights_changed()
        requests = requests_for(SamplingParams(20, temperature=0))
        got = tokens_of(engine.generate(requests))
        cache.add(engine.runner.cache.data.data_ptr())
        engine.release()
        fresh = engine_for(model, graphs=False)
        assert got == tokens_of(fresh.generate(requests)), cycle
        del fresh
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used.append(torch.cuda.mem_get_info()[0])
    assert len(cache) == 1 and engine.runner.arena is not None
    assert max(used[2:]) - min(used[2:]) < 8 << 20
    assert pointers == [p.data_ptr() for p in model.parameters()]


def test_compiled_layers_write_the_same():
    model = make_model("llama").cuda()
    requests = requests_for(SamplingParams(20, temperature=0))
    engine = engine_for(model, compile="on")
    done = engine.generate(requests)
    assert engine.runner.layers.on
    plain = engine_for(model, compile="off").generate(requests)
    assert tokens_of(done) == tokens_of(plain)
    for a, b in zip(done, plain, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


def test_numerics_of_bfloat16_stay_near_a_plain_forward():
    model = make_model("qwen2", dtype=torch.bfloat16).cuda()
    done = engine_for(model).generate(requests_for(SamplingParams(30, temperature=1.0)))
    gaps = []
    for prompt, c in zip(PROMPTS, done, strict=True):
        whole = torch.tensor([prompt + c.token_ids.tolist()], device="cuda")
        with torch.no_grad():
            table = torch.log_softmax(model(whole).logits[0, len(prompt) - 1 : -1].float(), -1)
        chosen = table.gather(1, whole[0, len(prompt) :, None])[:, 0].cpu().numpy()
        gaps.append(np.abs(c.log_probs - chosen))
    assert np.concatenate(gaps).mean() < 0.05


def test_a_forward_that_looks_at_values_runs_without_graphs():
    model = make_model("llama").cuda()
    wanted = tokens_of(engine_for(model, compile="off").generate(requests_for(SamplingParams(20, temperature=1.0))))
    twin = make_twin(model)
    twin.model.layers[1].register_forward_hook(lambda module, args, output: output * (float(output.sum()) != 0.5))
    engine = NativeEngine(twin, make_tokenizer(), (1,), page_size=4, max_pages=400)
    assert tokens_of(engine.generate(requests_for(SamplingParams(20, temperature=1.0)))) == wanted
    assert not engine.runner.capturing and any("without CUDA graphs" in text for text in notices.seen())
    assert tokens_of(engine.generate(requests_for(SamplingParams(20, temperature=1.0)))) == wanted


def test_the_cache_comes_back_when_torch_holds_the_memory():
    model = make_model("llama").cuda()
    engine = engine_for(model, max_pages=None, gpu_memory_utilization=0.6)
    requests = requests_for(SamplingParams(20, temperature=0))
    wanted = tokens_of(engine.generate(requests))
    engine.release()
    free = torch.cuda.mem_get_info()[0]
    hoard = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
    with pytest.raises(RolloutError, match="no room"):  # 1.5 GB of pages, of which half a GB more than there is
        engine.generate(requests_for(SamplingParams(10**6, temperature=0)))
    engine.abort()
    engine.poll()
    del hoard  # torch keeps it: the cache must ask for it
    engine.weights_changed()
    assert tokens_of(engine.generate(requests)) == wanted
    engine.release()
