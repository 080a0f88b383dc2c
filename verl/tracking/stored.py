"""Reading the small files of a run folder, which a full disk or a hand may have damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from verl.notices import notice


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; ``{}`` where there is no file, or, with a notice, where it holds none."""
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text) or {}
    except (ValueError, yaml.YAMLError):  # ValueError: no JSON, or no UTF-8
        value = None
    if not isinstance(value, dict):
        notice(f"{path} is damaged and was passed over: it holds no mapping of keys")
        return {}
    return value
