"""The example that goes from SFT over a reward model to PPO."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tiny_models import save_tiny_model

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "preference" / "pipeline.py"


def test_the_three_stages(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    steps = ["--sft-steps", "25", "--rm-steps", "3", "--ppo-steps", "2"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", str(model), "--output", "out", "--lr", "3e-3", *steps],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    shares = re.search(r"rightly: (\S+) before, (\S+) after SFT, (\S+) after PPO", done.stdout)
    before, sft, _ = map(float, shares.groups())
    assert before < 0.05 and sft >= before
    for stage, folder in (("sft", "global_step_25"), ("rm", "global_step_3"), ("ppo", "global_step_2")):
        assert (tmp_path / "out" / stage / "actor" / folder / "config.json").is_file()
        assert (tmp_path / "out" / stage / "report.html").is_file()
    assert "SequenceClassification" in (tmp_path / "out" / "rm" / "actor" / "global_step_3" / "config.json").read_text()


def test_sft_on_gsm8k_as_published(tmp_path):
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    (tmp_path / "data").mkdir()
    rows = [{"question": f"What is {n} plus 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(8)]
    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = ["--steps", "2", "--batch", "4", "--seeds", "0", "1", "--test-problems", "3", "--max-response", "8"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT.parent / "sft_gsm8k.py"), "--data", "data", "--model", str(model), *few],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"GSM8K, 3 problems: 0\.000 before, 0\.000 ± 0\.000 after SFT", done.stdout)
