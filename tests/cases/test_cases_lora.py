"""Public cases B71 and B72: what is written of a model with adapters."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model
from trainer_helpers import make_trainer
from transformers import AutoModelForCausalLM

from verl.errors import ModelError
from verl.hybrid import make_twin
from verl.models.loading import save_pretrained
from verl.models.lora import ADAPTER, add_adapters
from verl.models.settings import LoraSettings


def names_in(folder):
    return [name for file in folder.glob("*.safetensors") for name in load_file(file)]


def test_B71_the_merged_weight_is_base_plus_scaled_product(tmp_path):
    """W = 0, A = [[1, 0]], B = [[1], [0]], r = 1, alpha = 2: the file holds [[2, 0], [0, 0]] under the plain name."""
    model = make_model("llama", hidden_size=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=4)
    add_adapters(model, LoraSettings(rank=1, alpha=2, target_modules=["k_proj"]))
    for layer in model.model.layers:
        layer.self_attn.k_proj.base_layer.weight.data.zero_()
        layer.self_attn.k_proj.lora_A[ADAPTER].weight.data.copy_(torch.tensor([[1.0, 0, 0, 0]]))
        layer.self_attn.k_proj.lora_B[ADAPTER].weight.data.copy_(torch.tensor([[1.0], [0]]))
    save_pretrained(model, None, tmp_path)
    saved = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    expected = torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.equal(saved["model.layers.0.self_attn.k_proj.weight"], expected)
    assert json.loads((tmp_path / "lora_adapter" / "adapter_config.json").read_text())["lora_alpha"] == 2


def test_B72_the_checkpoint_of_a_run_with_adapters_is_a_plain_model(tiny_model_dir, tmp_path):
    trainer = make_trainer(
        tiny_model_dir,
        tmp_path / "run",
        actor_rollout_ref__model__lora_rank=4,
        actor_rollout_ref__model__lora_alpha=8,
        actor_rollout_ref__actor__optim__lr=0.05,
        trainer__save_final=True,
        trainer__total_training_steps=1,
    )
    live = trainer.roles.actor.workers[0].model
    trainer.fit()
    folder = tmp_path / "run" / "global_step_1" / "actor"
    assert names_in(folder) and not any("base_layer" in n or "base_model" in n or "lora" in n for n in names_in(folder))
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()(input_ids=ids).logits
        torch.testing.assert_close(plain, make_twin(live)(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    assert (plain - base).abs().max() > 1e-3  # something was learned


def test_modules_to_leave_out_that_name_nothing_are_an_error():
    """A text is a regular expression over whole names: the ending alone would leave nothing out, silently."""
    with pytest.raises(ModelError, match="exclude_modules=q_proj"):
        add_adapters(make_model("llama"), LoraSettings(rank=1, exclude_modules="q_proj"))
    model = make_model("llama")
    add_adapters(model, LoraSettings(rank=1, exclude_modules=r".*\.q_proj"))
    adapted = {name.split(".")[-4] for name in model.state_dict() if "lora_A" in name}
    assert "k_proj" in adapted and "q_proj" not in adapted
