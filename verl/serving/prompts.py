"""Prompts out of a file: lines of text, or rows of any dataset layout that training reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.data.messages import Prompt
from verl.data.readers import read_rows
from verl.data.schemas import DEFAULT_PROMPT_KEY, detect_layout, prompt_row
from verl.errors import DataError

TEXT_ENDINGS = (".txt", ".md", "")


@dataclass(frozen=True)
class Question:
    """A prompt and, where the file has one, the answer that is expected."""

    prompt: Prompt
    expected: Any = None


def read_questions(path: str | Path, limit: int | None = None) -> list[Question]:
    """The prompts of a file, in order.

    A ``.txt`` file has one prompt a line (empty lines are passed over); every other form is read as training data is:
    parquet, JSON lines, JSON and Arrow with a ``prompt`` column, questions, instructions or messages.

    Raises:
        DataError: the file is missing, unreadable, empty, or of an unknown layout.
    """
    file = Path(path).expanduser()
    if file.is_file() and file.suffix.lower() in TEXT_ENDINGS:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
        questions = [Question(line) for line in text.splitlines() if line.strip()]
    else:
        rows = read_rows(path)
        count = len(rows) if limit is None else min(limit, len(rows))
        questions = [_question(rows[i], f"{file}, row {i + 1}", str(file)) for i in range(count)]
    if not questions:
        raise DataError(f"{file} holds no prompt")
    return questions[:limit]


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """:func:`read_questions` without the answers."""
    return [question.prompt for question in read_questions(path, limit)]


def _question(row: dict[str, Any], where: str, name: str) -> Question:
    layout = detect_layout(list(row), DEFAULT_PROMPT_KEY, name)
    made = prompt_row(row, layout, where)
    return Question(made["raw_prompt"], made["reward_model"].get("ground_truth"))
