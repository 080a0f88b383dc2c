"""verl compare: both answers here and on a page."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from tiny_models import save_tiny_model

from verl.cli.main import main
from verl.tracking.answers_page import AnswerPair, answers_page

EVIL = "</article><script>document.title='HACKED'</script>&\"'<b>"
CPU = ["--device", "cpu", "--dtype", "float32", "--max_tokens", "8"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [str(save_tiny_model(folder / name, seed=seed)) for name, seed in (("base", 0), ("tuned", 1))]


def test_compare(models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["compare", *models, "--prompts", "q.jsonl", *CPU]) == 0
    out = capsys.readouterr().out
    assert (
        "> 1+1?" in out
        and "[base] " in out
        and "[tuned] " in out
        and "2 of 2 answers differ. Page: compare.html" in out
    )
    page = (tmp_path / "compare.html").read_text()
    assert page.count("<article") == 2 and "<i>expected</i> 4" in page and "8 tokens, cut off" in page


def test_the_same_model_twice_answers_the_same(models, tmp_path, capsys):
    page = tmp_path / "deep" / "p.html"
    command = [
        "compare",
        models[0],
        models[0],
        "--prompt",
        "1+1=",
        "--raw",
        "--temperature",
        "1",
        "--output",
        str(page),
    ]
    assert main([*command, *CPU]) == 0
    assert "0 of 1 answers differ" in capsys.readouterr().out and '<article class="same">' in page.read_text()


@pytest.mark.parametrize("width", ["40", "120"])
def test_side_by_side_on_a_terminal(models, width, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["compare", *models, "--prompt", "ask [red]me", "--output", str(tmp_path / "p.html"), *CPU]) == 0
    lines = sys.stdout.getvalue().splitlines()
    beside = [line for line in lines if "base" in line and "tuned" in line and "prompt" in line]
    assert bool(beside) is (width == "120") and any("ask [red]me" in line for line in lines)


def test_prompts_are_needed(models, capsys):
    assert main(["compare", *models]) == 2
    assert "needs --prompts FILE or --prompt TEXT" in capsys.readouterr().err


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)


def test_texts_stay_texts():
    page = answers_page(EVIL, EVIL, [AnswerPair(EVIL, EVIL, EVIL + "x", EVIL), AnswerPair("{{ROWS}}", "", "")], EVIL)
    tags = Elements(page).tags
    assert tags.count("script") == 1 and tags.count("article") == 2 and tags.count("b") == 2
    assert "{{ROWS}}" in page and not {"img", "link", "iframe"} & set(tags)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
def test_a_real_browser_shows_it(tmp_path):
    page = tmp_path / "p.html"
    page.write_text(answers_page("a", "b", [AnswerPair("ask", EVIL, "other"), AnswerPair("q", "x", "x")], "greedy"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr and "<title>HACKED" not in done.stdout
    assert '<label id="count">2 of 2</label>' in done.stdout
