"""Decoder layers of Llama's kind in fewer operations: the same logits, and only where both ways agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import make_model

from verl.hybrid.twin import make_twin
from verl.rollout.base import Request, SamplingParams
from verl.rollout.native.attention import NAME
from verl.rollout.native.cascade import in_buckets
from verl.rollout.native.host_layers import HostLayers, _Rotation
from verl.rollout.native.layers import decoder_layers
from verl.rollout.native.linears import HostLinears, onednn_works
from verl.rollout.native.sequence import Sequence
from verl.rollout.registry import make_engine

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not onednn_works(CPU, torch.float32), reason="oneDNN does not multiply here")


def taken(model) -> int:
    """How many of its two layers are taken over."""
    model.set_attn_implementation(NAME)
    return HostLayers(model, decoder_layers(model, 2), HostLinears(model, 1 << 30)).count


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("steps", [6, 24])  # on live weights, and on packed ones
def test_tokens_and_log_probs_are_those_of_the_plain_layers(family, steps, monkeypatch):
    model = make_model(family)

    def rollout():
        engine = make_engine("native", make_twin(model), None, (), max_num_seqs=6)
        assert engine.name == "native"
        params = SamplingParams(steps, ignore_eos=True)
        prompts = [np.arange(5, 5 + n) for n in (3, 40, 21)]
        done = engine.generate([Request(f"{i}", prompts[i // 2], params, seed=i) for i in range(6)])
        return engine, [list(c.token_ids) for c in done], [list(c.log_probs) for c in done]

    engine, tokens, log_probs = rollout()
    assert engine.runner.host_layers.count == 2
    monkeypatch.setattr(HostLayers, "__init__", lambda self, *_: self.__dict__.update(count=0, rotation=_Rotation()))
    engine, plain_tokens, plain_log_probs = rollout()
    assert engine.runner.host_layers.count == 0
    assert tokens == plain_tokens
    np.testing.assert_allclose(log_probs, plain_log_probs, atol=2e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "phi", "gpt_neox", "opt"])
def test_layers_of_another_kind_are_left_alone(family):
    assert taken(make_model(family)) == 0


@pytest.mark.parametrize("change", ["nothing", "activation", "norm", "residual", "hook"])
def test_a_layer_that_computes_something_else_is_left_alone(change):
    model = make_model("llama")
    layer = model.model.layers[1]
    if change == "activation":
        layer.mlp.act_fn = torch.nn.GELU()
    elif change == "norm":
        plain = layer.input_layernorm.forward
        layer.input_layernorm.forward = lambda x: plain(x) * 1.01
    elif change == "residual":
        plain_mlp = layer.mlp.forward
        layer.mlp.forward = lambda x: plain_mlp(x) * 0.9
    elif change == "hook":
        layer.mlp.register_forward_hook(lambda *_: None)
    assert taken(model) == (2 if change == "nothing" else 1)


def test_rows_of_one_call_lie_behind_one_another():
    def row(number: int, group, pages: int) -> Sequence:
        sequence = Sequence(Request(str(number), np.arange(3), SamplingParams(4)), number)
        sequence.group, sequence.shared_pages = group, pages
        return sequence

    groups = [object() for _ in range(4)]
    rows = [row(i, groups[i // 2], (1, 9, 1, 12)[i // 2]) for i in range(8)] + [row(8, None, 0), row(9, groups[0], 0)]
    assert [s.order for s in in_buckets(rows)] == [8, 9, 0, 1, 4, 5, 2, 3, 6, 7]
