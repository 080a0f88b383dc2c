"""Flash attention over packed segments: its layout, its gathered keys, and (on a GPU) its numbers against SDPA's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import make_model, sample_batch

from verl import notices
from verl.models.attention import NAME, make_layout, packed_attention_forward
from verl.models.backbone import use_packed_attention
from verl.models.loading import compile_layers, enable_gradient_checkpointing
from verl.models.packing import pack
from verl.models.policy import log_probs
from verl.models.varlen import VARLEN, gather_keys, make_varlen_layout

ROWS = [
    ([5, 6, 7, 8], [9, 10, 11], [1, 1, 1]),
    ([5, 6, 7, 8], [12, 13, 14, 15, 16, 17, 18], [1] * 7),
    ([5, 6, 7, 8], [19], [1]),
    ([20, 21, 22, 23, 24, 25, 26, 27, 28], [29, 30, 31, 32], [1, 0, 0, 1]),
    ([5, 6, 7, 8], [33, 34, 35], [0, 1, 0]),
]
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU of 8.0 or newer"
)


def by_hand(q, k, v, layout, window):
    """Attention of (T, H, D) queries by the layout's definition, one segment after another."""
    k, v = gather_keys(k, layout.key), gather_keys(v, layout.key)
    outputs = []
    for i in range(len(layout.start_q) - 1):
        a, b = layout.start_q[i : i + 2].tolist()
        c, d = layout.start_k[i : i + 2].tolist()
        position = torch.arange(d - c)
        distance = position[d - c - (b - a) :, None] - position[None]
        seen = (distance >= 0) & (distance < (window or d))
        parts = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        outputs.append(F.scaled_dot_product_attention(*parts, attn_mask=seen).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("share", [True, False])
def test_the_layout_means_what_the_padded_blocks_mean(share, window):
    torch.manual_seed(0)
    packed = pack(sample_batch(ROWS), share_prompts=share)
    module = torch.nn.Module().eval()
    inputs = [torch.randn(packed.num_tokens, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(packed.num_tokens, 2, 8, dtype=torch.float64)
    heads_first = [x.transpose(0, 1)[None] for x in inputs]
    expected, _ = packed_attention_forward(
        module, *heads_first, None, sliding_window=window, verl_layout=make_layout(packed)
    )
    layout = make_varlen_layout(packed)
    assert (layout.key is None) == (not share)
    got = by_hand(*inputs, layout, window)
    torch.testing.assert_close(got, expected[0])
    for mine, theirs in zip(
        torch.autograd.grad((got * upstream).sum(), inputs),
        torch.autograd.grad((expected[0] * upstream).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_where_flash_attention_cannot_run_packed_sdpa_does_with_a_notice():
    model = make_model("llama")
    assert use_packed_attention(model, kernel="varlen") == NAME
    assert any("packed SDPA" in line and "float32" in line for line in notices.seen())


@on_gpu
@pytest.mark.parametrize("family", ["qwen2", "mistral", "opt"])
@pytest.mark.parametrize("mode", ["eager", "checkpointed", "compiled"])
def test_gradients_on_a_gpu_are_those_of_sdpa(family, mode):
    gradients, values = [], []
    for kernel, dtype in (("sdpa", torch.float32), ("sdpa", torch.bfloat16), ("varlen", torch.bfloat16)):
        model = make_model(family).to("cuda", dtype).train()
        assert use_packed_attention(model, kernel=kernel) == {"sdpa": NAME, "varlen": VARLEN}[kernel], notices.seen()
        if kernel == "varlen" and mode == "checkpointed":
            enable_gradient_checkpointing(model)
        if kernel == "varlen" and mode == "compiled":
            compile_layers(model)
        value, _ = log_probs(model, sample_batch(ROWS))
        value.sum().backward()
        values.append(value.detach().double())
        gradients.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
    for exact, sdpa, varlen in (values, gradients):
        wanted = (sdpa - exact).norm() / exact.norm()
        assert (varlen - exact).norm() / exact.norm() < max(2 * wanted, 5e-3)
