"""The fused log-prob against plain softmax over full logits: values, entropy and every gradient."""

from __future__ import annotations

import pytest
import torch

from verl.models import linear_logprob
from verl.models.linear_logprob import linear_log_prob


def reference(hidden, weight, target, bias, softcap, temperature):
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    table = torch.log_softmax(logits / temperature, -1)
    return table.gather(-1, target[:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    ("use_bias", "softcap", "temperature"), [(False, None, 1.0), (True, None, 0.7), (True, 5.0, 1.3)]
)
def test_values_and_gradients(monkeypatch, chunk, use_bias, softcap, temperature):
    monkeypatch.setattr(linear_logprob, "CHUNK_ELEMENTS", chunk * 17)
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    hidden, weight = make(7, 5), make(17, 5)
    bias = make(17) if use_bias else None
    target, upstream = torch.randint(0, 17, (7,)), torch.randn(2, 7, dtype=torch.float64)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    expected = reference(hidden, weight, target, bias, softcap, temperature)
    wanted = torch.autograd.grad((torch.stack(expected) * upstream).sum(), inputs)
    got = linear_log_prob(
        hidden, weight, target, bias=bias, softcap=softcap, temperature=temperature, with_entropy=True
    )
    torch.testing.assert_close(torch.stack(got), torch.stack(expected))
    for mine, theirs in zip(torch.autograd.grad((torch.stack(got) * upstream).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_bf16_inputs_reduce_in_fp32():
    hidden, weight = torch.randn(4, 8).bfloat16(), torch.randn(50, 8).bfloat16()
    log_prob, entropy = linear_log_prob(hidden, weight, torch.arange(4))
    assert log_prob.dtype == torch.float32 and entropy is None
