"""Metrics as lines of JSON: the run folder's own record, and verl's ``file`` logger."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.tracking.jsonl import JsonlFile
from verl.tracking.loggers.base import Logger, RunInfo
from verl.tracking.run_dir import RunDirectory


class RecordLogger(Logger):
    """``metrics.jsonl`` and ``samples.jsonl`` of the run folder: always on and, being the record, never dropped."""

    name = "jsonl"

    def __init__(self, run_dir: RunDirectory):
        self._run_dir = run_dir

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run_dir.append_metrics(metrics, step)

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._run_dir.append_samples(rows)

    def close(self) -> None:
        self._run_dir.close()


class FileLogger(Logger):
    """verl's ``file`` logger: lines ``{"step": N, "data": {...}}``.

    They go to ``$VERL_FILE_LOGGER_PATH`` or, by default, ``$VERL_FILE_LOGGER_ROOT/{project}/{experiment}.jsonl``
    (root: the working directory). A resumed run first drops the lines of the steps that it does again;
    a new run starts afresh.
    """

    name = "file"

    def __init__(self, info: RunInfo):
        chosen = os.environ.get("VERL_FILE_LOGGER_PATH")
        root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", "."))
        path = Path(chosen) if chosen else root / info.project / f"{info.experiment}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = JsonlFile(path)
        self._file.keep(lambda row: row.get("step", 0) <= info.resume_step and info.resume_step > 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._file.append([{"step": step, "data": dict(metrics)}])

    def close(self) -> None:
        self._file.close()
