"""The live display: real pseudo-terminal, pipe, narrow window."""

import io
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from verl.tracking.headline import Clock, duration, numbers, step_line, validation
from verl.tracking.live import LiveConsole, sparkline
from verl.tracking.loggers.base import RunInfo
from verl.tracking.samples import sample_row

METRICS = {
    "critic/score/mean": 0.531,
    "response_length/mean": 14.25,
    "perf/throughput": 1234.4,
    "timing_s/step": 1.9,
    "timing_s/gen": 0.82,
    "timing_s/update_actor": 0.9,
    "val-core/openai/gsm8k/acc/mean@4": 0.43,
    "val-core/openai/gsm8k/acc/best@4/mean": 0.8,
}
INFO = RunInfo(algorithm="GRPO", model="SmolLM2", device="cpu", total_steps=60)


def test_a_pipe_gets_one_plain_line_a_step_even_when_colours_are_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    console = LiveConsole(INFO, out)
    console.start()
    console.phase_started("gen")
    console.log(METRICS, 1)
    console.samples([sample_row(1, "val", "p", "r\x1b[31m", 1.0)], 1)
    console.notice("hello")
    console.close()
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue() and len(lines) == 4
    assert lines[0] == "GRPO · SmolLM2 · cpu · 60 steps"
    assert lines[1].startswith(
        "step 1/60  reward 0.531  length 14.2  tokens/s 1,234  step 1.90s  openai/gsm8k accuracy 0.430  "
        "(update_actor 0.90s, gen 0.82s)  left "
    )
    assert lines[3] == "[notice] hello"


@pytest.mark.parametrize("width", [20, 45, 60, 80, 140])
def test_the_display_fits_every_width(width):
    console = LiveConsole(INFO, io.StringIO())
    for step in range(1, 30):
        console.log({**METRICS, "critic/score/mean": step / 30}, step)
    console.phase_started("gen")
    console.progress("gen", 24, 64)
    out = io.StringIO()
    Console(file=out, width=width).print(console)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width and len(lines) <= 8
    text = out.getvalue()
    assert "GRPO" in text and "▸ gen  24/64" in text and "reward 0.967" in text
    if width >= 80:
        assert "▁" in text and "update_actor 0.90s" in text and "step 29/60" in text


def test_a_terminal_gets_a_live_display_and_is_given_back():
    script = textwrap.dedent(
        """
        import time
        from verl.tracking.live import LiveConsole
        from verl.tracking.loggers.base import RunInfo
        from verl.tracking.samples import sample_row
        import sys
        console = LiveConsole(RunInfo(algorithm="GRPO", total_steps=3), sys.stdout)
        try:
            console.start()
            for step in (1, 2):
                console.phase_started("gen"); time.sleep(0.3); console.phase_finished("gen", 0.3)
                console.log({"critic/score/mean": step / 2, "timing_s/step": 0.3}, step)
            console.samples([sample_row(2, "val", "[red]p", "r", 1.0)], 2)
            print("printed by somebody else")
            raise RuntimeError("boom")
        finally:
            console.close()
        """
    )
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=follower, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux reports the closed terminal like this
            break
        if not part:
            break
        seen += part
    process.wait()
    os.close(leader)
    text = seen.decode()
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is visible again
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "step 2/3" in plain and "[red]p" in plain and "printed by somebody else" in plain and "reward 1.000" in plain


def test_a_dumb_terminal_counts_as_a_pipe(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    console = LiveConsole(INFO, out)
    console.start()
    console.log(METRICS, 1)
    console.close()
    assert "\x1b" not in out.getvalue() and "step 1/60" in out.getvalue()


def test_an_ascii_terminal_does_not_raise():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console = LiveConsole(INFO, stream)
    console.notice("é 答")
    assert raw.getvalue() == b"[notice] \\xe9 \\u7b54\n"


@pytest.mark.parametrize(("encoding", "live"), [("utf-8", True), ("ascii", False), ("latin-1", False)])
def test_a_terminal_without_unicode_gets_lines(encoding, live, monkeypatch):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    raw = io.BytesIO()
    stream = Terminal(raw, encoding=encoding)
    console = LiveConsole(INFO, stream)
    console.start()
    console.log(METRICS, 1)
    console.close()
    stream.flush()
    assert (b"\x1b[" in raw.getvalue()) is live and b"step 1/60" in raw.getvalue()


def test_a_notebook_gets_a_short_line_a_step(monkeypatch):
    import types

    from verl.tracking.tracker import make_console

    class ZMQInteractiveShell:
        pass

    assert type(make_console("auto", INFO, io.StringIO())).__name__ == "LineConsole"
    module = types.SimpleNamespace(get_ipython=ZMQInteractiveShell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    out = io.StringIO()
    console = make_console("auto", INFO, out)
    console.log(METRICS, 1)
    console.close()
    assert out.getvalue().startswith("step 1/60  reward 0.531") and "\x1b" not in out.getvalue()


def test_headline_numbers_by_hand():
    assert validation(METRICS) == {"openai/gsm8k accuracy": 0.43}
    assert numbers({"train/loss": 0.5}) == [("loss", "0.5000")]
    assert step_line({}, 3, None) == "step 3"
    assert [duration(s) for s in (0.823, 12.34, 245, 3723)] == ["0.82s", "12.3s", "4:05", "1:02:03"]


def test_time_left_uses_the_recent_pace():
    clock = Clock(100)
    assert clock.left() is None
    now = 0.0
    for step in range(0, 21):
        clock.mark(step, now)
        now += 10.0 if step < 5 else 1.0
    assert clock.left() == pytest.approx(80.0)
    clock.mark(20, now + 1000)  # the same step told twice (validation) changes nothing
    assert clock.left() == pytest.approx(80.0)
    assert Clock(None).left() is None


@given(st.lists(st.floats(-1e6, 1e6), max_size=50), st.integers(1, 30))
def test_sparkline_is_as_long_as_its_values(values, width):
    assert len(sparkline(values, width)) == min(len(values), width)


def test_sparkline_passes_over_nan_and_infinity():
    assert sparkline([0.0, float("nan"), 1.0, float("inf")], 10) == "▁█"
