"""The scripts in examples/preference run to their last line, on a tiny model and few rows."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

import verl

FOLDER = Path(verl.__file__).parent.parent / "examples" / "preference"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="not run from a clone")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The example of this name as a module, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_three_stages(script, tmp_path, capsys):
    save_tiny_model(tmp_path / "model")
    steps = ["--sft-steps", "1", "--rm-steps", "1", "--ppo-steps", "1"]
    script("pipeline").main(["--model", str(tmp_path / "model"), *steps])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.fullmatch(r"Held-out sums answered rightly: \S+ before, \S+ after SFT, \S+ after PPO", last)
    for stage in ("sft", "rm", "ppo"):
        assert (tmp_path / "runs/pipeline" / stage / "actor/global_step_1/config.json").is_file()


def test_sft_on_gsm8k(script, tmp_path, capsys):
    save_tiny_model(tmp_path / "model")
    rows = [
        {"question": f"{n} and {n}?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"} for n in range(4)
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["--steps", "1", "--batch", "4", "--seeds", "0", "--test-problems", "4", "--max-response", "8"]
    script("sft_gsm8k").main(["--data", str(tmp_path), "--model", str(tmp_path / "model"), *sizes])
    out = capsys.readouterr().out
    assert re.search(r"^GSM8K, 4 problems: \d\.\d{3} before, \d\.\d{3} after SFT$", out, re.M)
