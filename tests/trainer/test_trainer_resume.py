"""Resume equals never having stopped: kill -9 in a step and in a save, then go on; every number is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_model
from trainer_helpers import make_trainer, weights
from transformers import AutoModelForCausalLM

from verl import notices
from verl.errors import CheckpointError, ModelError
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


def test_a_finished_run_that_is_started_again_still_has_its_last_metrics(tiny_model_dir, tmp_path):
    first = make_trainer(tiny_model_dir, tmp_path, trainer__save_final=True).fit()
    assert first["training/global_step"] == 2
    assert make_trainer(tiny_model_dir, tmp_path, trainer__save_final=True).fit() == first


def test_another_model_cannot_go_on_with_it_and_is_told_how_to_begin(tiny_model_dir, tmp_path):
    make_trainer(tiny_model_dir, tmp_path, trainer__save_final=True).fit()
    other = save_tiny_model(tmp_path / "other", hidden_size=16)
    with pytest.raises(CheckpointError, match=r"global_step_2 cannot be resumed from.*trainer\.resume_mode=disable"):
        make_trainer(other, tmp_path)


def test_only_one_process_runs_in_a_folder(tiny_model_dir, tmp_path):
    code = "import sys; from verl.checkpoint import only_run\nwith only_run(sys.argv[1]): print('in')"

    def other_process():
        return subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)

    trainer = make_trainer(tiny_model_dir, tmp_path)
    assert "Another run is using the folder" in other_process().stderr
    trainer.fit()
    assert other_process().stdout == "in\n"


def test_a_tokenizer_of_another_model_is_named(tiny_model_dir, tmp_path):
    small = save_tiny_model(tmp_path / "small", vocab_size=8)
    with pytest.raises(ModelError, match=r"vocabulary has 8 entries.*tokenizer_path"):
        make_trainer(small, tmp_path / "run").fit()
