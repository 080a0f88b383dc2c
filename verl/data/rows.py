"""Rows of several files as one sequence, each row knowing the file and the line it came from."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import pyarrow as pa

Row = dict[str, Any]

# What pandas adds to a parquet file for its own use.
PANDAS_INDEX_PREFIX = "__index_level_"


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one file (or hub split, or Python list), as an Arrow table or a list of dicts.

    ``lines`` holds the 1-based line of each row where the file has lines that people look up (JSONL). ``source`` is
    the data source of rows that name none.
    """

    name: str
    data: pa.Table | list[Row]
    columns: tuple[str, ...]
    source: str
    lines: tuple[int, ...] | None = None

    @classmethod
    def from_table(cls, name: str, table: pa.Table, source: str | None = None) -> Part:
        hidden = [column for column in table.column_names if column.startswith(PANDAS_INDEX_PREFIX)]
        table = table.drop_columns(hidden) if hidden else table
        return cls(name, table, tuple(table.column_names), source or _local_source(name))

    @classmethod
    def from_list(cls, name: str, rows: list[Row], lines: Sequence[int] | None = None) -> Part:
        columns = dict.fromkeys(column for row in rows for column in row)
        return cls(name, rows, tuple(columns), _local_source(name), None if lines is None else tuple(lines))

    def __len__(self) -> int:
        return self.data.num_rows if isinstance(self.data, pa.Table) else len(self.data)

    def row(self, number: int) -> Row:
        """One row as a new dict of Python values (nested values of a list part are shared, not copied)."""
        if isinstance(self.data, pa.Table):
            return self.data.slice(number, 1).to_pylist()[0]
        return dict(self.data[number])

    def where(self, number: int) -> str:
        """``train.parquet, row 17`` (from 0), or ``train.jsonl, line 18`` (from 1)."""
        if self.lines is not None:
            return f"{self.name}, line {self.lines[number]} (row {number})"
        return f"{self.name}, row {number}"


def _local_source(name: str) -> str:
    # The prefix keeps a file called math.jsonl apart from the data source "math", which has its own scorer.
    return f"local/{PurePath(name).stem}"


class Rows(Sequence[Row]):
    """Several parts behind one row number: 0 … len − 1 in the order of the files."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = list(parts)
        self._starts = [0]
        for part in self.parts:
            self._starts.append(self._starts[-1] + len(part))

    def __len__(self) -> int:
        return self._starts[-1]

    def locate(self, number: int) -> tuple[int, int]:
        """The number of the part that holds row ``number``, and the row's number inside it."""
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        position = bisect.bisect_right(self._starts, number) - 1
        return position, number - self._starts[position]

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]
        part, local = self.locate(number)
        return self.parts[part].row(local)

    def where(self, number: int) -> str:
        part, local = self.locate(number)
        return self.parts[part].where(local)

    @property
    def columns(self) -> list[str]:
        """Every column that occurs, in order of first appearance."""
        return list(dict.fromkeys(column for part in self.parts for column in part.columns))
