"""QLoRA: the frozen base in 4 or 8 bits, adapters beside it, one set of tensors for both uses, a merged export."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tiny_models import make_model, make_tokenizer
from transformers import AutoModelForCausalLM

from verl import notices
from verl.config import load_config, validate
from verl.errors import ConfigError, MissingDependencyError
from verl.hybrid import make_twin
from verl.models.loading import save_pretrained
from verl.models.lora import adapters_off, add_adapters
from verl.models.quantization import quantization_of, quantize
from verl.models.settings import LoraSettings, ModelSettings

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None or importlib.util.find_spec("peft") is None,
    reason="the packages bitsandbytes and peft are not installed",
)
IDS = torch.arange(5, 25)[None]
TOLERANCE = {"nf4": 0.5, "int8": 0.05}
AR = "actor_rollout_ref"


def adapted(kind, family="qwen2", dtype=torch.float32):
    torch.manual_seed(0)
    model = make_model(family, hidden_size=64).to(dtype)
    plain = model(IDS).logits.detach()
    quantize(model, kind)
    add_adapters(model, LoraSettings(rank=4, alpha=8))
    return model.train(), plain


def moved(model):
    """As after an update: the adapters do something."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.05)


@needs_bitsandbytes
@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_base_is_small_frozen_and_close_and_only_adapters_train(kind, family):
    model, plain = adapted(kind, family)
    assert quantization_of(model) == kind
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names and all("lora_" in name for name in names)
    base = model.model.layers[0].mlp.up_proj.base_layer.weight
    assert base.dtype == (torch.uint8 if kind == "nf4" else torch.int8)
    assert base.numel() == 64 * model.config.intermediate_size // (2 if kind == "nf4" else 1)
    assert model.get_output_embeddings().weight.dtype == torch.float32
    out = model(IDS).logits
    assert float((out.detach() - plain).norm() / plain.norm()) < TOLERANCE[kind]
    out.square().mean().backward()
    gradients = [p.grad.norm() for name, p in model.named_parameters() if "lora_B" in name]
    assert gradients and all(torch.isfinite(g) and g > 0 for g in gradients)


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_twin_shares_every_tensor_and_follows_the_adapters(kind):
    model, _ = adapted(kind)
    model.eval()
    model(IDS)
    twin = make_twin(model)
    theirs = dict(twin.named_parameters())
    assert all(p is theirs[name] for name, p in model.named_parameters())
    moved(model)
    with torch.no_grad():
        assert torch.allclose(twin(IDS).logits, model(IDS).logits, atol=1e-4)
        both = twin(torch.cat([IDS, IDS.flip(1)])).logits
        assert torch.allclose(both[:1], twin(IDS).logits, atol=1e-4)  # whatever lies beside it
        assert not torch.allclose(twin(IDS).logits, _base(model), atol=1e-3)


def _base(model):
    with adapters_off(model):
        return model(IDS).logits


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_export_is_plain_merged_and_computes_the_same(kind, tmp_path):
    model, _ = adapted(kind)
    moved(model)
    model.eval()
    save_pretrained(model, make_tokenizer(), tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(p.is_floating_point() for p in exported.parameters())
    assert (tmp_path / "lora_adapter" / "adapter_model.safetensors").is_file()
    with torch.no_grad():
        mine, theirs = model(IDS).logits, exported(IDS).logits
    assert float((mine - theirs).norm() / mine.norm()) < 1e-5


def test_a_missing_library_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"nf4 \(model\.quantization\) needs the package 'bitsandbytes'"):
        quantize(make_model("qwen2"), "nf4")


def test_the_keys():
    notices.reset()
    config = load_config([f"{AR}.model.load_in_4bit=true", f"{AR}.model.lora_rank=8"])
    assert config.actor_rollout_ref.model.quantization == "nf4"
    assert load_config([f"{AR}.model.load_in_8bit=true"]).actor_rollout_ref.model.quantization == "int8"
    with pytest.raises(ConfigError, match=r"quantization=nf4 freezes the weights: set actor_rollout_ref\.model\.lora"):
        validate(load_config([f"{AR}.model.quantization=nf4"]), need_data=False, need_model=False)
    with pytest.raises(ConfigError, match=r"rollout\.name=vllm has weights of its own"):
        overrides = [f"{AR}.model.quantization=nf4", f"{AR}.model.lora_rank=8", f"{AR}.rollout.name=vllm"]
        validate(load_config(overrides), need_data=False, need_model=False)
    assert ModelSettings("x").quantization is None
