"""LoRA: what is trained, what the twin sees, what the reference is, and what the export holds."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model, sample_batch
from transformers import AutoModelForCausalLM

from verl.errors import ModelError
from verl.hybrid import make_twin
from verl.models.loading import enable_gradient_checkpointing, save_pretrained
from verl.models.lora import ADAPTER, adapters_off, add_adapters, merged_state
from verl.models.policy import log_probs, prepare_policy
from verl.models.settings import LoraSettings, ModelSettings

ROWS = [([5, 6, 7, 8], [9, 10, 11], [1, 1, 1]), ([5, 6, 7, 8], [12, 13], [1, 1]), ([20, 21], [22, 23, 24], [1, 1, 1])]
LORA = LoraSettings(rank=4, alpha=8)


def adapted(family="qwen2", lora=LORA, trained=True, **changes):
    model = make_model(family, **changes)
    prepare_policy(model, ModelSettings("here", lora=lora))
    if trained:
        torch.manual_seed(1)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "phi3"])
def test_only_adapters_are_trained_and_a_fresh_one_changes_nothing(family):
    plain, _ = log_probs(make_model(family), sample_batch(ROWS))
    model = adapted(family, trained=False).eval()
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable and all(".lora_" in name for name in trainable)
    assert not any("lm_head" in name for name in trainable)
    value, _ = log_probs(model, sample_batch(ROWS))
    torch.testing.assert_close(value, plain)
    value.sum().backward()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert any(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)


def test_the_reference_is_the_model_with_adapters_off():
    plain, _ = log_probs(make_model("qwen2"), sample_batch(ROWS))
    model = adapted()
    with adapters_off(model):
        torch.testing.assert_close(log_probs(model, sample_batch(ROWS))[0], plain)
    assert (log_probs(model, sample_batch(ROWS))[0] - plain).abs().max() > 1e-3
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_twin_shares_base_and_adapter_tensors(family):
    model = adapted(family).eval()
    twin = make_twin(model)
    names = dict(model.named_parameters())
    for name, p in twin.named_parameters():
        assert p is names[name]
    ids = torch.tensor([[5, 6, 7, 8]])
    before = twin(input_ids=ids).logits
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).add_(0.5)
    after = twin(input_ids=ids).logits
    assert (after - before).abs().max() > 1e-3
    with adapters_off(model):  # the training model's switch is not the twin's
        torch.testing.assert_close(twin(input_ids=ids).logits, after, rtol=0, atol=0)


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen2", False), ("gpt2", True), ("phi3", False)])
def test_the_export_is_merged_and_plain_with_the_adapter_beside_it(tmp_path, family, tied):
    from peft import PeftModel

    model = adapted(family, tie_word_embeddings=tied).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        expected = make_twin(model)(input_ids=ids).logits
    save_pretrained(model, None, tmp_path)
    names = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert names and not any("base_layer" in n or "base_model.model" in n or "lora" in n for n in names)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "lora_adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    wrapped = PeftModel.from_pretrained(make_model(family, tie_word_embeddings=tied), tmp_path / "lora_adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    continued = make_model(family, tie_word_embeddings=tied)
    add_adapters(continued, LoraSettings(rank=1, adapter_path=str(tmp_path / "lora_adapter")))
    with torch.no_grad():
        torch.testing.assert_close(continued(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_merged_weight_by_hand():
    """W = 0 (2x2), A = [[1, 0]], B = [[1], [0]], r = 1, alpha = 2 merge to [[2, 0], [0, 0]]."""
    model = make_model("llama", hidden_size=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=4)
    add_adapters(model, LoraSettings(rank=1, alpha=2, target_modules=["k_proj"]))
    layer = model.model.layers[0].self_attn.k_proj  # 2x4: two inputs more, with zeros
    layer.base_layer.weight.data.zero_()
    layer.lora_A[ADAPTER].weight.data.copy_(torch.tensor([[1.0, 0, 0, 0]]))
    layer.lora_B[ADAPTER].weight.data.copy_(torch.tensor([[1.0], [0]]))
    merged = merged_state(model)["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(merged, torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 0]]))


def test_checkpointing_does_not_change_the_adapters_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = adapted(dtype=torch.float64)
        if checkpointing:
            enable_gradient_checkpointing(model)
        log_probs(model.train(), sample_batch(ROWS))[0].sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-9, rtol=1e-6)


def test_targets_that_are_not_there_are_an_error():
    with pytest.raises(ModelError, match="LoRA cannot be added to"):
        add_adapters(make_model("qwen2"), LoraSettings(rank=2, target_modules=["no_such_layer"]))
    with pytest.raises(ModelError, match="not a linear layer"):
        add_adapters(make_model("qwen2"), LoraSettings(rank=2, target_modules=["embed_tokens"]))
