"""What makes Megatron-Core impossible is found from the model's config, before a model loads; `verl plan` knows it."""

from __future__ import annotations

import importlib.util

import pytest
from tiny_models import make_config

from verl.cli import main
from verl.config import load_config, resolve
from verl.errors import ConfigError, MissingDependencyError
from verl.hardware.memory import phases
from verl.train_engine.megatron_model import require_megatron, why_not_split
from verl.trainer.build import begin
from verl.trainer.megatron_plan import check_megatron
from verl.trainer.planning import card, imagined, model_shape, workload
from verl.trainer.settings import hardware_for

A = "actor_rollout_ref.actor"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config_of(path, *more: str, size: int = 2, ranks: int = 2):
    given = [f"{A}.strategy=megatron", f"{A}.megatron.tensor_model_parallel_size={size}", *more]
    given += [f"trainer.n_gpus_per_node={ranks}", f"actor_rollout_ref.model.path={path}", "data.train_batch_size=8"]
    return resolve(load_config([*given, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]))


@pytest.mark.parametrize(
    ("family", "changes", "size", "words"),
    [
        ("llama", {}, 4, "4 ranks do not divide its 2 key-value heads"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}, 4, "6 attention heads"),
        ("llama", {"intermediate_size": 65}, 2, "intermediate size 65"),
        ("llama", {"hidden_act": "gelu"}, 2, "activation is gelu"),
        ("llama", {"attention_bias": True}, 2, "attention_bias"),
        ("llama", {"attention_dropout": 0.1}, 2, "dropout"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, 2, "'yarn'"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, 2, "a window"),
        ("gpt2", {}, 2, "'gpt2' have no mapping"),
        ("llama", {"model_type": "mixtral", "num_local_experts": 3}, 2, "2 ranks do not divide its 3 experts"),
        ("mistral", {}, 2, "'mistral' have no mapping"),
    ],
)
def test_why_a_model_cannot_be_split(family, changes, size, words):
    assert words in why_not_split(make_config(family, **changes), size)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen2", {"vocab_size": 97}), ("llama", {"rope_parameters": {**LLAMA3, "factor": 4.0}})],
)
def test_what_can_be_split(family, changes):
    assert why_not_split(make_config(family, **changes), 2) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [({"context": 4}, "1 times 4 ranks do not divide its 4 attention heads"), ({"stages": 3}, "2 layers are fewer")],
)
def test_why_tokens_or_layers_cannot_be_shared(given, words):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48} if "context" in given else {}
    found = why_not_split(make_config("llama", **heads), 1, **given)
    assert words.replace("4 attention", "6 attention") in found


def test_a_run_stops_before_its_model_loads(tmp_path, monkeypatch):
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="2 key-value heads"):
        check_megatron(config_of(tmp_path, size=4, ranks=4), need_package=False)
    check_megatron(config_of(tmp_path), need_package=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("megatron") else find(name))
    with pytest.raises(MissingDependencyError, match="pip install megatron-core"):
        require_megatron()
    # no weights and no tokenizer are there: the package is missed first
    with pytest.raises(MissingDependencyError, match="strategy=megatron"):
        begin(config_of(tmp_path, "trainer.device=cpu"), need_data=False, has_validation=None)
    begin_fsdp = config_of(tmp_path, f"{A}.strategy=fsdp", f"{A}.megatron.tensor_model_parallel_size=1")
    check_megatron(begin_fsdp)


def test_every_role_is_looked_at(tmp_path):
    for name, heads in (("policy", 2), ("value", 1)):
        make_config("llama", num_key_value_heads=heads).save_pretrained(tmp_path / name)
    more = ("algorithm.adv_estimator=gae", f"critic.model.path={tmp_path / 'value'}")
    config = resolve(load_config([f"{A}.strategy=megatron", f"{A}.megatron.tensor_model_parallel_size=2", *more]))
    config.actor_rollout_ref.model.path = str(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"^critic\.strategy=megatron .* 1 key-value heads"):
        check_megatron(config, need_package=False)


def test_plan_shows_the_layout(tmp_path, capsys):
    make_config("llama").save_pretrained(tmp_path)
    given = ["plan", f"actor_rollout_ref.model.path={tmp_path}", "data.train_batch_size=8", f"{A}.strategy=megatron"]
    given += [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "trainer.n_gpus_per_node=4",
        "--gpu=H200",
    ]
    assert main([*given, f"{A}.megatron.tensor_model_parallel_size=2"]) == 0
    assert "actor: Megatron-Core, 2 copies of the weights, each over 2 of 4 processes" in capsys.readouterr().out
    assert main([*given, f"{A}.megatron.pipeline_model_parallel_size=2", f"{A}.megatron.context_parallel_size=2"]) == 0
    assert "1 copy of the weights, each over 4 of 4 processes (layers over 2, tokens over 2)" in capsys.readouterr().out
    assert main([*given, f"{A}.megatron.tensor_model_parallel_size=4"]) == 2
    assert "2 key-value heads" in capsys.readouterr().err


def test_memory_is_that_of_a_part(tmp_path):
    make_config("llama").save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))

    def update(size: int, *more: str) -> dict[str, int]:
        config = config_of(tmp_path, *more, size=size, ranks=2)
        choice = hardware_for(config, imagined(card("H200")))
        return {phase.name: phase for phase in phases(shape, workload(config, choice, shape))}["update"].parts

    alone = f"{A}.megatron.use_distributed_optimizer=false"
    whole, part, shared = update(1, alone), update(2, alone), update(1)
    for name in ("weights", "fp32 masters", "optimizer moments", "fp32 gradients"):
        assert part[name] == whole[name] // 2, name
    assert shared["weights"] == whole["weights"] and shared["fp32 gradients"] == whole["fp32 gradients"]
    assert shared["fp32 masters"] == whole["fp32 masters"] // 2, "two copies share them"
    assert "gathered weights" not in part, "matrices compute as they lie"
    assert "gathered weights" in update(1, f"{A}.strategy=fsdp")
