"""oneDNN's products in place of MKL's: same values and gradients, on processors that gain from them."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_model, sample_batch
from torch import nn

from verl.models import host_linear
from verl.models.backbone import use_packed_attention
from verl.models.host_linear import HostLinear, product, use_host_products
from verl.models.policy import log_probs

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN")
ROWS = [([5, 6, 7], [8, 9, 10, 1], [1, 1, 1, 1]), ([5, 6], [11, 12], [1, 0])]


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def better(request, monkeypatch):
    monkeypatch.setattr(host_linear, "onednn_is_better", lambda: request.param)
    return request.param


@pytest.mark.parametrize("shape", [(7, 16), (2, 5, 16), (0, 16)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_a_linear_layer(better, shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(16, 24, bias=bias)
    ours = HostLinear(16, 24, bias=bias)
    ours.load_state_dict(layer.state_dict())
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    layer(x).square().sum().backward()
    ours(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, atol=1e-5, rtol=1e-5)
    for one, two in zip(layer.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, atol=1e-5, rtol=1e-5)


def test_the_products_are_onednns_where_they_are_faster(monkeypatch):
    layer = HostLinear(8, 8)

    def kernels():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            layer(torch.randn(4, 8)).sum().backward()
        return {event.name for event in profile.events()}

    monkeypatch.setattr(host_linear, "onednn_is_better", lambda: True)
    assert "mkldnn::_linear_pointwise" in kernels()
    monkeypatch.setattr(host_linear, "onednn_is_better", lambda: False)
    assert "mkldnn::_linear_pointwise" not in kernels()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_alone(monkeypatch, dtype):
    monkeypatch.setattr(host_linear, "onednn_is_better", lambda: True)
    a, b = torch.randn(3, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    assert torch.equal(product(a, b), a @ b.t())


def test_frozen_weights_get_no_gradient(monkeypatch):
    monkeypatch.setattr(host_linear, "onednn_is_better", lambda: True)
    layer = HostLinear(8, 8).requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_model_trains_the_same(monkeypatch, family):
    """Log-probs and all gradients, through the fused head as well, and the file format stays."""
    gradients = []
    for better in (False, True):
        monkeypatch.setattr(host_linear, "onednn_is_better", lambda better=better: better)
        model = make_model(family)
        use_packed_attention(model)
        names = list(model.state_dict())
        use_host_products(model)
        assert list(model.state_dict()) == names
        assert any(isinstance(module, HostLinear) for module in model.modules()) == better
        log_prob, entropy = log_probs(model.train(), sample_batch(ROWS), with_entropy=True)
        (log_prob.sum() + 0.1 * entropy.sum()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, one in gradients[0].items():
        scale = one.norm().clamp_min(1e-6)
        assert ((gradients[1][name] - one).norm() / scale) < 5e-6, name
