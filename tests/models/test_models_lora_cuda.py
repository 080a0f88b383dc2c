"""LoRA and QLoRA on a CUDA GPU: training, rollouts by the native engine on the same tensors, memory, export."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tiny_models import make_model, make_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM

from verl import Trainer
from verl.config import load_config
from verl.data import arithmetic_task
from verl.hybrid import make_twin
from verl.models.loading import save_pretrained
from verl.models.lora import add_adapters
from verl.models.quantization import quantize
from verl.models.settings import LoraSettings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the package peft is not installed"),
]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the package bitsandbytes is not installed"
)
KINDS = [None, *(pytest.param(kind, marks=needs_bitsandbytes) for kind in ("nf4", "int8"))]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "m", "qwen2", **SIZES)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_the_adapters_and_the_native_engine_samples_from_them(folder, tmp_path, kind, checkpointing):
    values = {
        "algorithm.name": "grpo",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 8,
        "actor_rollout_ref.model.path": str(folder),
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.quantization": kind,
        "actor_rollout_ref.model.enable_gradient_checkpointing": checkpointing,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "reward.reward_fn": lambda batch: [float(len(text) % 3) for text in batch["responses"]],
        "trainer.device": "cuda",
        "trainer.total_training_steps": 3,
        "trainer.default_local_dir": str(tmp_path / "run"),
        "trainer.logger": [],
    }
    trainer = Trainer(load_config(values=values), train_rows=arithmetic_task("train", 5), stays_open=True)
    before = {name: tensor.clone() for name, tensor in trainer.roles.actor.state_dict().items()}
    metrics = trainer.fit()
    after = trainer.roles.actor.state_dict()
    for name, tensor in before.items():
        if name.startswith("live/"):
            assert torch.equal(tensor, after[name]) == ("lora_" not in name), name
    assert trainer.describe()["rollout_engine"] == "native"
    # the engine's log-probs against the trainer's, on weights that moved twice
    assert metrics["training/rollout_log_probs_diff_mean"] < 0.05
    assert metrics["actor/kl_loss"] > 0  # against the base, with the adapters off
    trainer.close()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "actor" / "global_step_3")
    assert all(p.is_floating_point() for p in exported.parameters())


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_base_is_small_and_its_export_computes_the_same(kind, tmp_path):
    torch.manual_seed(0)
    model = make_model("llama", hidden_size=512, intermediate_size=2048, dtype=torch.bfloat16)
    full = sum(p.numel() * 2 for p in model.parameters())
    before = torch.cuda.memory_allocated()
    quantize(model, kind, "cuda")
    add_adapters(model.cuda(), LoraSettings(rank=4))
    assert torch.cuda.memory_allocated() - before < (0.45 if kind == "nf4" else 0.7) * full
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.02)
    ids = torch.arange(5, 60, device="cuda")[None]
    twin = make_twin(model.eval())
    save_pretrained(model, make_tokenizer(), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).cuda()
    with torch.no_grad():
        mine, same, theirs = (m(ids).logits.float() for m in (model, twin, plain))
    assert (mine - same).norm() <= 1e-3 * mine.norm()
    assert (mine - theirs).norm() <= 0.08 * mine.norm()  # bf16, and weights rounded to it
