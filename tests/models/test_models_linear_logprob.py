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
    assert got[1].requires_grad
    for mine, theirs in zip(torch.autograd.grad((torch.stack(got) * upstream).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("budget", [0, 1 << 20])
@pytest.mark.parametrize(
    ("use_bias", "softcap", "temperature"), [(False, None, 1.0), (True, None, 0.7), (True, 5.0, 1.3)]
)
def test_what_is_kept_for_the_backward_pass_is_what_would_be_computed_again(
    monkeypatch, budget, use_bias, softcap, temperature
):
    monkeypatch.setattr(linear_logprob, "CHUNK_ELEMENTS", 3 * 17)
    monkeypatch.setattr(linear_logprob, "_kept_bytes", lambda device: budget)
    torch.manual_seed(1)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    hidden, weight = make(7, 5), make(17, 5)
    bias = make(17) if use_bias else None
    target, upstream = torch.randint(0, 17, (7,)), torch.randn(7, dtype=torch.float64)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    expected, spread = reference(hidden, weight, target, bias, softcap, temperature)
    wanted = torch.autograd.grad((expected * upstream).sum(), inputs)
    options = {"bias": bias, "softcap": softcap, "temperature": temperature}
    got, entropy = linear_log_prob(hidden, weight, target, **options, with_entropy=True, entropy_gradient=False)
    torch.testing.assert_close(entropy, spread.detach())
    assert not entropy.requires_grad
    for mine, theirs in zip(torch.autograd.grad((got * upstream).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_frozen_output_layer_gets_no_gradient():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4)
    linear_log_prob(hidden, weight, torch.arange(3))[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["kept", "again", "entropy"])
@pytest.mark.parametrize(
    ("use_bias", "softcap", "temperature"), [(False, None, 1.0), (True, None, 0.7), (False, 5.0, 1.3)]
)
def test_the_kernels_agree_with_fp64(monkeypatch, case, use_bias, softcap, temperature):
    """bf16 in, so the error is that of rounding logits and gradients to bf16."""
    monkeypatch.setattr(linear_logprob, "CHUNK_ELEMENTS_KERNEL", 40 * 9001)
    if case == "again":
        monkeypatch.setattr(linear_logprob, "_kept_bytes", lambda device: 0)
    torch.manual_seed(0)
    make = lambda *shape: (torch.randn(*shape, device="cuda") * 0.3).bfloat16().requires_grad_()  # noqa: E731
    hidden, weight = make(100, 64), make(9001, 64)
    bias = make(9001) if use_bias else None
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    target, upstream = torch.randint(0, 9001, (100,), device="cuda"), torch.randn(2, 100, device="cuda")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wide = [*exact, None][:3]
    expected = reference(wide[0], wide[1], target, wide[2], softcap, temperature)
    options = {"bias": bias, "softcap": softcap, "temperature": temperature}
    got = linear_log_prob(hidden, weight, target, **options, with_entropy=True, entropy_gradient=case == "entropy")
    loss, true_loss = (got[0] * upstream[0]).sum(), (expected[0] * upstream[0]).sum()
    if case == "entropy":
        loss, true_loss = loss + (got[1] * upstream[1]).sum(), true_loss + (expected[1] * upstream[1]).sum()
    wanted, mine = torch.autograd.grad(true_loss, exact), torch.autograd.grad(loss, inputs)
    for a, b in zip((*got, *mine), (*expected, *wanted), strict=True):
        assert (a.double() - b).norm() / b.norm() < 1e-2


def test_bf16_inputs_reduce_in_fp32():
    hidden, weight = torch.randn(4, 8).bfloat16(), torch.randn(50, 8).bfloat16()
    log_prob, entropy = linear_log_prob(hidden, weight, torch.arange(4))
    assert log_prob.dtype == torch.float32 and entropy is None
