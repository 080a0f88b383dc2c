"""A process dies, or the run is told to end: what is said, what is left behind, and going on afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parent / "scale_fault_script.py"


class Run:
    """The script in a session of its own, as a terminal or a scheduler starts it."""

    def __init__(self, model: Path, folder: Path, steps: int, restarts: int = 0):
        command = [sys.executable, str(SCRIPT), str(model), str(folder), str(steps), str(restarts)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("RAY_ADDRESS", None)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self.lines: list[str] = []
        self.children: set[int] = set()

    def until(self, begin: str) -> list[str]:
        """The words of the first line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self.children |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
            if line.startswith(begin):
                return line.split()
        raise AssertionError("\n".join(self.lines[-30:]))

    def end(self, seconds: float) -> tuple[int, str]:
        """Exit code and everything that it printed."""
        out, _ = self.process.communicate(timeout=seconds)
        self.lines += out.splitlines()
        return self.process.returncode, "\n".join(self.lines)

    def orphans(self) -> list[str]:
        """Its children that are still there after a moment."""
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            left = [psutil.Process(pid) for pid in self.children if psutil.pid_exists(pid)]
            names = [process.name() for process in left if process.is_running() and process.status() != "zombie"]
            if not names:
                return []
            time.sleep(0.2)
        return names


@contextmanager
def running(*arguments) -> Iterator[Run]:
    run = Run(*arguments)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()


def test_a_killed_worker_ends_the_run_and_the_next_one_goes_on(tiny_model_dir, tmp_path):
    with running(tiny_model_dir, tmp_path, 400) as run:
        *_, victim = run.until("STEP 2 ")
        os.kill(int(victim), signal.SIGKILL)
        began = time.monotonic()
        code, text = run.end(60)
        assert time.monotonic() - began < 30
        assert code == 1 and "error: Rank 1 of 2 (processes 'actor') on host " in text
        assert f"process {victim}, died in Actor." in text and "trainer.resume_mode=auto" in text
        assert "Traceback" not in text and "bug in verl" not in text
        assert run.orphans() == []
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert saved >= 2
    with running(tiny_model_dir, tmp_path, saved + 40, 1) as run:
        _, step, _, victim, _ = run.until("STEP ")
        assert int(step) == saved + 1, "it goes on after the last checkpoint"
        os.kill(int(victim), signal.SIGKILL)
        code, text = run.end(120)
        assert code == 0, text[-3000:]
        assert "Restart 1 of 1 (trainer.max_restarts)" in text and f"STEP {saved + 40} " in text
        assert run.orphans() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_end_leaves_no_process(tiny_model_dir, tmp_path, number, code):
    with running(tiny_model_dir, tmp_path, 400) as run:
        run.until("STEP 1 ")
        assert len(run.children) > 2
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)  # a terminal sends Ctrl-C to all of its processes
        else:
            run.process.send_signal(number)
        found, text = run.end(60)
        assert found == code, text[-3000:]
        assert run.orphans() == []
