"""docs/contract.md: every row is there, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import verl

ROOT = Path(verl.__file__).parent.parent
PAGE = ROOT / "docs/contract.md"
HERE = Path(__file__).parent
ROWS = {"A": 10, "B": 15, "C": 14}

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not run from a clone")


def test_every_row_of_the_tables_is_on_the_page():
    rows = re.findall(r"^\| ((?:[ABC]\d+(?:, )?)+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    told = [name for cell in rows for name in cell.split(", ")]
    assert sorted(told) == sorted(f"{table}{n}" for table, count in ROWS.items() for n in range(1, count + 1))


def test_every_test_that_the_page_names_exists():
    text = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    named = set(re.findall(r"`(test_[A-D]\w+)`", PAGE.read_text(encoding="utf-8")))
    missing = {name for name in named if f"def {name}(" not in text}
    assert named and not missing


def test_the_public_names_are_cheap_to_import():
    """Names resolve, and asking for the number of processes loads no torch."""
    import subprocess
    import sys

    code = "import sys, verl; verl.world_size(); verl.RLTrainer; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stdout + done.stderr
