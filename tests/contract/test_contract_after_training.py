"""Rows B8, B12, C8 and C10: what is said while a run goes wrong, and what can be done with a model that was trained."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from verl import RayPPOTrainer, RLTrainer
from verl.cli.main import main

MODEL = "facebook/opt-125m"


@pytest.fixture(scope="module")
def trained(hub, tmp_path_factory):
    """The run folder that document 001's training leaves, ``./output/rl_checkpoint``."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(hub / "hub"))
        patch.chdir(tmp_path_factory.mktemp("reader"))
        trainer = RLTrainer(MODEL, lambda batch: [float(len(t)) for t in batch["responses"]], max_seq_len=64)
        trainer.train_step()
        folder = trainer.save().resolve().parent
        trainer.close()
    return folder


def test_B12_export_as_typed(trained, environment, tmp_path):
    """``verl export --model_path ./output/rl_checkpoint --export_format vllm --output_dir ./vllm_model``."""
    command = ["export", "--model_path", str(trained), "--export_format", "vllm", "--output_dir", "./vllm_model"]
    done = subprocess.run(
        [sys.executable, "-m", "verl", *command, "--verify"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "vllm serve vllm_model" in done.stdout and "same best token at 100.0%" in done.stdout
    ids = torch.randint(3, 300, (1, 9))
    policy = AutoModelForCausalLM.from_pretrained(trained / "global_step_1" / "actor").eval()
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "vllm_model").eval()
    with torch.no_grad():
        assert torch.equal(policy(input_ids=ids).logits, served(input_ids=ids).logits)
    assert GenerationConfig.from_pretrained(tmp_path / "vllm_model").eos_token_id == 0
    assert "| algorithm | ppo |" in (tmp_path / "vllm_model" / "README.md").read_text()
    assert json.loads((tmp_path / "vllm_model" / "verl_export.json").read_text())["base_model"] == MODEL


def test_C8_the_compare_command(trained, hub_here, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("你好\nWrite a poem.\n", encoding="utf-8")
    assert main(["compare", MODEL, str(trained), "--prompts", "prompts.txt", "--max_tokens", "6"]) == 0
    out = capsys.readouterr().out
    assert "> 你好" in out and f"[{MODEL}]" in out and "global_step_1]" in out and "Page: compare.html" in out
    assert (tmp_path / "compare.html").read_text(encoding="utf-8").count("<article") == 2


def said(folder) -> str:
    return (folder / "notices.txt").read_text(encoding="utf-8")


def test_C10_a_flat_reward_is_said(hub_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = RayPPOTrainer(
        config={
            "trainer": {"n_gpus_per_node": 1, "nnodes": 1, "total_training_steps": 11, "default_local_dir": "run"},
            "actor_rollout": {"model_name": MODEL},
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {"rollout": {"n": 2}},
            "data": {"max_response_length": 4, "train_batch_size": 2},
            "reward_fn": lambda batch: torch.zeros(len(batch["responses"])),
        },
        train_rows=[{"prompt": f"question {i}"} for i in range(4)],
    )
    trainer.fit()
    trainer.close()
    assert said(tmp_path / "run").count("Flat reward: for 10 steps") == 1


def test_B8_a_spread_that_explodes_is_said(hub_here, tmp_path, monkeypatch):
    """Raw logits as a reward, growing without bound."""
    monkeypatch.chdir(tmp_path)
    sizes = [1.0, 1.0, 40.0, 80.0, 160.0, 320.0]

    def raw_logits(batch):
        size = sizes.pop(0)
        return [size * (i % 2) for i in range(len(batch["responses"]))]

    trainer = RLTrainer(MODEL, raw_logits, max_seq_len=64, output_dir="run")
    for _ in range(6):
        trainer.train_step()
    trainer.close()
    text = said(tmp_path / "run")
    assert text.count("Reward spread explosion") == 1 and 'normalize="sigmoid"' in text
