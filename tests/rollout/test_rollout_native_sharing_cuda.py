"""On a CUDA device: pages of a prompt read once for all its samples, and linear layers joined in one product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import make_model, make_tokenizer

from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.native import NativeEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PAGE = 16


def by_hand(q, k, v, keys, values, table, positions, options):
    """(B, H, D) attention of each row over its pages and its own key, in float64."""
    out = []
    for b, position in enumerate(positions.tolist()):
        slots = [int(table[b, n // PAGE]) * PAGE + n % PAGE for n in range(position)]
        times = q.shape[1] // k.shape[1]
        both = [
            torch.cat([cached.flatten(0, 1)[slots], own[b][None]]).double().repeat_interleave(times, 1)
            for cached, own in ((keys, k), (values, v))
        ]
        scores = torch.einsum("hd,nhd->hn", q[b].double(), both[0]) * options.scale
        if options.softcap:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        distance = position - torch.arange(position + 1, device=q.device)
        scores[:, distance >= (options.window or position + 1)] = -float("inf")
        out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), both[1]))
    return torch.stack(out)


@pytest.mark.parametrize("heads", [(4, 2, 64), (28, 4, 128), (8, 8, 80)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_that_share_pages_see_what_they_see_alone(heads, window, softcap, dtype):
    from verl.rollout.native.attention import Options
    from verl.rollout.native.kernels import decode_attention, neighbours

    h, g, d = heads
    torch.manual_seed(0)
    rows, shared_pages = min(6, neighbours(h // g)), 7
    positions = torch.tensor([*[112, 130, 300, 113, 190, 127][:rows], 50, 0], device="cuda")
    table = torch.arange(1, 1 + len(positions) * 20, device="cuda", dtype=torch.int32).view(-1, 20)
    table[:rows, :shared_pages] = table[0, :shared_pages]
    sharing = torch.zeros(2, len(positions), dtype=torch.int32, device="cuda")
    sharing[0, :rows], sharing[1, 0] = shared_pages * PAGE, rows
    cache = torch.randn(2, 200, PAGE, g, d, dtype=dtype, device="cuda")
    q = torch.randn(len(positions), h, d, dtype=dtype, device="cuda")
    k, v = torch.randn(2, len(positions), g, d, dtype=dtype, device="cuda")
    options = Options(d**-0.5, window, softcap)
    expected = by_hand(q, k, v, *cache, table, positions, options)
    got = decode_attention(q, k, v, *cache, table, positions, options, (sharing[0], sharing[1]))
    assert (got - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
    for b, position in enumerate(positions.tolist()):
        assert torch.equal(cache[0, table[b, position // PAGE], position % PAGE], k[b])


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "opt"])
@pytest.mark.parametrize("compile_", ["on", "off"])
def test_samples_of_a_prompt_write_what_each_writes_alone(family, compile_):
    model = make_model(family).cuda()
    prompts = [list(range(5, 48))] * 8 + [[7, 8, 9]] * 3 + [list(range(20, 60))] * 8
    engine = NativeEngine(make_twin(model), make_tokenizer(), (), page_size=4, max_pages=2000, compile=compile_)
    for step in range(2):
        requests = [Request(f"{step}/{i}", np.array(p), SamplingParams(30), seed=i) for i, p in enumerate(prompts)]
        done = engine.generate(requests)
        assert engine.runner.joined.ready == bool(engine.runner.joined.joined)
        for prompt, completion in zip(prompts, done, strict=True):
            whole = torch.tensor([prompt + completion.token_ids.tolist()], device="cuda")
            with torch.no_grad():
                table = torch.log_softmax(model(whole).logits[0, len(prompt) - 1 : -1].double(), -1)
            chosen = table.gather(1, whole[0, len(prompt) :, None])[:, 0].cpu().numpy()
            np.testing.assert_allclose(completion.log_probs, chosen, atol=1e-4)
        engine.release()
        with torch.no_grad():  # the joined copies must follow the weights
            for p in model.parameters():
                p.mul_(1.1)
        engine.weights_changed()
