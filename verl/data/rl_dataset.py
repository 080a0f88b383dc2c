"""The dataset of prompts: rows read, checked, templated and cut to length before training starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.data.readers import DataFiles, read_rows
from verl.data.rows import Part, Row
from verl.data.sampler import pick_rows
from verl.data.schemas import Layout, detect_layout, own_name, prompt_row
from verl.data.settings import PromptSettings
from verl.data.templating import GROUP, PromptTemplate, truncate
from verl.errors import DataError
from verl.notices import notice

# From this many rows on, encoding takes long enough to want a progress bar.
PROGRESS_FROM = 20_000
MEDIA_COLUMNS = frozenset({"images", "videos", "audios"})


@dataclass
class PromptReport:
    """What happened to the rows: ``rows`` read, ``kept``, and why the others are not as they were."""

    rows: int
    selected: int
    kept: int = 0
    overlong: int = 0
    failed: int = 0
    truncated: int = 0
    longest: int = 0


class PromptDataset:
    """Prompts with their token ids, ready for generation.

    ``data_files`` is whatever :func:`~verl.data.readers.read_rows` takes, ``config`` the ``data.*`` keys as a dict or
    dataclass. Every row is templated and measured here, once, so that mistakes come before training: 7,473 GSM8K
    rows take 3 to 4 seconds on two cores. Only the token ids are kept (4 bytes a token); the rest of a row is read
    again from its Arrow table when asked for.

    ``max_samples`` > 0 keeps that many rows: the first ones, or with ``shuffle`` a subset drawn with ``seed``.
    ``split`` picks among the splits of a folder or hub dataset. An item is a dict, see :meth:`__getitem__`.

    Raises :class:`~verl.errors.DataError` naming file and row for a wrong row, a prompt that is longer than
    ``max_prompt_length`` (with ``truncation="error"``), or if nothing is left.
    """

    def __init__(
        self,
        data_files: DataFiles,
        tokenizer: Any,
        config: Any = None,
        *,
        max_samples: int = -1,
        split: str = "train",
        tools: Sequence[Mapping[str, Any]] | None = None,
        **overrides: Any,
    ):
        self.settings = PromptSettings.from_config(config, **overrides)
        self.template = PromptTemplate(
            tokenizer,
            mode=self.settings.template_mode,
            kwargs=self.settings.apply_chat_template_kwargs,
            chat_template=self.settings.custom_chat_template,
            tools=tools,
        )
        self._rows = read_rows(data_files, split)
        self._own_names = [own_name(column) for column in self._rows.columns]
        self._layouts = [self._layout(part) for part in self._rows.parts]
        self._tell_media()
        numbers = pick_rows(len(self._rows), max_samples, self.settings.shuffle, self.settings.seed)
        self.report = PromptReport(rows=len(self._rows), selected=len(numbers))
        self._numbers, self._ids = self._encode(numbers)
        self.report.kept = len(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: int) -> Row:
        """A new dict with

        - ``prompt_ids``: (length,) int64, no padding, at most ``max_prompt_length``;
        - ``raw_prompt``: the whole prompt, messages or text, also where the ids were cut;
        - ``data_source``, ``reward_model``, ``extra_info``: see :func:`~verl.data.schemas.prompt_row`;
        - ``index``: number of the row in the files as they were read, before filtering and subsets;
        - every other dataset column, None where only other rows (of a JSON lines file, or of another file) have it.
        """
        if not -len(self) <= position < len(self):
            raise IndexError(f"prompt {position} of {len(self)}")
        number = int(self._numbers[position])
        row = {**dict.fromkeys(self._own_names), **self._prompt_row(number)}
        return {**row, "prompt_ids": self._ids[position].astype(np.int64), "index": number}

    def where(self, position: int) -> str:
        """File and row of an item, for messages."""
        return self._rows.where(int(self._numbers[position]))

    @property
    def columns(self) -> list[str]:
        """The columns of the files."""
        return self._rows.columns

    def _layout(self, part: Part) -> Layout | None:
        return detect_layout(part.columns, self.settings.prompt_key, part.name) if len(part) else None

    def _prompt_row(self, number: int) -> Row:
        part_number, local = self._rows.locate(number)
        part, layout = self._rows.parts[part_number], self._layouts[part_number]
        assert layout is not None, "an empty part has no rows"
        try:
            return prompt_row(
                part.row(local),
                layout,
                part.where(local),
                prompt_key=self.settings.prompt_key,
                answer_key=self.settings.answer_key,
                source_key=self.settings.reward_fn_key,
                default_source=part.source,
            )
        except RecursionError:
            raise DataError(f"{part.where(local)}: its values are nested too deep to be used") from None

    def _encode(self, numbers: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Template, measure and cut every row; returns the row numbers kept and their ids."""
        limit, report = self.settings.max_prompt_length, self.report
        kept: list[int] = []
        ids: list[np.ndarray] = []
        overlong: list[tuple[int, int]] = []
        failed: list[tuple[int, Exception]] = []
        for number, encoded in self._encoded(numbers):
            if isinstance(encoded, Exception):
                failed.append((number, encoded))
                continue
            if not encoded:
                raise DataError(f"{self._rows.where(number)}: the prompt is empty (no tokens)")
            report.longest = max(report.longest, len(encoded))
            if len(encoded) > limit:
                overlong.append((number, len(encoded)))
                if self.settings.filter_overlong_prompts or self.settings.truncation == "error":
                    continue
                report.truncated += 1
            kept.append(number)
            ids.append(truncate(np.asarray(encoded, dtype=np.int32), limit, self.settings.truncation))
        report.failed, report.overlong = len(failed), len(overlong)
        self._tell_failed(failed)
        self._tell_overlong(overlong, anything_left=bool(kept))
        return np.asarray(kept, dtype=np.int64), ids

    def _encoded(self, numbers: np.ndarray) -> Iterable[tuple[int, list[int] | Exception]]:
        starts: Iterable[int] = range(0, len(numbers), GROUP)
        if len(numbers) >= PROGRESS_FROM:
            from rich.progress import track

            starts = track(list(starts), description="Reading prompts")
        for start in starts:
            group = [int(number) for number in numbers[start : start + GROUP]]
            prompts = [self._prompt_row(number)["raw_prompt"] for number in group]
            yield from zip(group, self.template.encode_many(prompts), strict=True)

    def _tell_media(self) -> None:
        for column in MEDIA_COLUMNS & set(self._rows.columns):
            notice(f"dataset column '{column}' is carried along, but models are given the text of the prompts only")

    def _tell_failed(self, failed: list[tuple[int, Exception]]) -> None:
        """A template that refuses rows: counted and told while filtering, else an error; all of them: an error."""
        if not failed:
            return
        number, error = failed[0]
        first = f"{self._rows.where(number)}: {type(error).__name__}: {str(error).strip() or '(no message)'}"
        text = f"the chat template failed on {len(failed)} of {self.report.selected} rows; the first: {first}"
        if not self.settings.filter_overlong_prompts or len(failed) == self.report.selected:
            raise DataError(text) from error
        notice(f"{text}; these rows are left out")

    def _tell_overlong(self, overlong: list[tuple[int, int]], anything_left: bool) -> None:
        if not overlong:
            return
        settings, selected, longest = self.settings, self.report.selected, self.report.longest
        limit = settings.max_prompt_length
        if settings.filter_overlong_prompts:
            text = f"{len(overlong)} of {selected} prompts are longer than {limit} tokens (longest {longest})"
            if not anything_left:
                raise DataError(f"{text}, so none is left: raise data.max_prompt_length")
            notice(f"{text} and are left out (data.filter_overlong_prompts)")
        elif settings.truncation == "error":
            number, length = overlong[0]
            others = (
                f"; {len(overlong)} of {selected} rows are too long, longest {longest}" if len(overlong) > 1 else ""
            )
            raise DataError(
                f"{self._rows.where(number)}: prompt length {length} > max_prompt_length {limit}{others}. Raise "
                "data.max_prompt_length, leave such rows out with data.filter_overlong_prompts=true, or cut them with "
                "data.truncation=left|right|middle"
            )
        else:
            how = f"data.truncation={settings.truncation}"
            notice(f"{len(overlong)} of {selected} prompts are cut to {limit} tokens ({how})")
