"""Chinese for those whose locale is Chinese, and what one can do next."""

from __future__ import annotations

import os

import pytest

from verl.checkpoint.layout import step_name
from verl.cli import chinese
from verl.cli.main import COMMANDS, main
from verl.language import language
from verl.trainer.quickstart import parse
from verl.trainer.quickstart_texts import TEXTS


@pytest.fixture(autouse=True)
def english(monkeypatch):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, "en"),
        ([], {"LANG": "zh_CN.UTF-8"}, "zh"),
        ([], {"LANG": "zh_CN.UTF-8", "LC_ALL": "en_US.UTF-8"}, "en"),
        ([], {"LANG": "de_DE.UTF-8"}, "en"),
        (["--lang", "zh"], {}, "zh"),
        (["--lang=en"], {"LANG": "zh_CN.UTF-8"}, "en"),
        (["--lang"], {"LANG": "zh_CN.UTF-8"}, "en"),
    ],
)
def test_which_language(argv, environ, expected):
    assert language(argv, environ) == expected


def test_both_languages_say_the_same_things():
    assert TEXTS["en"].keys() == TEXTS["zh"].keys()
    fields = {name: set(_fields(text)) for name, text in TEXTS["en"].items()}
    assert {name: set(_fields(text)) for name, text in TEXTS["zh"].items()} == fields
    assert set(chinese.SUMMARIES) == set(COMMANDS)


def _fields(text):
    from string import Formatter

    return (name for _, name, _, _ in Formatter().parse(text) if name)


@pytest.mark.parametrize("how", ["option", "locale"])
def test_help_in_chinese(how, monkeypatch, capsys):
    if how == "locale":
        monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    options = ["--lang", "zh"] if how == "option" else []
    assert main([*options, "--help"]) == 0
    assert "用法" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse([*options, "--help"])
    out = capsys.readouterr().out
    assert "看一个小语言模型用强化学习学会加法" in out and "训练步数（默认：40）" in out


def test_a_new_folder_shows_how_to_begin(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "verl quickstart" in out and "The last run here" not in out


def test_after_a_run_its_next_steps_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, age in (("old", 100), ("new", 0)):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("{}\n")
        os.utime(run / "metrics.jsonl", (1e9 - age, 1e9 - age))
    (tmp_path / "runs/new/earlier_runs/1").mkdir(parents=True)
    (tmp_path / "runs/new/earlier_runs/1/metrics.jsonl").write_text("{}\n")
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "The last run here: runs/new\n" in out and "verl report runs/new" in out and "verl chat" not in out
    (tmp_path / "runs/new" / step_name(3)).mkdir()
    (tmp_path / "runs/new/config.yaml").write_text("actor_rollout_ref: {model: {path: base/model}}\n")
    assert main(["--lang", "zh"]) == 0
    out = capsys.readouterr().out
    for line in (
        "verl chat runs/new",
        'verl compare base/model runs/new --prompt "..."',
        "verl export --model_path runs/new --output_dir exported",
    ):
        assert line in out
    assert "最近一次训练：runs/new" in out
