"""What is wrong with a model folder that cannot be loaded: which file, and what to do. Nothing here needs torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path

AGAIN = "copy or download that file again"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "adapter_config.json")
INDEX = "model.safetensors.index.json"


def damage_of(folder: Path) -> str | None:
    """A sentence on the first file of the folder that is damaged or missing, with the remedy; None if all look whole.

    It is for folders that failed to load: what transformers does without is not missed here.
    """
    for name in (*JSON_FILES, INDEX):
        path = folder / name
        if path.is_file() and (problem := _pointer(path) or json_problem(path)):
            return f"{name} {problem}"
    for path in sorted(folder.glob("*.safetensors")):
        if problem := _pointer(path) or _tensors_problem(path):
            return f"{path.name} {problem}"
    if (folder / INDEX).is_file():
        parts = set(json.loads((folder / INDEX).read_text(encoding="utf-8")).get("weight_map", {}).values())
        if missing := sorted(name for name in parts if not (folder / name).is_file()):
            return f"{missing[0]} is missing, which {INDEX} names: {AGAIN}"
    elif not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        return "it holds no weights: copy or download model.safetensors too"
    return None


def _pointer(path: Path) -> str | None:
    """Git clones a big file as a few lines on where it lies, unless Git LFS is installed."""
    with open(path, "rb") as file:
        start = file.read(40)
    if start.startswith(b"version https://git-lfs"):
        return "is only Git LFS's pointer to the file: run `git lfs pull` in the folder"
    return None


def json_problem(path: Path) -> str | None:
    """What keeps the file from being the JSON object that it should be."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return f"is not text in UTF-8: {AGAIN}"
    except (ValueError, RecursionError) as problem:
        where = f" (line {problem.lineno}: {problem.msg})" if isinstance(problem, json.JSONDecodeError) else ""
        return f"is not JSON{where}: {AGAIN}"
    if not isinstance(content, dict):
        return f"is JSON, but no object: {AGAIN}"
    if path.name == "config.json" and "model_type" not in content:
        return f"names no model_type, so it is not a model's: {AGAIN}"
    return None


def _tensors_problem(path: Path) -> str | None:
    """A safetensors file: 8 bytes of length, a JSON header, and the numbers up to the last offset that it names."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            return f"is no safetensors file, or only the beginning of one ({size} bytes): {AGAIN}"
        try:
            header = json.loads(file.read(length))
            ends = [place["data_offsets"][1] for name, place in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return f"is no safetensors file (its header is not readable): {AGAIN}"
    whole = 8 + length + max(ends, default=0)
    return f"is cut off ({size} of {whole} bytes): {AGAIN}" if size < whole else None
