"""The live display of a run in a terminal; in a pipe or a dumb terminal, one plain line a step."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl.tracking import headline
from verl.tracking.loggers.base import Console, RunInfo
from verl.tracking.samples import plain_samples, sample_table, visible

_BLOCKS = "▁▂▃▄▅▆▇█"
_NARROW = 60  # columns; below this the display keeps to the bar and the numbers


def is_interactive(stream: TextIO) -> bool:
    """Whether a live display makes sense: a real terminal that understands cursor movements, and Unicode."""
    unicode = (stream.encoding or "utf-8").lower().startswith("utf")  # escapes of "█" would break the lines
    return stream.isatty() and unicode and os.environ.get("TERM", "") not in ("dumb", "unknown")


def in_notebook() -> bool:
    """Whether output goes to cells of a notebook, where nothing can be drawn over."""
    ipython = sys.modules.get("IPython")  # a notebook's process has loaded it
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as block characters, scaled between their least and greatest."""
    shown = [value for value in values[-width:] if math.isfinite(value)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in shown)


class LiveConsole(Console):
    """Step bar, reward, response length, tokens/s, seconds a phase, time left. Call :meth:`start` first.

    Notices and samples are printed above the display. The screen is given back by :meth:`close`, also after an error.
    """

    def __init__(self, info: RunInfo, stream: TextIO):
        super().__init__(info, stream)
        self._lock = threading.Lock()
        self._clock = headline.Clock(info.total_steps)
        self._started = time.monotonic()
        self._step = info.resume_step
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []
        self._validation: dict[str, list[float]] = {}
        self._phase: tuple[str, float] | None = None
        self._progress: tuple[int, int] | None = None
        self._rich: RichConsole | None = None
        self._live: Live | None = None
        if is_interactive(stream):
            self._rich = RichConsole(file=stream, force_terminal=True, highlight=False)

    # -- what happens ---------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._started = time.monotonic()
        self._clock.mark(self.info.resume_step, self._started)
        if self._rich is None:
            self.line(self._title_text())
            return
        if self._live is None:
            self._live = Live(self, console=self._rich, refresh_per_second=4, transient=False)
            self._live.start()

    def phase_started(self, phase: str, samples: int | None = None) -> None:
        with self._lock:
            self._phase, self._progress = (phase, time.monotonic()), None

    def progress(self, phase: str, done: int, total: int) -> None:
        with self._lock:
            if self._phase is None or self._phase[0] != phase:
                self._phase = (phase, time.monotonic())
            self._progress = (done, total)

    def phase_finished(self, phase: str, seconds: float, samples: int | None = None) -> None:
        with self._lock:
            if self._phase is not None and self._phase[0] == phase:
                self._phase = self._progress = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        reward = headline.first(metrics, headline.REWARD)
        with self._lock:
            self._step = max(self._step, step)
            self._metrics.update(metrics)
            if reward is not None:
                self._rewards.append(reward)
            for name, value in headline.validation(metrics).items():
                self._validation.setdefault(name, []).append(value)
            self._clock.mark(step, time.monotonic())
        if self._rich is None:
            self.line(headline.step_line(metrics, step, self.info.total_steps, self._clock.left()))

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if self._rich is None:
            for text in plain_samples(rows):
                self.line(f"  {text}")
        else:
            self._rich.print(sample_table(rows, title=f"samples of step {step}"))

    def notice(self, text: str) -> None:
        if self._rich is None:
            super().notice(text)
        else:
            self._rich.print(Text.assemble(("notice ", "yellow"), visible(text)))

    def close(self) -> None:
        if self._live is not None:
            with self._lock:
                self._phase = self._progress = None
            self._live.stop()
            self._live = None

    # -- what it looks like ---------------------------------------------------------------------------------------
    def _title_text(self) -> str:
        total = f"{self.info.total_steps} steps" if self.info.total_steps else ""
        known = (self.info.algorithm, self.info.model, self.info.device, total)
        return visible(" · ".join(part for part in known if part))

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> Any:
        with self._lock:
            display = self._render(options.max_width)
        yield display

    def _render(self, width: int) -> RenderableType:
        narrow = width < _NARROW
        lines: list[RenderableType] = [
            Text(self._title_text(), style="bold", no_wrap=True, overflow="ellipsis"),
            self._bar(width),
            self._numbers(0 if narrow else min(24, width // 4)),
        ]
        for name, values in self._validation.items():
            lines.append(Text.assemble((f"{name} ", "dim"), _change(values), no_wrap=True, overflow="ellipsis"))
        if not narrow:
            lines.append(self._phase_times(width))
        lines.append(self._now())
        return Group(*lines)

    def _bar(self, width: int) -> RenderableType:
        elapsed = headline.duration(time.monotonic() - self._started)
        if not self.info.total_steps:
            return Text(f"step {self._step}   {elapsed}")
        left = self._clock.left()
        texts = [f"step {self._step}/{self.info.total_steps}", elapsed]
        if left is not None:
            texts.append(f"left {headline.duration(left)}")
        row = Table.grid(padding=(0, 2))
        room = width - sum(len(text) + 2 for text in texts)
        bar = ProgressBar(total=self.info.total_steps, completed=self._step, width=max(6, min(40, room)))
        row.add_row(texts[0], bar, *(Text(text, style="dim", no_wrap=True) for text in texts[1:]))
        return row

    def _numbers(self, spark_width: int) -> RenderableType:
        parts: list[tuple[str, str] | str] = []
        for label, text in headline.numbers(self._metrics):
            parts += [(f"{label} ", "dim"), (text, "bold"), "   "]
            if label == "reward" and spark_width and len(self._rewards) > 1:
                parts[-1:] = [" ", (sparkline(self._rewards, spark_width), "cyan"), "   "]
        return (
            Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
            if parts
            else Text("waiting for step 1", style="dim")
        )

    def _phase_times(self, width: int) -> RenderableType:
        times = sorted(headline.phases(self._metrics).items(), key=lambda item: -item[1])[:6]
        parts: list[tuple[str, str] | str] = []
        for phase, seconds in times:
            parts += [(f"{phase} ", "dim"), headline.duration(seconds), "   "]
        return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")

    def _now(self) -> Text:
        if self._phase is None:
            return Text("")
        phase, since = self._phase
        rows = "" if self._progress is None else f"  {self._progress[0]}/{self._progress[1]}"
        text = f"▸ {phase}{rows}  {headline.duration(time.monotonic() - since)}"
        return Text(text, style="green", no_wrap=True, overflow="ellipsis")


def _change(values: Sequence[float]) -> str:
    """``0.430 -> 0.912`` of the first and the last validation."""
    return f"{values[0]:.3f}" if len(values) == 1 else f"{values[0]:.3f} → {values[-1]:.3f}"
