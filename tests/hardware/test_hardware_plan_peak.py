"""The memory plan against the peak of a real update on this machine's CPU, within 15 %."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_accuracy.py"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of resident memory need Linux's /proc")
@pytest.mark.parametrize("switches", [{}, {"checkpointing": True}], ids=["plain", "recomputed"])
def test_an_update_takes_what_the_plan_says(switches):
    what = json.dumps({"shape": "narrow", **switches})
    command = [sys.executable, str(SCRIPT), "--tokens", "1024", "--dtype", "float32", "--worker", what]
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["planned"] == pytest.approx(found["measured"], rel=0.15)
