"""Read parquet, JSON lines, JSON, Arrow dataset folders and hub datasets into :class:`~verl.data.rows.Rows`.

Arrow and parquet go through pyarrow directly: the ``huggingface`` metadata inside such files differs between
versions of the ``datasets`` package, and nothing here needs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.config.suggest import near_path
from verl.data.locate import SPLIT_FALLBACKS, looks_like_hub_name, missing_file_message
from verl.data.rows import Part, Row, Rows
from verl.errors import DataError, MissingDependencyError

DataFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Sequence[Mapping[str, Any]]


def read_rows(data_files: DataFiles, split: str = "train") -> Rows:
    """Read one source or a list of sources.

    A source is a ``.parquet``, ``.jsonl``, ``.json`` or ``.arrow`` file, a folder written by
    ``datasets.save_to_disk``, a folder with such files named after their split, or a hub dataset
    (``owner/name`` or ``owner/name:configuration``). A list of dicts is taken as the rows themselves.
    ``split`` chooses among the splits of a folder or hub dataset; a file has none.

    Raises :class:`~verl.errors.DataError` if a source is missing, unreadable or empty.
    """
    if isinstance(data_files, str | os.PathLike):
        sources: list[Any] = [data_files]
    else:
        sources = list(data_files)
    if not sources:
        raise DataError("no data: give at least one file in data.train_files (or one row, for a list of dicts)")
    if all(isinstance(source, Mapping) for source in sources):
        return Rows([Part.from_list("rows", [dict(source) for source in sources])])
    for source in sources:
        if not isinstance(source, str | os.PathLike):
            raise DataError(f"a data file is a path or a hub name, or all are rows (dicts): got {source!r}")
    parts = [part for source in sources for part in _read_source(os.fspath(source), split)]
    rows = Rows(parts)
    if not len(rows):
        raise DataError(f"the dataset is empty: no rows in {', '.join(part.name for part in parts)}")
    return rows


def _read_source(source: str, split: str) -> list[Part]:
    path = Path(os.path.expandvars(source)).expanduser()
    try:
        if path.is_dir():
            return read_folder(path, split)
        if path.is_file():
            return [read_file(path)]
    except PermissionError as error:
        raise DataError(f"no permission to read {path}: {error.strerror}") from error
    if looks_like_hub_name(source):
        return [read_hub(source, split)]
    raise DataError(missing_file_message(path))


def read_file(path: Path) -> Part:
    """Read one file by its ending."""
    reader = FILE_READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: cannot read '{path.suffix}' files; use one of {', '.join(sorted(FILE_READERS))}")
    return reader(path)


def read_parquet(path: Path) -> Part:
    try:
        # ParquetFile rather than read_table: the latter invents columns from folder names like "lang=en".
        with pq.ParquetFile(path) as file:
            return _checked(path, file.read())
    except PermissionError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable parquet file: {_first_line(error)}") from error


def read_arrow(path: Path) -> Part:
    """An Arrow IPC file, in the streaming form that ``datasets`` writes or in the file form."""
    try:
        source = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_stream(source).read_all()
        except (pa.ArrowException, OSError):
            table = pa.ipc.open_file(source).read_all()
        return _checked(path, table)
    except PermissionError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable Arrow file: {_first_line(error)}") from error


def _checked(path: Path, table: pa.Table) -> Part:
    """The rows, once it is known that they can be read: neither reader looks at offsets or at whether text is UTF-8."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise DataError(f"{path}, column '{name}' cannot be read: {_first_line(error)}") from error
    return Part.from_table(str(path), table)


def read_jsonl(path: Path) -> Part:
    """One JSON object per line; empty lines are skipped."""
    rows: list[Row] = []
    lines: list[int] = []
    number = 0
    try:
        # utf-8-sig: editors on Windows write a byte-order mark.
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append(_json_object(line, path, number))
                    lines.append(number)
    except UnicodeDecodeError as error:
        where = f"after line {number}" if number else "from its beginning"
        raise DataError(
            f"{path} is not UTF-8 text {where} ({error}): save it as UTF-8, or name it by what it is (.parquet, .arrow)"
        ) from error
    return Part.from_list(str(path), rows, lines)


def _json_object(line: str, path: Path, number: int) -> Row:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise DataError(f"{path}, line {number}: JSON that cannot be read: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}, line {number}: a row must be a JSON object {{...}}, got {type(value).__name__}")
    return value


def read_json(path: Path) -> Part:
    """A JSON list of objects; a ``.json`` file that holds JSON lines is read as such."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            is_list = file.read(4096).lstrip().startswith("[")
            if not is_list:
                return read_jsonl(path)
            file.seek(0)
            rows = json.load(file)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: JSON that cannot be read: {_first_line(error)}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: a row must be a JSON object, got {type(row).__name__}")
    return Part.from_list(str(path), rows)


FILE_READERS: dict[str, Callable[[Path], Part]] = {
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".jsonl": read_jsonl,
    ".json": read_json,
}


def read_folder(path: Path, split: str) -> list[Part]:
    """A dataset folder of ``save_to_disk``, a dict of them, or files named after their split."""
    if (path / "state.json").is_file():
        return _read_arrow_dataset(path)
    if (path / "dataset_dict.json").is_file():
        available = _strings(path / "dataset_dict.json", _read_json_file(path / "dataset_dict.json").get("splits"))
        return _read_arrow_dataset(path / choose_split(available, split, str(path)))
    for name in SPLIT_FALLBACKS.get(split, (split,)):
        files = sorted(
            file
            for file in path.iterdir()
            if file.suffix.lower() in FILE_READERS and file.is_file() and _is_split_file(file.stem, name)
        )
        if files:
            return [read_file(file) for file in files]
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
    raise DataError(
        f"{path} is a folder without a dataset for the split '{split}': expected dataset_dict.json, state.json "
        f"or files like {split}.parquet, found {found}"
    )


def _is_split_file(stem: str, split: str) -> bool:
    """``train``, ``train-00000-of-00002`` and ``train_0`` belong to ``train``; ``training_notes`` does not."""
    return stem == split or (stem.startswith(split) and stem[len(split)] in "-_.")


def _read_arrow_dataset(path: Path) -> list[Part]:
    state_file = path / "state.json"
    if not state_file.is_file():
        raise DataError(f"{path} is not a dataset folder: it has no state.json (written by datasets.save_to_disk)")
    state = _read_json_file(state_file)
    if state.get("_indices_data_files"):
        raise DataError(f"{path} keeps a selection beside its rows, as old versions of datasets did: save it again")
    entries = state.get("_data_files")
    files = (
        [entry.get("filename") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else None
    )
    return [read_arrow(path / name) for name in _strings(state_file, files)]


def _strings(path: Path, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(f"{path} is damaged: it does not list names")
    return value


def _read_json_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it holds no mapping")
    return content


def choose_split(available: Sequence[str], split: str, name: str) -> str:
    """The wanted split, or for validation the test split."""
    for candidate in SPLIT_FALLBACKS.get(split, (split,)):
        if candidate in available:
            return candidate
    raise DataError(f"{name} has no split '{split}': it has {', '.join(available)}")


def read_hub(name: str, split: str) -> Part:
    """A dataset of the hub, through the ``datasets`` package. ``owner/name:configuration`` picks a configuration."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError("datasets", f"Reading the hub dataset '{name}'") from error
    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None)
    # The package raises its own, OS, HTTP and value errors here; all mean that the user got no data.
    except Exception as error:
        near = near_path(name)
        hint = f" (did you mean {near}?)" if near else ""
        raise DataError(
            f"'{name}' is no file or folder here{hint} and could not be loaded from the hub ({_first_line(error)}). "
            "Give the path of a local file, write owner/name:configuration if it has several, or set HF_ENDPOINT to a "
            "mirror that this machine can reach"
        ) from error
    picked = choose_split(list(loaded), split, name)
    return Part.from_table(f"{name} ({picked})", loaded[picked].with_format("arrow")[:], repository)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
