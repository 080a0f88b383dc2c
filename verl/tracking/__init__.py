"""Tracking: the run folder, loggers, live display, sample tables, throughput, and the HTML report.

Importing this package loads neither torch nor plotly nor rich; each is imported where it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "RunDirectory": "run_dir",
    "RunInfo": "loggers.base",
    "Tracker": "tracker",
    "write_report": "report",
    "sample_row": "samples",
    "sample_table": "samples",
    "dump_generations": "samples",
    "step_metrics": "throughput",
    "is_time_metric": "throughput",
}

if TYPE_CHECKING:
    from verl.tracking.loggers.base import RunInfo
    from verl.tracking.report import write_report
    from verl.tracking.run_dir import RunDirectory
    from verl.tracking.samples import dump_generations, sample_row, sample_table
    from verl.tracking.throughput import is_time_metric, step_metrics
    from verl.tracking.tracker import Tracker

__all__ = [
    "RunDirectory",
    "RunInfo",
    "Tracker",
    "dump_generations",
    "is_time_metric",
    "sample_row",
    "sample_table",
    "step_metrics",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
