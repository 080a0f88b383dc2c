"""GSM8K as published (question, answer) to parquet files in the prompt schema."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any, TypeGuard

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.locate import looks_like_hub_name
from verl.data.readers import FILE_READERS, read_rows
from verl.data.rows import Rows
from verl.errors import DataError, VerlError
from verl.notices import notice

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_HUB = "openai/gsm8k:main"
GSM8K_INSTRUCTION = 'Think it through step by step, and write the final answer after "####".'
_GOLD = re.compile(r"####\s*\$?\s*([-+]?[0-9.,]*[0-9][0-9.,]*)")

_EXTRA_INFO = pa.struct(
    [("split", pa.string()), ("index", pa.int64()), ("answer", pa.string()), ("question", pa.string())]
)
PROMPT_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", _EXTRA_INFO),
    ]
)


def is_gsm8k_answer(answer: Any) -> TypeGuard[str]:
    """Whether an answer is worked out in GSM8K's way, its result after ``####``."""
    return isinstance(answer, str) and "####" in answer


def gsm8k_prompt(question: str) -> list[dict[str, str]]:
    """One user message: the question and how to answer it."""
    return [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}]


def gsm8k_ground_truth(answer: str, where: str) -> str:
    """The number after the last ``####``, without thousands commas; sign and decimal point stay."""
    found = _GOLD.findall(answer)
    if not found:
        raise DataError(f"{where}: the answer has no number after '####': {answer[-60:]!r}")
    return found[-1].replace(",", "")


def gsm8k_row(row: dict[str, Any], index: int, split: str, where: str) -> dict[str, Any]:
    """One raw row in the prompt schema."""
    for column in ("question", "answer"):
        if not isinstance(row.get(column), str):
            raise DataError(f"{where}: column '{column}' must be text; the columns are {', '.join(row)}")
    question, answer = row["question"], row["answer"]
    return {
        "data_source": GSM8K_SOURCE,
        "prompt": gsm8k_prompt(question),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gsm8k_ground_truth(answer, where)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def preprocess_gsm8k(data_source: str, out_dir: str | Path) -> dict[str, Path]:
    """Write ``train.parquet`` and ``test.parquet`` into ``out_dir`` (created); returns the files by split.

    ``data_source`` is a file (a ``test.*`` beside a ``train.*`` is converted too), an Arrow dataset folder, a folder
    of files named after their split, or a hub dataset.
    """
    folder = Path(os.path.expandvars(str(out_dir))).expanduser()
    tables = {split: _convert(rows, split) for split, rows in read_gsm8k(data_source).items()}
    written = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, table in tables.items():
            written[split] = folder / f"{split}.parquet"
            unfinished = folder / f".{split}.parquet.unfinished"
            pq.write_table(table, unfinished)
            unfinished.replace(written[split])
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error.strerror or error}") from error
    return written


def read_gsm8k(data_source: str) -> dict[str, Rows]:
    """The raw rows of each split that the source has: train, test or both."""
    path = Path(os.path.expandvars(data_source)).expanduser()
    if path.is_file():
        split = "test" if path.stem.startswith("test") else "train"
        sources = {split: path}
        other = _test_beside(path) if split == "train" else None
        if other is not None:
            sources["test"] = other
        return {split: read_rows(str(file)) for split, file in sources.items()}
    if path.is_dir() and (path / "state.json").is_file():
        sources = {"test" if path.name.startswith("test") else "train": path}
        if path.name == "train" and (path.parent / "test" / "state.json").is_file():
            sources["test"] = path.parent / "test"
        return {split: read_rows(str(folder)) for split, folder in sources.items()}
    if path.is_dir() or looks_like_hub_name(data_source):
        name = GSM8K_HUB if data_source == GSM8K_SOURCE and not path.exists() else data_source
        splits = {"train": read_rows(name, "train")}
        try:
            splits["test"] = read_rows(name, "test")
        except DataError as error:
            notice(f"only the train split is converted: {error}")
        return splits
    return {"train": read_rows(data_source)}  # nothing there: its error says what is near


def _test_beside(path: Path) -> Path | None:
    """The test file next to a train file, preferably with the same ending."""
    if not path.stem.startswith("train"):
        return None
    stem = "test" + path.stem.removeprefix("train")
    suffixes = [path.suffix, *sorted(FILE_READERS)]
    return next((file for suffix in suffixes if (file := path.with_name(stem + suffix)).is_file()), None)


def _convert(rows: Rows, split: str) -> pa.Table:
    missing = {"question", "answer"} - set(rows.columns)
    if missing:
        already = " (it is in the prompt schema already)" if {"prompt", "reward_model"} <= set(rows.columns) else ""
        raise DataError(
            f"{rows.parts[0].name} is not raw GSM8K{already}: no column {', '.join(sorted(missing))}; "
            f"its columns are {', '.join(rows.columns)}"
        )
    converted = [gsm8k_row(row, index, split, rows.where(index)) for index, row in enumerate(rows)]
    return pa.Table.from_pylist(converted, schema=PROMPT_SCHEMA)


def main(arguments: list[str] | None = None) -> int:
    """Command line of ``examples/data_preprocess/gsm8k.py``; returns the exit code."""
    parser = argparse.ArgumentParser(description="Convert raw GSM8K to train.parquet and test.parquet for training.")
    parser.add_argument(
        "--data_source",
        help=f"parquet, jsonl or json file, Arrow dataset folder or hub name (default: {GSM8K_HUB})",
    )
    parser.add_argument("--local_dataset_path", help="the same as --data_source, for a local file or folder")
    parser.add_argument("--local_dir", help="folder to write to (default: ~/data/gsm8k)")
    parser.add_argument("--local_save_dir", help="the same as --local_dir")
    options = parser.parse_args(arguments)
    try:
        source = _one_of(options, "local_dataset_path", "data_source") or GSM8K_HUB
        out_dir = _one_of(options, "local_save_dir", "local_dir") or "~/data/gsm8k"
        written = preprocess_gsm8k(source, out_dir)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for split, file in written.items():
        print(f"{split}: {pq.read_metadata(file).num_rows} rows -> {file}")
    return 0


def _one_of(options: argparse.Namespace, first: str, second: str) -> str | None:
    """The value of two names for one option; different values are an error."""
    values = {getattr(options, first), getattr(options, second)} - {None}
    if len(values) > 1:
        raise DataError(f"--{first} and --{second} mean the same here: give one of them")
    return values.pop() if values else None
