"""The memory plan of a configuration: for this machine or a named card, from the model's config alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from tiny_models import FAMILIES, make_config, make_model

from verl.cli import main
from verl.config import load_config, resolve
from verl.errors import ConfigError
from verl.hardware.memory import GIB
from verl.models.lora import add_adapters
from verl.models.settings import LoraSettings
from verl.trainer.planning import card, checkpointing_needed, imagined, model_shape, plan_lines, workload
from verl.trainer.settings import hardware_for, model_of

SEVEN_B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def seven_b(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    return str(tmp_path)


def on(gpu, path, *overrides):
    config = resolve(load_config([f"actor_rollout_ref.model.path={path}", *overrides]))
    return config, hardware_for(config, imagined(card(gpu)))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_a_shape(tmp_path, family):
    make_config(family).save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    assert shape.parameters == sum(p.numel() for p in make_model(family).parameters())
    assert (shape.layers, shape.hidden, shape.vocabulary) == (2, 32, 96)
    assert shape.query == 32 and shape.key in (16, 32)


def test_the_adapters_are_counted_as_peft_makes_them(tmp_path):
    model = make_model("llama")
    model.config.save_pretrained(tmp_path)
    config, choice = on("H200", tmp_path, "actor_rollout_ref.model.lora_rank=4")
    add_adapters(model, LoraSettings(rank=4))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert workload(config, choice, model_shape(str(tmp_path))).trainable == trainable


def test_checkpointing_is_chosen_on_a_gpu_where_the_update_needs_it(seven_b):
    small, large = ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048", "actor_rollout_ref.rollout.n=8")
    adapters = "actor_rollout_ref.model.lora_rank=16"
    few = "actor_rollout_ref.rollout.max_num_seqs=8"
    config, choice = on("RTX 3090", seven_b, large, adapters)
    assert (
        checkpointing_needed(config, choice)
        and model_of(config.actor_rollout_ref.model, choice, config).gradient_checkpointing
    )
    config, choice = on("H200", seven_b, adapters, small, few)
    assert not checkpointing_needed(config, choice)
    asked, choice = on(
        "H200", seven_b, adapters, small, few, "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    )
    assert model_of(asked.actor_rollout_ref.model, choice, asked).gradient_checkpointing
    on_cpu = replace(choice, device=replace(choice.device, kind="cpu", capability=None, memory_bytes=GIB))
    assert not checkpointing_needed(config, on_cpu)
    auto = load_config(["actor_rollout_ref.model.enable_gradient_checkpointing=auto"])
    assert auto.actor_rollout_ref.model.enable_gradient_checkpointing is None


def test_following_the_advice_makes_the_run_fit(seven_b):
    overrides = ["algorithm.name=grpo"]
    lines = list(plan_lines(*on("RTX 3090", seven_b, *overrides)))
    assert any("does not fit" in line for line in lines)
    for line in lines:
        if line.strip().startswith("set "):
            overrides.append(line.strip().removeprefix("set ").split(":")[0])
    assert len(overrides) > 2
    assert any(line.endswith("it fits") for line in plan_lines(*on("RTX 3090", seven_b, *overrides)))


def test_cards_are_found_by_part_of_their_name():
    assert card("nvidia tesla p40").capability == (6, 1)
    assert card("3090").name == "RTX 3090" and card("GeForce RTX 3090").memory_gib == 24
    with pytest.raises(ConfigError, match="A100 40GB, A100 80GB"):
        card("A100")
    with pytest.raises(ConfigError, match="not known; there are Tesla P40"):
        card("Voodoo 2")


def test_the_command_prints_yaml_with_the_plan_as_comments(seven_b, capsys):
    assert main(["plan", f"actor_rollout_ref.model.path={seven_b}", "--gpu", "Tesla P40"]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["actor_rollout_ref"]["model"]["path"] == seven_b
    assert "# Memory plan for the GPU 'Tesla P40'" in out and "float32" in out and "does not fit" in out
