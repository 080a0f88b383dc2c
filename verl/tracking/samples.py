"""Sample generations: rows for ``samples.jsonl``, a table for the terminal, and ByteDance-verl's per-step dumps."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.tracking.jsonl import encode_line, write_atomic

if TYPE_CHECKING:
    from rich.table import Table

PREVIEW = "preview"  # the split of answers to the user's own prompts
_NAMED_CONTROLS = {"\n": "↵", "\t": "→", "\r": "␍"}
_JOINERS = "\u200c\u200d"  # these control how scripts and emoji are drawn; everything else of category Cf is hidden


def sample_row(
    step: int,
    split: str,
    prompt: str,
    response: str,
    score: float | None,
    ground_truth: Any = None,
    finish_reason: str | None = None,
    uid: str | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """One row of ``samples.jsonl``. ``split`` is "train", "val" or "preview"; ``score`` None means that it failed."""
    return {
        "step": step,
        "split": split,
        "prompt": prompt,
        "response": response,
        "score": score,
        "ground_truth": ground_truth,
        "finish_reason": finish_reason,
        "uid": uid,
        **extra,
    }


def visible(text: str) -> str:
    """``text`` on one line with nothing that a terminal would obey: control, format and lone surrogate code points.

    Newlines and tabs show as ↵ and →; the others as their escape (``\\x1b``), so that a response can neither move the
    cursor, nor set colours, nor reverse the direction of the line.
    """
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character in _NAMED_CONTROLS:
        return _NAMED_CONTROLS[character]
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS:
        return character.encode("unicode_escape").decode("ascii")
    return character


def crop(text: str, limit: int) -> str:
    """At most ``limit`` characters; a longer text keeps its two ends, since answers stand at the end."""
    if len(text) <= limit:
        return text
    tail = (limit - 3) // 2
    return f"{text[: limit - 3 - tail]} … {text[len(text) - tail :]}"


def sample_table(rows: Sequence[Mapping[str, Any]], title: str | None = None, max_characters: int = 300) -> Table:
    """A rich table of sample rows: prompt, response, expected answer (when there is one), score.

    Texts are literal: neither rich markup such as ``[red]`` nor control codes in them have any effect.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    with_truth = any(row.get("ground_truth") is not None for row in rows)
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=False, pad_edge=False
    )
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("response", ratio=3, overflow="fold")
    if with_truth:
        table.add_column("expected", ratio=1, overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    for row in rows:
        cells = [Text(crop(visible(str(row.get(key, ""))), max_characters)) for key in ("prompt", "response")]
        if with_truth:
            truth = row.get("ground_truth")
            cells.append(Text("" if truth is None else crop(visible(str(truth)), max_characters // 3)))
        table.add_row(*cells, "" if row.get("split") == PREVIEW else _score_text(row.get("score")))
    return table


def _score_text(score: Any) -> Any:
    from rich.text import Text

    if score is None:
        return Text("failed", style="yellow")
    return Text(f"{float(score):.3g}", style="green" if score > 0 else "red")


def plain_samples(rows: Sequence[Mapping[str, Any]], max_characters: int = 200) -> list[str]:
    """The same for a pipe: one line a sample, without control codes."""
    lines = []
    for row in rows:
        parts = [f"{row.get('split', 'sample')} sample"]
        for label, key in (("prompt", "prompt"), ("response", "response"), ("expected", "ground_truth")):
            if row.get(key) is not None:
                parts.append(f"{label}: {crop(visible(str(row[key])), max_characters)}")
        score = row.get("score")
        if row.get("split") != PREVIEW:  # nobody scores the user's own prompts
            parts.append("score: failed" if score is None else f"score: {float(score):.3g}")
        lines.append(" | ".join(parts))
    return lines


def dump_generations(
    directory: str | Path,
    step: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    gts: Sequence[Any],
    scores: Sequence[float | None],
    extra: Mapping[str, Sequence[Any]] | None = None,
) -> Path:
    """Write ``{directory}/{step}.jsonl`` (``trainer.rollout_data_dir``, ``trainer.validation_data_dir``); returns it.

    One line a response with ``input``, ``output``, ``gts``, ``score``, ``step`` and the extra columns. The file appears
    whole or not at all; a step that is done again after a resume replaces its file.
    """
    columns: dict[str, Sequence[Any]] = {
        "input": inputs,
        "output": outputs,
        "gts": gts,
        "score": scores,
        **(extra or {}),
    }
    wrong = {name: len(column) for name, column in columns.items() if len(column) != len(inputs)}
    if wrong:
        raise ValueError(f"dump of step {step}: {len(inputs)} inputs, but these columns have other lengths: {wrong}")
    rows = [{**{name: column[i] for name, column in columns.items()}, "step": step} for i in range(len(inputs))]
    path = Path(directory).expanduser() / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, b"".join(encode_line(row) for row in rows))
    return path
