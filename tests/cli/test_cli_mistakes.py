"""What can be typed wrongly: one sentence on standard error, exit code 2, and nothing of the reader's is lost."""

from __future__ import annotations

import json
import socket

import pytest
from tiny_models import save_tiny_model

from verl.cli.main import main
from verl.errors import ConfigError
from verl.export.folder import ExportOptions, _whole

CPU = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def refused(argv: list[str], capsys) -> str:
    """The one sentence of a command that ends with exit code 2."""
    capsys.readouterr()
    assert main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate", "m", "--prompt", "a", "--n", "0"], "'0' is not a whole number from 1"),
        (["generate", "m", "--prompts", "f", "--limit", "-1"], "'-1' is not a whole number from 1"),
        (["generate", "m", "--prompt", "a", "--temperature", "nan"], "'nan' is not a number"),
        (["generate", "m", "--prompt", "a", "--temperature", "warm"], "'warm' is not a number"),
        (["compare", "m", "m", "--prompt", "a", "--limit", "0"], "'0' is not a whole number from 1"),
        (["convert-config", "f.yaml", "--processes", "0"], "'0' is not a whole number from 1"),
        (["serve", "m", "--port", "99999"], "'99999' is not a port"),
        (["serve", "m", "--log-level", "loud"], "invalid choice: 'loud'"),
        (["dash", ".", "--port", "-1"], "'-1' is not a port"),
        (["dash", "runs"], "there is no folder runs yet"),
        (["export", "--model_path", "m", "--output_dir", "o", "--max_shard_size", "lots"], "a size such as 500MB"),
        (["export", "--model_path", "m", "--output_dir", "o", "--max_shard_size", "0GB"], "a size such as 500MB"),
        (["quickstart", "--steps", "0"], "'0' is not a whole number from 1"),
        (["quickstart", "--algorithm", "zzz"], "invalid choice: 'zzz'"),
        (["quickstart", "--bogus"], "unrecognized arguments: --bogus"),
        (["quickstart", "--lang", "xx"], "--lang is 'xx'; there are en and zh"),
        (["train", "--bogus"], "unrecognized arguments: --bogus"),
        (["plan", "--bogus"], "unrecognized arguments: --bogus"),
        (["profile", "--steps", "x"], "invalid int value: 'x'"),
        (["doctor", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_wrong_values(argv, said, tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    model = folder if "export" in argv else "m"
    assert said in refused([model if word == "m" else word for word in argv], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["folder", "file/below", "file/below/it"])
@pytest.mark.parametrize("command", ["generate", "compare", "report", "convert-config"])
def test_an_output_that_cannot_be_written_is_known_before_the_work(command, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "trl.yaml").write_text("num_generations: 4\n")
    words = {
        "generate": ["no-model", "--prompt", "a"],
        "compare": ["no-model", "no-model", "--prompt", "a"],
        "report": ["a", "b"],
        "convert-config": ["trl.yaml", "--kind", "grpo"],
    }[command]
    assert f"--output {place}" in refused([command, *words, "--output", place], capsys)
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "folder").iterdir())


def test_generate_keeps_the_earlier_file_until_it_is_done(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "answers.jsonl"
    out.write_text("earlier\n")
    command = ["generate", folder, "--prompt", "1+1=", "--output", str(out), *CPU]
    refused([*command, "--max_tokens", "9999"], capsys)
    assert out.read_text() == "earlier\n"
    assert main([*command, "--max_tokens", "2"]) == 0
    assert json.loads(out.read_text())["prompt"] == "1+1="


def test_compare_looks_for_both_models_before_one_answers(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["compare", folder, "./empty", "--prompt", "a", *CPU]) == 2
    err = capsys.readouterr().err
    assert "empty is not a Hugging Face model folder" in err and "parameters" not in err


def test_a_port_is_taken_while_the_model_loads(capsys):
    from verl.serving.server import open_port

    with open_port("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on"):
            open_port("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass  # a client waits instead of being turned away


@pytest.mark.parametrize("content", [b"", b"\x89\xff\x00binary\n\x01\n"])
def test_a_folder_without_anything_to_report(content, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert str(tmp_path) in refused(["report", str(tmp_path)], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_ended_before_its_first_step_has_a_report(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    (tmp_path / "config.yaml").write_text("trainer: {seed: 1}\n")
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").is_file()


def test_export_below_a_file(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    said = refused(["export", "--model_path", folder, "--output_dir", str(tmp_path / "file" / "x")], capsys)
    assert f"{tmp_path / 'file'} is a file" in said and (tmp_path / "file").read_text() == "mine"


def test_an_overwritten_export_is_there_until_the_new_one_is(tmp_path, monkeypatch):
    from pathlib import Path

    output = tmp_path / "out"
    output.mkdir()
    (output / "weights").write_text("old")
    rename = Path.rename

    def killed_in_between(self, target):
        if self.name.startswith(".exporting-"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed_in_between)
    with pytest.raises(KeyboardInterrupt), _whole(output) as draft:
        (draft / "weights").write_text("new")
    assert (tmp_path / ".replaced-out" / "weights").read_text() == "old" or (output / "weights").read_text() == "old"
    monkeypatch.undo()
    with _whole(output) as draft:
        (draft / "weights").write_text("new")
    assert (output / "weights").read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_sizes_of_weight_files():
    for size in ("20KB", "5GB", "2GiB"):
        assert ExportOptions(max_shard_size=size).max_shard_size == size


def test_a_reward_model_is_not_taken_for_one_that_writes(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    keys = ["data.train_files=pairs.jsonl", "trainer.default_local_dir=runs/rm", "trainer.total_training_steps=1"]
    assert main(["train", "rm", *keys, f"actor_rollout_ref.model.path={folder}", "trainer.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "Checkpoint runs/rm/global_step_1" in out and "Report     runs/rm/report.html" in out
    for argv in (
        ["generate", "runs/rm", "--prompt", "a", *CPU],
        ["compare", folder, "runs/rm", "--prompt", "a", *CPU],
        ["export", "--model_path", "runs/rm", "--output_dir", "exported"],
    ):
        assert "it scores and does not write" in refused(argv, capsys)
    assert not (tmp_path / "exported").exists()
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "verl report runs/rm" in shown and "verl chat runs/rm" not in shown


@pytest.mark.parametrize("content", [b":::{ [", b"just text", b"\xff\xfe\x00"])
def test_a_damaged_config_hides_nothing_else(content, tmp_path, monkeypatch, capsys):
    from verl.tracking.dash import find_runs, index_page

    monkeypatch.chdir(tmp_path)
    for name in ("good", "bad"):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"step": 1, "time": 1, "critic/score/mean": 0.5}\n')
    for name in ("config.yaml", "environment.json"):
        (run / name).write_bytes(content)
    assert main([]) == 0
    assert "verl report runs/" in capsys.readouterr().out
    assert main(["report", "runs/bad"]) == 0
    assert (run / "report.html").is_file()
    page = index_page(tmp_path / "runs", find_runs(tmp_path / "runs")).decode()
    assert "run=good" in page and "run=bad" in page


def test_output_that_is_not_utf8(tmp_path):
    import os
    import subprocess
    import sys

    code = "from verl.cli.run import run_cli; run_cli(lambda argv: print('\\u4f60\\u597d'), [])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "\\u4f60\\u597d\n"


def test_convert_config_of_what_is_no_text(tmp_path, capsys):
    (tmp_path / "a.yaml").write_bytes(b"\x89\xff\x00")
    assert "is a folder: name the file in it" in refused(["convert-config", str(tmp_path)], capsys)
    assert "a.yaml is not text in UTF-8" in refused(["convert-config", str(tmp_path / "a.yaml")], capsys)
