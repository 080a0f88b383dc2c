"""oneDNN's products on the live weights and on packed copies, and the draw that hashes before it takes logarithms."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_model
from torch import nn

from verl.rollout.base import SamplingParams
from verl.rollout.native.linears import PACK_AFTER_STEPS, HostLinears, onednn_works
from verl.rollout.sampling import draw, gumbel_noise

CPU = torch.device("cpu")


def works(dtype: torch.dtype) -> None:
    if not onednn_works(CPU, dtype):
        pytest.skip(f"oneDNN does not multiply {dtype} here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi", "gpt_neox"])
def test_logits_are_those_of_the_plain_layers(family, dtype):
    works(dtype)
    model = make_model(family, dtype=dtype)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.inference_mode():
        plain = model(ids).logits
        pointers = [p.data_ptr() for p in model.parameters()]
        linears = HostLinears(model, most_bytes=1 << 30)
        live = model(ids).logits
        linears.plan(4, PACK_AFTER_STEPS - 1)
        assert not linears.packed
        linears.plan(4, PACK_AFTER_STEPS)
        assert linears.packed
        packed = model(ids).logits
        with torch.inference_mode(False), torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1)
        linears.drop()
        after = model(ids).logits
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(live, plain, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(packed, plain, atol=tolerance, rtol=tolerance)
    assert not torch.allclose(after, plain, atol=tolerance)
    assert pointers == [p.data_ptr() for p in model.parameters()]


def test_siblings_that_are_called_out_of_order_are_still_right():
    works(torch.float32)
    torch.manual_seed(0)
    block = nn.Module()
    for name, size in (("q_proj", 6), ("k_proj", 3), ("v_proj", 3)):
        setattr(block, name, nn.Linear(8, size))
    x, y = torch.randn(2, 5, 8)
    with torch.inference_mode():
        wanted = {(n, i): getattr(block, n)(z) for n in ("q_proj", "k_proj", "v_proj") for i, z in enumerate((x, y))}
        linears = HostLinears(block, 1 << 20)
        assert len(linears.products) == 1
        linears.plan(4, 100)
        for name, i in (("v_proj", 0), ("q_proj", 0), ("k_proj", 1), ("k_proj", 0), ("q_proj", 1), ("v_proj", 1)):
            torch.testing.assert_close(getattr(block, name)((x, y)[i]), wanted[name, i], atol=1e-6, rtol=1e-6)


def test_a_model_above_the_cap_is_not_packed():
    works(torch.float32)
    linears = HostLinears(make_model("llama"), most_bytes=1000)
    linears.plan(4, 1000)
    assert not linears.packed


@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0, 9.0])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_candidates_alone_give_the_argmax_over_all(spread, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 4999, generator=generator) * spread
    logits[::3, :7] += 6 * spread
    logits[5, :4000] = float("-inf")
    seed = torch.arange(40, dtype=torch.int32) * 7919 - 10
    for step in range(5):
        position = torch.full((40,), step, dtype=torch.int32)
        tokens, _, _ = draw(logits, SamplingParams(9, temperature=temperature), seed, position)
        noisy = logits / temperature + gumbel_noise(seed, position, 4999)
        best = noisy.max(-1).values
        torch.testing.assert_close(noisy.gather(1, tokens[:, None])[:, 0], best, atol=2e-6, rtol=1e-6)


def test_a_row_without_a_finite_logit_does_not_break_the_others():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    seed, position = torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    wanted = draw(logits, SamplingParams(9), seed, position)[0]
    logits[1] = float("nan")
    got = draw(logits, SamplingParams(9), seed, position)[0]
    assert got[[0, 2, 3]].tolist() == wanted[[0, 2, 3]].tolist()
