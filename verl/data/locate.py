"""What a data source's name means, and what to suggest when nothing has that name."""

from __future__ import annotations

import re
from pathlib import Path

from verl.config.suggest import near_path

# A folder or hub dataset without the first name may still have the next: many have no validation split.
SPLIT_FALLBACKS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "val", "test"),
    "test": ("test",),
}

_HUB_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*(:[\w.-]+)?")
_FILE_SUFFIX = re.compile(r"\.(parquet|jsonl?|arrow|csv|tsv|txt|gz|zst|pkl|npz?)$", re.IGNORECASE)


def looks_like_hub_name(source: str) -> bool:
    """``owner/name`` or ``name``, unless it has a file's ending or its owner is a folder here."""
    if not _HUB_NAME.fullmatch(source) or _FILE_SUFFIX.search(source):
        return False
    return "/" not in source or not Path(source).parent.is_dir()


def missing_file_message(path: Path) -> str:
    """One sentence: what is missing, the nearest name that exists, and what else could have been given."""
    near = near_path(path)
    hint = f"did you mean {near}?" if near else "give the path of a parquet, jsonl, json or Arrow dataset"
    return f"no such data file: {path}; {hint}"
