"""What datasets of texts to learn from share: rows read, encoded and cut once, unusable ones told or counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.data.conversation import ConversationTemplate, Encoded, RowProblem
from verl.data.messages import plain
from verl.data.readers import DataFiles, read_rows
from verl.data.rows import Part, Row
from verl.data.sampler import pick_rows
from verl.data.schemas import own_columns, own_name
from verl.data.sequence_settings import SequenceSettings
from verl.errors import DataError
from verl.notices import notice

PROGRESS_FROM = 5_000
REMEDY = "correct the row, or leave such rows out with data.on_bad_row=drop"


@dataclass
class SequenceReport:
    """What happened to the rows: read, selected, kept; ``truncated`` of these; ``dropped`` by reason."""

    rows: int
    selected: int
    kept: int = 0
    truncated: int = 0
    longest: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def cut(encoded: Encoded, limit: int, how: str) -> Encoded:
    """The first (``keep_start``) or last (``keep_end``) ``limit`` tokens of one row, before any padding."""
    ids, mask = encoded
    if len(ids) <= limit:
        return encoded
    return (ids[:limit], mask[:limit]) if how == "keep_start" else (ids[-limit:], mask[-limit:])


def split(encoded: Encoded) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(prompt_ids, response_ids, response_mask): the response starts at the first trained token."""
    ids, mask = encoded
    start = int(mask.argmax()) if mask.any() else len(ids)
    return ids[:start], ids[start:], mask[start:]


class SequenceDataset:
    """Base of `SFTDataset`, `PreferenceDataset` and `UnpairedDataset`; ``data_files`` and ``config`` as there.

    Every row is encoded here, once, so that mistakes come before training. A subclass says what a row is in
    ``check_part`` (columns of a file) and ``encode_row``.
    """

    template_class = ConversationTemplate

    def __init__(
        self,
        data_files: DataFiles,
        tokenizer: Any,
        config: Any = None,
        *,
        max_samples: int = -1,
        split: str = "train",
        **overrides: Any,
    ):
        self.settings = SequenceSettings.from_config(config, **overrides)
        self.template = self.template_class(
            tokenizer,
            mode=self.settings.template_mode,
            kwargs=self.settings.apply_chat_template_kwargs,
            chat_template=self.settings.custom_chat_template,
        )
        self._rows = read_rows(data_files, split)
        self._own_names = [own_name(column) for column in self._rows.columns]
        for part in self._rows.parts:
            if len(part):
                self.check_part(part)
        numbers = pick_rows(len(self._rows), max_samples, self.settings.shuffle, self.settings.seed)
        self.report = SequenceReport(rows=len(self._rows), selected=len(numbers))
        self._numbers: list[int] = []
        self._items: list[Row] = []
        self._encode_all(numbers)

    def check_part(self, part: Part) -> None:
        """Raise DataError if the file lacks a column."""
        raise NotImplementedError

    def encode_row(self, row: Row, part: Part, where: str) -> Row:
        """The arrays of one row; raises RowProblem or DataError for one that cannot be used."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: int) -> Row:
        """A new dict: the arrays of the class's description, ``index`` (row number in the files), every column.

        A column that only other rows have is None here, so every batch has the same columns.
        """
        if not -len(self) <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        number = self._numbers[position]
        arrays = {
            key: value.astype(np.int64) if isinstance(value, np.ndarray) and value.dtype == np.int32 else value
            for key, value in self._items[position].items()
        }
        own = {**dict.fromkeys(self._own_names), **own_columns(self._rows[number])}
        return {**own, **arrays, "index": number}

    def where(self, position: int) -> str:
        """File and row of an item, for messages."""
        return self._rows.where(self._numbers[position])

    def tools(self, row: Row, where: str) -> list[Any] | None:
        """The row's tool schemas: a list of dicts, or the same as JSON text; None without any."""
        value = plain(row.get(self.settings.tools_key))
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise RowProblem("wrong tools", f"{where}: the tools are text but not JSON: {error.msg}") from error
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise RowProblem("wrong tools", f"{where}: column '{self.settings.tools_key}' must be a list of schemas")
        return value

    def fit(self, encoded: Encoded, where: str) -> Encoded:
        """``encoded`` cut to ``max_length`` as configured; counts, or raises RowProblem."""
        limit, length = self.settings.max_length, len(encoded[0])
        self.report.longest = max(self.report.longest, length)
        if length <= limit:
            return encoded
        if self.settings.cut == "error":
            raise RowProblem(
                "too long",
                f"{where}: length {length} > max_length {limit}; raise data.max_length, or cut rows with "
                "data.truncation=keep_start|keep_end",
            )
        return cut(encoded, limit, self.settings.cut)

    def _encode_one(self, part: Part, local: int, where: str) -> Row:
        try:
            return self.encode_row(part.row(local), part, where)
        except RecursionError:
            raise RowProblem("nested too deep", f"{where}: its values are nested too deep to be used") from None

    def _encode_all(self, numbers: np.ndarray) -> None:
        first: str | None = None
        todo: Iterable[int] = [int(number) for number in numbers]
        if len(numbers) >= PROGRESS_FROM:
            from rich.progress import track

            todo = track(todo, description="Reading rows")
        for number in todo:
            position, local = self._rows.locate(number)
            part = self._rows.parts[position]
            where = part.where(local)
            longer_than_limit = self.report.longest
            try:
                item = self._encode_one(part, local, where)
            except DataError as problem:
                if self.settings.on_bad_row == "error":
                    raise DataError(f"{problem}. To go on: {REMEDY}") from problem
                self.report.longest = longer_than_limit
                self.report.dropped[getattr(problem, "reason", "wrong row")] += 1
                first = first or str(problem)
                continue
            self.report.truncated += bool(item.pop("truncated"))
            self._numbers.append(number)
            self._items.append(item)
        self.report.kept = len(self._numbers)
        self._tell(first)

    def _tell(self, first: str | None) -> None:
        report = self.report
        if first is not None:
            reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.most_common())
            total = report.dropped.total()
            text = f"{total} of {report.selected} rows are left out ({reasons}); the first: {first}"
            if not report.kept:
                raise DataError(f"no row can be used: {text}")
            notice(text)
        if report.truncated:
            notice(
                f"{report.truncated} of {report.selected} rows are cut to {self.settings.max_length} tokens "
                f"(data.truncation={self.settings.truncation})"
            )
