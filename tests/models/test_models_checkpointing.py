"""Recomputing activations in all layers or in every so many: the same gradients, fewer layers computed twice."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_model

from verl.models.loading import enable_gradient_checkpointing


def gradients(model):
    calls = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.train()(torch.arange(5, 25)[None]).logits.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}, len(calls)


@pytest.mark.parametrize(("every", "twice"), [(1, 4), (2, 2), (3, 2), (9, 1)])
def test_every_so_many_layers_are_computed_twice(every, twice):
    expected, calls = gradients(make_model("llama", num_hidden_layers=4))
    assert calls == 4
    model = make_model("llama", num_hidden_layers=4)
    enable_gradient_checkpointing(model, every)
    found, calls = gradients(model)
    assert calls == 4 + twice
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name
