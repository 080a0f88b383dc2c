"""Ctrl-C and SIGTERM while training: the running step ends, what is done is saved and named, no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from trainer_helpers import SETTINGS, make_trainer, weights

from verl.cli.run import run_cli
from verl.errors import RewardError

SAVING = {"trainer__save_final": True, "trainer__total_training_steps": 3}


@pytest.fixture(autouse=True)
def heard():
    """A shell lets what it starts in the background ignore Ctrl-C, the tests as well."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def at(trainer, step: int, act, node: str = "update_actor"):
    """Call ``act`` when the node of that step begins, from the thread that runs it."""
    before = trainer._on_event

    def on_event(name, event, info):
        before(name, event, info)
        if (name, event) == (node, "start") and trainer.global_steps == step - 1:
            act()

    trainer._on_event = on_event
    return trainer


def send(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def ended(trainer, capsys) -> tuple[int, str]:
    """The exit code and the last line on stderr."""
    code = run_cli(lambda argv: trainer.fit() and 0, [])
    return code, capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("number", "code", "word"), [(2, 130, "interrupted"), (15, 143, "terminated")])
def test_the_step_ends_and_is_saved_and_the_run_goes_on_as_if_never_stopped(
    tiny_model_dir, tmp_path, capsys, number, code, word
):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    folder = tmp_path / "run"
    trainer = at(make_trainer(tiny_model_dir, folder, **SAVING), 2, lambda: send(number))
    found, said = ended(trainer, capsys)
    assert found == code and said.startswith(f"{word} after step 2 of 3; the checkpoint is {folder / 'global_step_2'};")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (folder / "global_step_2" / "actor" / "config.json").is_file() and (folder / "report.html").is_file()
    if number == signal.SIGTERM:
        return
    again = make_trainer(tiny_model_dir, folder, **SAVING)
    straight = make_trainer(tiny_model_dir, tmp_path / "straight", **SAVING)
    assert again.global_steps == 2
    for each in (again, straight):
        each.fit()
    for name, value in weights(straight).items():
        assert bool((weights(again)[name] == value).all())


def test_without_a_checkpoint_it_says_so_and_how_to_get_one(tiny_model_dir, tmp_path, capsys):
    code, said = ended(at(make_trainer(tiny_model_dir, tmp_path), 1, send), capsys)
    assert code == 130 and said.startswith("interrupted after step 1 of 2; step 1 is in no checkpoint")
    assert "trainer.save_freq=N" in said and not list(tmp_path.glob("global_step_*"))


def test_a_second_one_ends_the_step_at_once_and_names_the_last_checkpoint(tiny_model_dir, tmp_path, capsys):
    trainer = make_trainer(tiny_model_dir, tmp_path, trainer__save_freq=1, **SAVING)

    def twice():
        usual = signal.getsignal(signal.SIGINT)
        send()
        until = time.monotonic() + 60
        while signal.getsignal(signal.SIGINT) is usual and time.monotonic() < until:
            time.sleep(0.01)  # two at once are one to Python
        send()
        time.sleep(1)

    code, said = ended(at(trainer, 2, twice), capsys)
    assert code == 130 and trainer.global_steps == 1 and trainer.mid_step
    assert said.startswith(f"interrupted after step 1 of 3; the checkpoint is {tmp_path / 'global_step_1'};")
    assert not (tmp_path / "global_step_2").exists()


def test_a_step_that_fails_after_it_is_an_interrupt_too(tiny_model_dir, tmp_path, capsys):
    def send_and_fail():
        send()
        raise RewardError("the worker has heard it too")

    code, said = ended(at(make_trainer(tiny_model_dir, tmp_path, **SAVING), 1, send_and_fail), capsys)
    assert code == 130 and said == "interrupted before the first step was done; there was nothing to save"


def test_a_terminal_sends_it_to_all_processes_and_none_is_left(tiny_model_dir, tmp_path):
    """`verl train` with reward processes, as typed; Ctrl-C reaches its whole process group."""
    data, reward = tmp_path / "train.jsonl", tmp_path / "reward.py"
    data.write_text("".join(json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) + "\n" for a in range(8)))
    reward.write_text("def compute_score(solution_str, **_):\n    return float(len(solution_str) % 3)\n")
    settings = {
        **SETTINGS,
        "trainer.total_training_steps": 1000,
        "trainer.save_final": True,
        "trainer.logger": "[console]",
        "actor_rollout_ref.rollout.stop": "['+']",
        "actor_rollout_ref.model.path": tiny_model_dir,
        "data.train_files": data,
        "reward.custom_reward_function.path": reward,
        "trainer.default_local_dir": tmp_path / "run",
    }
    command = [sys.executable, "-m", "verl", "train", "grpo", *(f"{key}={value}" for key, value in settings.items())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, start_new_session=True, env=environment, **pipes)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "training/global_step" in line or "step 2" in line.lower():
                break
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 130, "".join(lines) + out
        step = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
        assert f"interrupted after step {step} of 1000; the checkpoint is" in out
        assert "reward/failed:0" in "".join(lines) + out, "the signal reached no reward"
        psutil.wait_procs(children, timeout=60)
        assert not [child for child in children if child.is_running() and child.status() != "zombie"]
    finally:
        process.kill()
