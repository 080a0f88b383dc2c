"""torch's profiler over chosen training steps: a trace for each, and a table of what took longest."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from verl.notices import notice
from verl.trainer.phases import phase_of

ROWS = 15
FOLDER = "profile"


class StepProfiler:
    """Profiles the training steps of ``steps``.

    A profiled step runs its nodes one at a time, in this process's thread: that gives the same values, and the profiler
    sees every operation. Ranges in the trace are named as the phases of ``timing_s/*``.

    Args:
        folder: where ``step_N.json.gz`` (for chrome://tracing and perfetto) and ``step_N.txt`` go.
        cuda: trace the GPU's kernels too.
    """

    def __init__(self, steps: Collection[int], folder: Path, *, cuda: bool):
        self.steps, self.folder, self.cuda = frozenset(steps), folder, cuda
        self._ranges: list[tuple[str, Any]] = []  # those that are open; empty outside profiled steps
        self._profiling = False

    @contextlib.contextmanager
    def step(self, number: int, executor: str) -> Iterator[str]:
        """Within, step ``number`` runs, by the executor that is given."""
        if number not in self.steps:
            yield executor
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        self._profiling = True
        try:
            with profile(activities=activities) as found:
                yield "serial"
        finally:
            self._profiling = False
            self._ranges.clear()
        self._write(number, found)

    def event(self, node: str, event: str) -> None:
        """A node of the dataflow starts or ends."""
        if not self._profiling:
            return
        from torch.profiler import record_function

        if event == "start":
            entered = record_function(phase_of(node))
            entered.__enter__()
            self._ranges.append((node, entered))
        elif event == "end" and self._ranges and self._ranges[-1][0] == node:
            self._ranges.pop()[1].__exit__(None, None, None)

    def _write(self, number: int, found: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        trace, table = (self.folder / f"step_{number}.{end}" for end in ("json.gz", "txt"))
        found.export_chrome_trace(str(trace))
        averages = found.key_averages()
        by = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        table.write_text(averages.table(sort_by=by, row_limit=ROWS, max_name_column_width=60) + "\n")
        notice(f"Step {number} was profiled: {table} (what took longest), {trace} (open it in ui.perfetto.dev).")


def top_rows(table: Path, rows: int = ROWS) -> str:
    """The table's names and times alone, for the console."""
    lines = table.read_text().splitlines()
    return "\n".join(line[:200].rstrip() for line in lines[: rows + 4])
