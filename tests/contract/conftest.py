"""The hub of tiny models, and running a document's code as the files that a reader would save."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import verl

CLONE = Path(verl.__file__).parent.parent


@pytest.fixture(scope="session")
def hub(tmp_path_factory) -> Path:
    """An HF_HOME with tiny models under the documents' names."""
    from contract_hub import make_hub

    return make_hub(tmp_path_factory.mktemp("hf_home"))


@pytest.fixture(scope="session")
def environment(hub) -> dict[str, str]:
    """The reader's environment: offline, with that hub, and verl importable from any folder."""
    return {
        **os.environ,
        "HF_HOME": str(hub),
        "HF_HUB_CACHE": str(hub / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(CLONE),
    }


@pytest.fixture
def run(environment) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run(folder, "train.py", source)``: save the source as that file in the folder and run it there."""

    def run_file(folder: Path, name: str, source: str, **more: str) -> subprocess.CompletedProcess[str]:
        (folder / name).write_text(source, encoding="utf-8")
        return subprocess.run(
            [sys.executable, name], cwd=folder, env={**environment, **more}, capture_output=True, text=True, timeout=600
        )

    return run_file


@pytest.fixture
def hub_here(hub, monkeypatch) -> Path:
    """The hub of tiny models, for code in this process."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub / "hub"))
    return hub
