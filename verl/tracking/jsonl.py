"""Append-only files of one JSON object a line, which survive kill -9, a full disk and a resumed run."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.notices import notice

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def jsonable(value: Any) -> Any:
    """``value`` as plain JSON data.

    Arrays and tensors become lists, their scalars numbers. NaN and infinities become the strings ``"NaN"``,
    ``"Infinity"`` and ``"-Infinity"`` because strict JSON has no such numbers; anything else becomes its text.
    """
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, float):  # numpy's float64 is a float too
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, (np.generic, np.ndarray)):
        return jsonable(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    torch = sys.modules.get("torch")  # a tensor can only exist if somebody has imported torch
    if torch is not None and isinstance(value, torch.Tensor):
        return jsonable(value.detach().cpu().tolist())
    return str(value)


def number(value: Any) -> float | None:
    """A number as written by :func:`jsonable` (``"NaN"`` and the infinities included), or None for anything else."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def encode_line(row: Mapping[str, Any]) -> bytes:
    """One line of UTF-8 with its newline. A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape."""
    text = json.dumps(jsonable(row), ensure_ascii=False, separators=(", ", ": "))
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All whole records of a file, in order; a missing file has none.

    A line that a killed process left half-written is passed over, with a notice when it is not the last one.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")  # not splitlines(): U+2028 inside a text is no line end
    last = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif i != last:
            notice(f"{path}, line {i + 1} is not a JSON object and was passed over")
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # also UnicodeDecodeError: a character cut in the middle
        return None
    return row if isinstance(row, dict) else None


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves either the old or the new one, never a mixture."""
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class JsonlFile:
    """Appends rows to one file, each in the operating system's hands when :meth:`append` returns.

    If a write fails (disk full), the file is cut back to its last whole line, the rows are kept in memory, the error is
    raised, and the next :meth:`append` or :meth:`flush` writes them: nothing is lost once there is room again.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._fd: int | None = None
        self._pending: list[bytes] = []

    @property
    def pending(self) -> int:
        """Rows that could not be written so far."""
        return len(self._pending)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._pending.extend(encode_line(row) for row in rows)
        self.flush()

    def flush(self) -> None:
        """Write what is pending. Raises OSError, with everything still pending, when that fails."""
        if not self._pending:
            return
        if self._fd is None:
            self._open()
        data = memoryview(b"".join(self._pending))
        good = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            os.ftruncate(self._fd, good)
            error.filename = str(self.path)  # a write to a descriptor does not know it
            raise
        self._pending.clear()

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
        """Rewrite the file, atomically, with only the rows that are wanted; returns how many were dropped."""
        self.close()
        rows = read_jsonl(self.path)
        kept = [row for row in rows if wanted(row)]
        if len(kept) < len(rows):
            write_atomic(self.path, b"".join(encode_line(row) for row in kept))
        return len(rows) - len(kept)

    def close(self) -> None:
        """Write what is pending and close the file; a later append opens it again."""
        try:
            self.flush()
        finally:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.lseek(self._fd, 0, os.SEEK_END)
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self._mend_last_line(size)

    def _mend_last_line(self, size: int) -> None:
        """A killed process left the last line without its newline: complete it if it is whole, cut it off if not."""
        tail = self.path.read_bytes()[:size]
        start = tail.rfind(b"\n") + 1
        if _parse(tail[start:]) is None:
            os.ftruncate(self._fd, start)
        else:
            os.write(self._fd, b"\n")
