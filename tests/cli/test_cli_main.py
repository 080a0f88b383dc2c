"""The ``verl`` command as a person types it, and how light it is."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys

import pytest

import verl
from verl.cli.main import COMMANDS, main

LIGHT = ["verl", "verl.cli", "verl.cli.main", "verl.config", "verl.errors", "verl.metrics", "verl.notices"]
LIGHT += ["verl.tracking", "verl.hardware", "verl.dependencies", "verl.cli.plan", "verl.cli.report"]
LIGHT += ["verl.convert", "verl.serving", "verl.export", "verl.cli.export", "verl.cli.serve", "verl.cli.chat"]
LIGHT += ["verl.cli.generate", "verl.cli.compare", "verl.cli.dash", "verl.cli.convert", "verl.cli.completion"]


def run(*argv, **environment):
    command = [sys.executable, "-m", "verl", *argv]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_what_can_be_done_next(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "verl quickstart" in out and "verl doctor" in out and "verl train" in out
    assert all(line == line.rstrip() and len(line) <= 110 for line in out.splitlines())
    if argv:
        assert all(command.summary in out for command in COMMANDS.values())


@pytest.mark.parametrize("argv", [["--version"], ["-V"], ["version"]])
def test_version(argv, capsys):
    assert main(argv) == 0
    assert capsys.readouterr().out == f"verl {verl.__version__}\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("trian", "did you mean `verl train`?"),
        ("zzz", f"there are {', '.join(COMMANDS)}"),
        ("trainer.x=1", "to train with it, write `verl train trainer.x=1 ...`"),
    ],
)
def test_unknown_commands(name, hint, capsys):
    assert main([name]) == 2
    assert capsys.readouterr().err == f"error: there is no command '{name}'; {hint}\n"


def test_every_target_can_be_called():
    for command in COMMANDS.values():
        module, _, function = command.target.partition(":")
        assert importlib.util.find_spec(module) is not None, module
        assert callable(getattr(importlib.import_module(module), function))


def test_help_and_import_take_less_than_a_second_of_work():
    for code in (["-m", "verl", "--help"], ["-c", "import verl"]):
        seconds = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *code], check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert min(seconds) < 1.0, (code, seconds)


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_nothing_heavy(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'ray', 'vllm') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_lazy_names():
    from verl import DataProto

    assert DataProto.__module__.startswith("verl.protocol")
    assert {"DataProto", "__version__"} <= set(dir(verl))
    assert set(verl.__all__) - {"__version__"} == set(verl._LAZY)
    with pytest.raises(AttributeError, match="no attribute 'DataPrto'"):
        verl.DataPrto  # noqa: B018


def test_exit_codes_reach_the_shell():
    assert run("--version").returncode == 0
    bad = run("nonsense")
    assert bad.returncode == 2 and bad.stdout == "" and bad.stderr.startswith("error: ")
    traced = run("nonsense", HYDRA_FULL_ERROR="1")
    assert traced.returncode == 2 and "Traceback" in traced.stderr


@pytest.mark.parametrize(("files", "complaint"), [(None, "there is no run folder at"), ([], "it has no metrics.jsonl")])
def test_report_of_a_folder_that_is_no_run(files, complaint, tmp_path, capsys):
    folder = tmp_path / "run"
    if files is not None:
        folder.mkdir()
    assert main(["report", str(folder)]) == 2
    err = capsys.readouterr().err
    assert complaint in err and str(folder) in err and "Traceback" not in err


def test_plan_shows_the_configuration_without_torch():
    result = run("plan", "data.train_batch_size=8", "trainer.n_gpus_per_node=1", "--package", "data")
    assert result.returncode == 0, result.stderr
    assert "train_batch_size: 8\n" in result.stdout and "[notice]" not in result.stdout
    code = "import sys; from verl.cli import main; main(['plan']); sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_plan_of_wrong_values_says_what_is_wrong(capsys):
    assert main(["plan", "data.train_bach_size=8"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "data.train_batch_size" in err


def test_report_writes_the_page(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.75}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert "<html" in (tmp_path / "report.html").read_text()
