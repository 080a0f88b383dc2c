"""Profiled steps: a trace with the phases as ranges, a table, and the same numbers as without."""

from __future__ import annotations

import gzip
import json

import pytest
from tiny_models import save_tiny_model
from trainer_helpers import make_trainer

from verl import notices
from verl.cli import main
from verl.config import load_config
from verl.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "m", "qwen2")


def test_a_profiled_step_leaves_a_trace_with_phases_and_changes_no_number(model, tmp_path):
    notices.reset()
    plain = make_trainer(model, tmp_path / "plain").fit()
    trainer = make_trainer(model, tmp_path / "run", trainer__profile_steps=[2])
    profiled = trainer.fit()
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
        assert profiled[name] == plain[name], name
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["step_2.json.gz", "step_2.txt"]
    with gzip.open(folder / "step_2.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"gen", "reward", "adv", "update_actor"} <= names
    assert any("mm" in str(name) or "linear" in str(name) for name in names)
    assert "Self CPU" in (folder / "step_2.txt").read_text()
    assert any("Step 2 was profiled" in line for line in notices.seen())


def test_the_command_trains_traces_and_prints(model, tmp_path, capsys, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(8)))
    arguments = [
        f"data.train_files={rows}", f"actor_rollout_ref.model.path={model}", "algorithm.name=grpo",
        "data.train_batch_size=2", "data.max_prompt_length=16", "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=2", f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.device=cpu",
    ]  # fmt: skip
    assert main(["profile", "--steps", "1", "--output", str(tmp_path / "out"), *arguments]) == 0
    out = capsys.readouterr().out
    assert "Step 1:" in out and "Self CPU" in out
    assert (tmp_path / "out" / "step_1.json.gz").is_file()
    assert not (tmp_path / "run" / "actor").exists()  # no checkpoint


def test_names_of_other_versions_and_steps_that_cannot_be():
    config = load_config(["global_profiler.steps=[1,5]", "global_profiler.save_path=there"])
    assert config.trainer.profile_steps == [1, 5] and config.trainer.profile_dir == "there"
    from verl.cli.profile import main as profile

    with pytest.raises(ConfigError, match="counted from 1"):
        profile(["--steps", "0"])
