"""What every logger offers, and what it is told about the run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class RunInfo:
    """Names and sizes of the run, for headings and for the hosted services."""

    project: str = "verl"
    experiment: str = "run"
    algorithm: str = "PPO"
    model: str = ""
    device: str = ""
    total_steps: int | None = None
    resume_step: int = 0  # the last step that is already done
    folder: Path = Path(".")
    config: Mapping[str, Any] = field(default_factory=dict)  # plain data, secrets hidden


class Logger:
    """One place that metrics go to. Methods may raise: the tracker drops a logger that keeps failing."""

    name = "logger"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Sample rows. Most services have no table for them; they are in ``samples.jsonl`` and the report anyway."""

    def close(self) -> None:
        """Send what is buffered and let go of files and connections."""


class Console(Logger):
    """A logger in front of a person: it also sees phases, progress and notices. A pipe never gets control codes."""

    name = "console"

    def __init__(self, info: RunInfo, stream: TextIO):
        self.info = info
        self.stream = stream
        if isinstance(stream, io.TextIOWrapper):  # a terminal set to ASCII must not stop training at the first "é"
            stream.reconfigure(errors="backslashreplace")

    def line(self, text: str) -> None:
        """Write one whole line."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def start(self) -> None:
        """Training begins."""

    def phase_started(self, phase: str, samples: int | None = None) -> None:
        """A phase of the step (``gen``, ``reward``, ``update_actor``...) begins."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """``done`` of ``total`` rows of a running phase are finished."""

    def phase_finished(self, phase: str, seconds: float, samples: int | None = None) -> None:
        """A phase took ``seconds`` and, for ``gen``, made ``samples`` responses."""

    def notice(self, text: str) -> None:
        self.line(f"[notice] {text}")

    def finish(self) -> None:
        """Training has reached its last step."""
