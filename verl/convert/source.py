"""Whose configuration a file is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from verl.config.suggest import near_path
from verl.config.tree import GROUPS
from verl.convert.result import Converted
from verl.convert.script import ENTRY_POINTS, convert_script, convert_tree
from verl.convert.trl import KINDS, convert_trl, guess_kind
from verl.convert.trl_script import read_calls
from verl.errors import ConfigError


def convert_file(path: str | Path, *, kind: str | None = None, processes: int = 1) -> Converted:
    """Convert a file.

    Args:
        kind: which trainer a TRL file is for, where the file does not tell: a key of :data:`verl.convert.trl.KINDS`.
        processes: how many the configuration was run with: TRL's batch sizes are a process's share.

    Raises:
        ConfigError: the file cannot be read, or is nothing that is known here.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = near_path(file)
        raise ConfigError(f"there is no file {file}" + (f"; did you mean {near}?" if near else "")) from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder: name the file in it that holds the configuration") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text in UTF-8 ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--kind is '{kind}'; there are {', '.join(KINDS)}")
    if file.suffix == ".py":
        found, values = read_calls(text, file.name)
        return convert_trl(values, kind or found, file.name, processes)
    if file.suffix in (".sh", ".bash", "") or any(entry in text for entry in ENTRY_POINTS):
        return convert_script(text, file.name)
    if file.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{file.name}: a configuration is a .yaml, .json, .py or .sh file")
    return _convert_mapping(_parse(text, file), file.name, kind, processes)


def _parse(text: str, file: Path) -> dict[str, Any]:
    try:
        content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(_numbers(text))
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{file} holds no configuration: a mapping of keys was expected")
    return content


def _numbers(text: str) -> str:
    """YAML 1.1 reads 1e-6 as text; everybody who writes it means the number."""
    return re.sub(r"(:\s+-?\d+)(e[+-]?\d+\s*(?:#.*)?)$", r"\1.0\2", text, flags=re.M)


def _convert_mapping(content: dict[str, Any], name: str, kind: str | None, processes: int) -> Converted:
    groups = {group.split(".")[0] for group in GROUPS} | {"actor_rollout"}
    if kind is None and any(key in groups and isinstance(value, dict) for key, value in content.items()):
        return convert_tree(content, name)
    return convert_trl(content, kind or guess_kind(content, name), name, processes)
