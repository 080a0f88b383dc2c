"""Training with rollouts in the real vLLM: weights, resuming after its death, what is saved, the Python faces."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from vllm_runs import actor_of, grpo_config, rows, train

import verl
from verl import notices
from verl.errors import RolloutError
from verl.models.loading import load_causal_lm
from verl.rollout.vllm.engine import QUIET

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, prompts = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=64 << 20)
    done = engine.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0, max_tokens=12))
    print("answers", json.dumps([list(one.outputs[0].token_ids) for one in done]))
"""


def loaded(folder):
    return load_causal_lm(str(folder), dtype=torch.float32, device="cpu")


def test_grpo_updates_reach_vllm_and_the_saved_model_answers_the_same_there(tiny_vllm_dir, tmp_path):
    trainer, steps = train(grpo_config(tiny_vllm_dir, tmp_path / "run"))
    assert trainer.describe()["rollout_engine"] == "vllm" and len(steps) == 3
    for metrics in steps:
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["rollout/weight_probe_diff"] < 1e-4
        assert 0 < metrics["timing_s/weight_sync"] < metrics["timing_s/gen"]
        assert metrics["critic/score/max"] > metrics["critic/score/min"]
    now, before = actor_of(trainer).model.state_dict(), loaded(tiny_vllm_dir).state_dict()
    assert max((now[name] - before[name]).abs().max() for name in now) > 3e-3  # old weights would be off

    folder = tmp_path / "run" / "global_step_3" / "actor"
    model = loaded(folder)
    prompts = [[7, 8, 9], [20, 21, 22, 23]]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    environment = {**os.environ, **QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(prompts)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("answers "))
    assert json.loads(line.removeprefix("answers ")) == expected


def test_a_run_whose_engine_dies_goes_on_from_its_checkpoint(tiny_vllm_dir, tmp_path):
    steps = {"trainer.total_training_steps": 4, "trainer.save_freq": 1}
    _, expected = train(grpo_config(tiny_vllm_dir, tmp_path / "whole", **steps))

    def kill(trainer, metrics):
        if trainer.global_steps == 2:
            actor_of(trainer).hybrid._engine.process.process.kill()

    with pytest.raises(RolloutError, match="was killed by SIGKILL"):
        train(grpo_config(tiny_vllm_dir, tmp_path / "killed", **steps), watch=kill)
    trainer, rest = train(grpo_config(tiny_vllm_dir, tmp_path / "killed", **steps))
    assert trainer.global_steps == 4 and len(rest) == 2
    for metrics, same in zip(rest, expected[2:], strict=True):
        for name in ("critic/score/mean", "response_length/mean", "actor/grad_norm"):
            assert metrics[name] == pytest.approx(same[name], rel=1e-3), name


def test_python_first_with_an_actor(tiny_vllm_dir, tmp_path):
    actor = verl.VLLMActor(model_name=str(tiny_vllm_dir), tensor_parallel_size=1, gpu_memory_utilization=0.9)
    trainer = verl.RLTrainer(
        actor_model=actor,
        reward_fn=lambda batch: [float(len(text)) for text in batch["responses"]],
        prompts=["hello", "world"],
        max_seq_len=96,
        max_prompt_length=64,
        output_dir=str(tmp_path),
        config={"actor_rollout_ref.model.dtype": "float32", "trainer.device": "cpu", "trainer.save_final": False},
    )
    for _ in range(2):
        metrics = trainer.train_step()
        assert np.isfinite([metrics["kl_divergence"], metrics["policy_loss"], metrics["reward_mean"]]).all()
    assert trainer.trainer.describe()["rollout_engine"] == "vllm"
    batch = trainer.rollout(["again"], n=2, temperature=0.5)
    assert len(batch) == 2
    trainer.close()


def test_use_vllm_of_a_config_dict(tiny_vllm_dir, tmp_path):
    trainer = verl.RayPPOTrainer(config={
        "trainer": {"n_gpus_per_node": 1, "total_training_steps": 1, "default_local_dir": str(tmp_path)},
        "actor_rollout": {"model_name": str(tiny_vllm_dir)},
        "data": {"max_prompt_length": 32, "max_response_length": 8, "train_batch_size": 4},
        "use_vllm": True, "reward_fn": lambda batch: [1.0] * len(batch["responses"]),
    }, train_rows=rows())  # fmt: skip
    trainer.fit()
    assert not any("cannot be used here" in text for text in notices.seen())


def test_a_run_against_a_server(vllm_server, tiny_vllm_dir, tmp_path):
    name = "actor_rollout_ref.rollout"
    config = grpo_config(
        tiny_vllm_dir, tmp_path, **{f"{name}.name": "vllm_server", f"{name}.server_url": vllm_server.url}
    )
    trainer, steps = train(config)
    assert trainer.describe()["rollout_engine"] == "vllm_server" and len(steps) == 3
    for metrics in steps:
        assert metrics["training/rollout_probs_diff_max"] < 1e-4 and metrics["rollout/weight_probe_diff"] < 1e-4
