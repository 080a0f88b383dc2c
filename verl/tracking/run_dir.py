"""The folder of one run: resolved config, environment, metrics, samples, notices, report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from verl.errors import VerlError
from verl.notices import notice
from verl.tracking.environment import environment_record
from verl.tracking.jsonl import JsonlFile, jsonable, number, read_jsonl, write_atomic
from verl.tracking.plain import flatten, plain_config
from verl.tracking.stored import read_mapping

_RECORD = (
    "config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "notices.txt", "report.html", "tensorboard",
)  # fmt: skip


class RunDirectory:
    """Creates (or opens again) ``path`` and writes a run's record into it; only the controller process does.

    Files: ``config.yaml`` ``environment.json`` ``metrics.jsonl`` ``samples.jsonl`` ``notices.txt`` ``report.html``.
    Raises :class:`VerlError` with one sentence when the folder cannot be made or written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self._make()
        self._metrics = JsonlFile(self.path / "metrics.jsonl")
        self._samples = JsonlFile(self.path / "samples.jsonl")

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise VerlError(
                f"the run folder {self.path} cannot be made: a file of that name is in the way; "
                "set trainer.default_local_dir to another path"
            ) from None
        except OSError as error:
            raise VerlError(self._no_access(error.strerror or str(error))) from None
        probe = self.path / f".write_test{os.getpid()}"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise VerlError(self._no_access(error.strerror or str(error))) from None

    def _no_access(self, reason: str) -> str:
        return (
            f"the run folder {self.path} cannot be written ({reason}); set trainer.default_local_dir to a folder "
            "where you may write"
        )

    # -- what the run is ------------------------------------------------------------------------------------------
    def write_config(self, config: Any) -> None:
        """Write the resolved config as YAML, secrets hidden. A resumed run whose keys differ says which."""
        plain = plain_config(config)
        before = self.read_config()
        if before:
            old, new = flatten(before), flatten(plain)
            changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            if changed:
                shown = ", ".join(f"{key}: {old.get(key)} -> {new.get(key)}" for key in changed[:8])
                more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
                notice(f"the config differs from the one this run folder was started with: {shown}{more}")
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
        write_atomic(self.path / "config.yaml", text.encode("utf-8"))

    def read_config(self) -> dict[str, Any]:
        """The config of ``config.yaml``; ``{}`` when there is none."""
        return read_mapping(self.path / "config.yaml")

    def write_environment(self, seed: int | None = None, device: Any = None, resume_step: int | None = None) -> None:
        """Write ``environment.json``; earlier starts of the same run stay listed under ``earlier_starts``."""
        record = environment_record(seed, device)
        record["resumed_after_step"] = resume_step
        before = self.read_environment()
        earlier = before.pop("earlier_starts", [])
        if before:
            earlier.append({k: before.get(k) for k in ("started", "command", "git_commit", "resumed_after_step")})
        record["earlier_starts"] = earlier
        text = json.dumps(jsonable(record), indent=2, ensure_ascii=False)
        write_atomic(self.path / "environment.json", text.encode("utf-8", errors="backslashreplace") + b"\n")

    def read_environment(self) -> dict[str, Any]:
        return read_mapping(self.path / "environment.json")

    # -- what happens ---------------------------------------------------------------------------------------------
    def append_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """One line ``{"step": N, "time": unix seconds, name: value, ...}``; OSError (disk full) loses nothing."""
        self._metrics.append([{"step": step, "time": round(time.time(), 3), **metrics}])

    def append_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows as made by :func:`verl.tracking.samples.sample_row`, one line each."""
        self._samples.append(rows)

    def append_notice(self, text: str) -> None:
        stamp = datetime.now().astimezone().isoformat(timespec="seconds")
        line = f"{stamp} {' '.join(text.split())}\n"
        with open(self.path / "notices.txt", "ab") as file:
            file.write(line.encode("utf-8", errors="backslashreplace"))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records in order, one a step: numbers are floats again (NaN and infinities too), ``step`` is an int.

        Records of the same step (training and validation logged apart) are joined, later values winning.
        """
        steps: dict[int, dict[str, Any]] = {}
        for row in read_jsonl(self.path / "metrics.jsonl"):
            if not isinstance(row.get("step"), int):
                continue  # not a record of ours
            step = row["step"]
            values = {key: number(value) for key, value in row.items() if key != "step"}
            steps.setdefault(step, {"step": step}).update({k: v for k, v in values.items() if v is not None})
        return [steps[step] for step in sorted(steps)]

    def read_samples(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "samples.jsonl")

    def read_notices(self) -> list[str]:
        """Lines ``<time> <text>``, oldest first."""
        path = self.path / "notices.txt"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def truncate_after(self, step: int) -> int:
        """Forget metrics and samples of steps after ``step``, which a resumed run will do again; returns how many.

        Each file is replaced atomically: a crash in between leaves whole files, and the next resume cuts again.
        """
        return sum(file.keep(lambda row: row.get("step", 0) <= step) for file in (self._metrics, self._samples))

    def set_earlier_run_aside(self) -> Path | None:
        """Before a run from step 1: move an earlier run's record to ``earlier_runs/<n>/``, with a notice.

        Checkpoints stay where they are. Returns the new place, or None when there was nothing to move.
        """
        self.close()
        present = [self.path / name for name in _RECORD if (self.path / name).exists()]
        if not any(path.name == "metrics.jsonl" for path in present):
            return None
        aside = self.path / "earlier_runs"
        numbers = [int(path.name) for path in aside.glob("*") if path.name.isdecimal()]
        aside = aside / str(max(numbers, default=0) + 1)
        aside.mkdir(parents=True)
        for path in present:
            path.rename(aside / path.name)
        notice(f"{self.path} holds the record of an earlier run, which was moved to {aside}")
        return aside

    def close(self) -> None:
        """Write what a full disk may have held back, and close. Raises OSError when it still does not fit."""
        try:
            self._metrics.close()
        finally:
            self._samples.close()
