"""Weights in host memory outside their phase: same numbers, same objects, and nothing left on the device."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_model

from verl.models.offload import HostWeights


def sizes(model):
    return {name: p.untyped_storage().nbytes() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])  # gpt2 ties its output layer to its embeddings
def test_weights_leave_and_come_back(family):
    model = make_model(family)
    ids = torch.arange(5, 12)[None]
    expected = model(ids).logits
    weights = HostWeights(model, frozen=True)
    assert set(sizes(model).values()) == {0} and not weights.present
    held = {id(p) for p in model.parameters()}
    for _ in range(2):
        with weights.here(), weights.here():
            assert torch.equal(model(ids).logits, expected)
        assert set(sizes(model).values()) == {0}
    assert {id(p) for p in model.parameters()} == held
    assert model.get_input_embeddings().weight is model.get_input_embeddings().weight


def test_changes_in_a_phase_are_kept_unless_the_weights_are_frozen():
    for frozen in (False, True):
        model = make_model("qwen2")
        name, weight = next(iter(model.named_parameters()))
        before = weight.detach().clone()
        weights = HostWeights(model, frozen=frozen)
        with weights.here(), torch.no_grad():
            weight.add_(1)
        with weights.here():
            assert torch.equal(weight, before if frozen else before + 1), name


def test_an_error_in_a_phase_still_frees_the_device():
    model = make_model("qwen2")
    weights = HostWeights(model, frozen=False)
    with pytest.raises(RuntimeError, match="boom"), weights.here():
        raise RuntimeError("boom")
    assert set(sizes(model).values()) == {0} and weights.bytes > 0
