"""Shell completion, in the shells that are here."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from verl.cli.completion import SHELLS, command_options, config_keys, script
from verl.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def scripts():
    return {shell: script(shell) for shell in SHELLS}


def bash(text, line):
    """What bash offers at the end of a command line."""
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    code = f"""{text}
compopt() {{ :; }}
COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}
COMP_WORDS=({" ".join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}
_verl; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("verl qui", ["quickstart"]),
        ("verl com", ["compare", "completion"]),
        ("verl export --lo", ["--lora"]),
        ("verl completion z", ["zsh"]),
        ("verl train trainer.total_tr", ["trainer.total_training_steps="]),
        ("verl chat --nothing", []),
    ],
)
def test_bash(scripts, line, offered):
    assert bash(scripts["bash"], line) == offered


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_offers_everything_at_the_beginning(scripts, tmp_path, monkeypatch):
    assert bash(scripts["bash"], "verl ") == list(COMMANDS)
    (tmp_path / "data.parquet").touch()
    monkeypatch.chdir(tmp_path)
    assert bash(scripts["bash"], "verl train data.train_files=da") == ["data.parquet"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_are_right_for_their_shell(scripts, shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    path = tmp_path / "verl"
    path.write_text(scripts[shell])
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_commands_options_and_keys_are_in_every_script(scripts):
    for text in scripts.values():
        assert all(name in text for name in COMMANDS)
        assert "actor_rollout_ref.actor.optim.lr" in text and "model_path" in text


def test_options_come_from_the_commands_themselves():
    assert {"--model_path", "--verify", "--lora"} <= set(command_options(COMMANDS["export"].target))
    assert "--steps" in command_options(COMMANDS["quickstart"].target)
    assert "data.train_files" in config_keys()


def test_an_unknown_shell(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "there is for bash, zsh, fish" in capsys.readouterr().err
    assert main(["completion", "fish"]) == 0
