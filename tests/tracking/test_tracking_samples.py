"""Sample rows: harmless on a terminal, complete in a dump."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from verl.tracking import dump_generations, sample_row, sample_table
from verl.tracking.samples import crop, plain_samples, visible


@given(st.text())
def test_visible_text_cannot_command_a_terminal(text):
    import unicodedata

    shown = visible(text)
    allowed = "\u200c\u200d"
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or c in allowed for c in shown)
    shown.encode("utf-8")


def test_visible_keeps_what_people_write():
    assert visible("答案 é 👩‍🔬\nx\t\x1b[2J\u202e") == "答案 é 👩‍🔬↵x→\\x1b[2J\\u202e"


@given(st.text(), st.integers(10, 50))
def test_crop_keeps_both_ends_within_the_limit(text, limit):
    short = crop(text, limit)
    assert len(short) <= limit
    if len(text) <= limit:
        assert short == text
    else:
        head, tail = short.split(" … ", 1) if short.count(" … ") == 1 else (short[:2], short[-2:])
        assert text.startswith(head) and text.endswith(tail)


def test_table_shows_markup_and_escapes_literally():
    rows = [
        sample_row(1, "val", "What [red]is[/red] 1+1?", "2 [/]\x1b[31m", 1.0, "2"),
        sample_row(1, "val", "p", "r", None),
    ]
    out = io.StringIO()
    Console(file=out, width=100).print(sample_table(rows, title="t"))
    text = out.getvalue()
    assert "What [red]is[/red] 1+1?" in text and "2 [/]\\x1b[31m" in text and "\x1b" not in text
    assert "expected" in text and "failed" in text
    out = io.StringIO()
    Console(file=out, width=30).print(sample_table(rows))
    assert max(map(len, out.getvalue().splitlines())) <= 30


def test_plain_lines():
    lines = plain_samples([sample_row(3, "train", "a\nb", "c", 0.25, 7)])
    assert lines == ["train sample | prompt: a↵b | response: c | expected: 7 | score: 0.25"]


def test_dump_has_verls_columns_and_replaces_its_file(tmp_path):
    folder = tmp_path / "a" / "rollouts"
    for _ in range(2):
        path = dump_generations(
            folder, 12, ["p1", "p2"], ["r1\n", "r2"], ["g", None], np.array([1.0, 0.0]), {"acc": [True, False]}
        )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "12.jsonl" and [p.name for p in folder.iterdir()] == ["12.jsonl"]
    assert rows[0] == {"input": "p1", "output": "r1\n", "gts": "g", "score": 1.0, "acc": True, "step": 12}
    assert len(rows) == 2
    with pytest.raises(ValueError, match="'score': 1"):
        dump_generations(folder, 13, ["p1", "p2"], ["r1", "r2"], ["g", "g"], [1.0])
    assert not (folder / "13.jsonl").exists()
