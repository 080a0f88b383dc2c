"""The memory plan of a configuration: for this machine or a named card, from the model's config alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from tiny_models import FAMILIES, make_config, make_model

from verl import notices
from verl.cli import main
from verl.config import load_config, resolve
from verl.errors import ConfigError
from verl.hardware.memory import GIB, fits, host_bytes, weight_bytes
from verl.models.lora import add_adapters
from verl.models.settings import LoraSettings
from verl.trainer.planning import (
    automatic,
    card,
    checkpointing_needed,
    computed_tokens,
    imagined,
    model_shape,
    plan_lines,
    workload,
)
from verl.trainer.settings import actor_settings, critic_settings, hardware_for, model_of, reference_settings

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
    few, grpo = "actor_rollout_ref.rollout.max_num_seqs=8", "algorithm.name=grpo"
    config, choice = on("RTX 3090", seven_b, large, adapters)
    assert (
        checkpointing_needed(config, choice)
        and model_of(config.actor_rollout_ref.model, choice, config).gradient_checkpointing
    )
    config, choice = on("H200", seven_b, adapters, small, few, grpo)
    assert not checkpointing_needed(config, choice)
    refused = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
    assert not checkpointing_needed(*on("RTX 3090", seven_b, large, adapters, refused))
    asked, choice = on(
        "H200", seven_b, adapters, small, few, grpo, "actor_rollout_ref.model.enable_gradient_checkpointing=true"
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


SMALL = {  # Qwen2.5-0.5B and TinyLlama-1.1B
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False},
}  # fmt: skip


@pytest.mark.parametrize(("size", "offloads"), [("0.5B", False), ("1.1B", True)])
def test_ppo_fits_a_24_gib_card_and_the_plan_chooses_offload_by_itself(tmp_path, size, offloads):  # C14
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **SMALL[size]}))
    config, choice = on("RTX 3090", tmp_path, "algorithm.use_kl_in_reward=true")
    assert any(line.endswith("it fits") for line in plan_lines(config, choice))
    chosen = automatic(config, choice)
    assert (chosen.critic_offload or chosen.offload) == offloads
    notices.reset()
    actor, critic = actor_settings(config, choice, 10), critic_settings(config, choice, 10)
    assert critic.optimizer.offload == chosen.critic_offload and actor.optimizer.offload == chosen.offload
    assert reference_settings(config, choice).model.param_offload == chosen.reference_away
    assert critic.model.param_offload == chosen.critic_away
    assert actor.update_cut.max_tokens == chosen.tokens == 4096
    assert any("critic.optim.offload is on" in line for line in notices.seen()) == offloads
    # what the user decides stays: then the plan only proposes
    stays = ["critic.optim.offload=false", "actor_rollout_ref.actor.optim.offload=false"]
    config, choice = on("RTX 3090", tmp_path, "algorithm.use_kl_in_reward=true", *stays)
    assert not automatic(config, choice).critic_offload
    assert any("critic.optim.offload=true" in line for line in plan_lines(config, choice)) == offloads


def test_full_training_of_7b_fits_one_h200_with_8_bit_moments_or_host_memory(seven_b):
    eight = ["algorithm.name=grpo", "actor_rollout_ref.actor.optim.optimizer=AdamW8bit"]
    lines = list(plan_lines(*on("H200", seven_b, *eight), card("H200")))
    assert any(line.endswith("it fits") for line in lines) and any("a step: about" in line for line in lines)
    config, choice = on("H200", seven_b, "algorithm.name=grpo", "actor_rollout_ref.actor.optim.offload=true")
    work = workload(config, choice, model_shape(seven_b))
    assert fits(model_shape(seven_b), work)
    assert host_bytes(model_shape(seven_b), work) == 16 * model_shape(seven_b).parameters
    plain = list(plan_lines(*on("H200", seven_b, "algorithm.name=grpo")))
    assert any("set actor_rollout_ref.actor.optim.optimizer=AdamW8bit" in line for line in plain)


def test_qlora_needs_a_third_of_the_weights_memory(seven_b):
    adapters = ["algorithm.name=grpo", "actor_rollout_ref.model.lora_rank=16"]
    shape = model_shape(seven_b)
    whole, four = (
        weight_bytes(shape, workload(*on("RTX 3060", seven_b, *adapters, *more), shape))
        for more in ([], ["actor_rollout_ref.model.quantization=nf4"])
    )
    assert whole == 2 * (shape.parameters + workload(*on("RTX 3060", seven_b, *adapters), shape).trainable)
    assert four == pytest.approx(5.5 * GIB, rel=0.1)
    lines = list(plan_lines(*on("RTX 3060", seven_b, *adapters)))
    assert any("set actor_rollout_ref.model.quantization=nf4" in line for line in lines)


def test_shared_prompts_count_once(seven_b):
    sizes = ["data.train_batch_size=2", "data.max_prompt_length=100", "data.max_response_length=10"]
    config, choice = on("H200", seven_b, "algorithm.name=grpo", "actor_rollout_ref.rollout.n=8", *sizes)
    assert computed_tokens(config) == 2 * 100 + 16 * 10
    work = workload(config, choice, model_shape(seven_b))
    assert work.micro_tokens == 360 and work.trained_share == pytest.approx(160 / 360)


def test_cards_are_found_by_part_of_their_name():
    assert card("nvidia tesla p40").capability == (6, 1)
    assert card("3090").name == "RTX 3090" and card("GeForce RTX 3090").memory_gib == 24
    assert card("A100-40GB").name == "A100 40GB" and card("h200").memory_gib == 139
    with pytest.raises(ConfigError, match="A100 40GB, A100 80GB"):
        card("A100")
    with pytest.raises(ConfigError, match="not known; there are Tesla P40"):
        card("Voodoo 2")


def test_the_command_prints_yaml_with_the_plan_as_comments(seven_b, capsys):
    assert main(["plan", f"actor_rollout_ref.model.path={seven_b}", "--gpu", "Tesla P40"]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["actor_rollout_ref"]["model"]["path"] == seven_b
    assert "# Memory plan for the GPU 'Tesla P40'" in out and "float32" in out and "does not fit" in out
