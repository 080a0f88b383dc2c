"""Resume equals never having stopped: kill -9 in a step and in a save, then go on; every number is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_helpers import make_trainer, weights
from transformers import AutoModelForCausalLM

from verl import notices
from verl.hybrid import make_twin
from verl.tracking import is_time_metric

HERE = Path(__file__).parent


def run(model, folder, algorithm, steps, when="none"):
    paths = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent)])
    script = str(HERE / "trainer_resume_script.py")
    command = [sys.executable, script, str(model), str(folder), algorithm, str(steps), when]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)


def trajectory(folder) -> dict[int, dict]:
    """Step → every metric that does not depend on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: {k: v for k, v in row.items() if not is_time_metric(k) and "seconds" not in k} for row in rows}


@pytest.mark.parametrize("algorithm", ["ppo", "dapo"])
def test_kill_in_a_step_and_in_a_save_then_resume(tiny_model_dir, tmp_path, algorithm):
    straight = run(tiny_model_dir, tmp_path / "straight", algorithm, 7)
    assert straight.returncode == 0, straight.stderr[-2000:]
    broken = tmp_path / "broken"
    assert run(tiny_model_dir, broken, algorithm, 7, "step:4").returncode == -9
    assert (broken / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert run(tiny_model_dir, broken, algorithm, 7, "save:4").returncode == -9
    assert (broken / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    again = run(tiny_model_dir, broken, algorithm, 7)
    assert again.returncode == 0, again.stderr[-2000:]
    assert trajectory(broken) == trajectory(tmp_path / "straight")
    assert len(trajectory(broken)) == 7
    for role in ("actor", "critic") if algorithm == "ppo" else ("actor",):
        files = [tmp_path / name / "global_step_7" / role / "model.safetensors" for name in ("straight", "broken")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_finished_run_takes_no_further_step_and_says_so(tiny_model_dir, tmp_path):
    first = make_trainer(tiny_model_dir, tmp_path, trainer__save_final=True)
    first.fit()
    done = weights(first)
    second = make_trainer(tiny_model_dir, tmp_path, trainer__save_final=True)
    second.fit()
    assert any("Nothing to do" in line for line in notices.seen())
    assert all(torch.equal(done[name], now) for name, now in weights(second).items())
    assert (tmp_path / "global_step_2" / "actor" / "config.json").is_file()


def test_the_saved_policy_loads_as_it_is_and_equals_the_live_one(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path, algorithm="ppo", trainer__save_final=True)
    trainer.fit()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "actor" / "global_step_2").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    live = make_twin(trainer.roles.actor.workers[0].model)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, live(ids).logits, atol=1e-5, rtol=0)
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    AutoTokenizer.from_pretrained(tmp_path / "actor" / "global_step_2")
    AutoModelForTokenClassification.from_pretrained(tmp_path / "global_step_2" / "critic")


def test_addresses_of_live_weights_never_move(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path, trainer__save_final=True)
    before = [p.data_ptr() for p in trainer.roles.actor.workers[0].model.parameters()]
    trainer.fit()
    again = make_trainer(tiny_model_dir, tmp_path, trainer__total_training_steps=3)
    worker = again.roles.actor.workers[0]
    start = [p.data_ptr() for p in worker.model.parameters()]
    twin = [p.data_ptr() for p in worker.hybrid.twin.parameters()]
    again.fit()
    assert [p.data_ptr() for p in trainer.roles.actor.workers[0].model.parameters()] == before
    assert [p.data_ptr() for p in worker.model.parameters()] == start == twin
