"""docs/papers.md against the code: each paper is named where it is said to be, and none of the code's is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import verl

ROOT = Path(verl.__file__).parent.parent
PAGE = ROOT / "docs/papers.md"
NUMBER = re.compile(r"arXiv:(\d{4}\.\d{5})")

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not run from a clone")


def test_each_paper_is_named_in_its_file():
    rows = [line for line in PAGE.read_text().splitlines() if NUMBER.search(line)]
    wrong = [
        (number, file)
        for row in rows
        for file in re.findall(r"`(verl/[\w/]+\.py)`", row)
        for number in NUMBER.findall(row)
        if number not in (ROOT / file).read_text()
        and not any(number in (ROOT / other).read_text() for other in re.findall(r"`(verl/[\w/]+\.py)`", row))
    ]
    assert rows and not wrong


def test_no_paper_of_the_code_is_left_out():
    files = [
        path
        for room in ("algorithms", "trainer", "models", "train_engine")
        for path in (ROOT / "verl" / room).rglob("*.py")
    ]
    named = {number for path in files for number in NUMBER.findall(path.read_text())}
    assert named - set(NUMBER.findall(PAGE.read_text())) == set()
