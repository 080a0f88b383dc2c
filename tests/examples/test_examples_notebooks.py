"""The notebooks run as they are, cell by cell, on a tiny model in place of the quick start's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

import verl

ROOT = Path(verl.__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

pytestmark = pytest.mark.skipif(not NOTEBOOKS, reason="not run from a clone")
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def cells(path: Path) -> list[str]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


@each
def test_it_is_a_valid_notebook_without_outputs(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    assert all(not cell.get("outputs") for cell in content["cells"])
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(path, as_version=4))


@each
def test_every_cell_runs(path, tmp_path):
    save_tiny_model(tmp_path / "cache" / "SmolLM2-135M-Instruct")
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(cells(path)), encoding="utf-8")
    import os

    environment = {**os.environ, "VERL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "step 3: reward" in done.stdout and "Write one short sentence about the sea." in done.stdout
    assert (tmp_path / "trained" / "report.html").is_file()
