"""A user's own dataset class from a Python file (``data.custom_cls``)."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from verl.data.collate import PADDED_FORMS
from verl.data.locate import missing_file_message
from verl.data.rows import Row
from verl.data.schemas import Layout, prompt_row
from verl.data.settings import PromptSettings
from verl.data.templating import PromptTemplate, truncate
from verl.errors import DataError


def load_dataset_class(path: str, name: str | None) -> type:
    """The class ``name`` of the file ``path``. Every way this can fail is one :class:`~verl.errors.DataError`."""
    if not name:
        raise DataError(f"data.custom_cls.path={path} is set: set data.custom_cls.name to the class in it, too")
    module = _load_module(Path(os.path.expandvars(path)).expanduser())
    classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
    if name not in classes:
        near = difflib.get_close_matches(name, classes, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its classes are {', '.join(classes) or '(none)'}"
        raise DataError(f"{path} has no class '{name}' (data.custom_cls.name): {hint}")
    return classes[name]


def _load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise DataError(f"data.custom_cls.path: {missing_file_message(path)}")
    module_name = f"verl_custom_dataset_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise DataError(f"data.custom_cls.path={path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise DataError(f"{path}, line {error.lineno}: {error.msg} (data.custom_cls.path)") from error
    except Exception as error:  # whatever the user's own file raises while it is read
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        raise DataError(f"{path} fails when imported (line {line}): {type(error).__name__}: {error}") from error
    return module


LOOKED_AT = 16
"""So many items at the beginning tell which columns there are; a later item without one of them has None there."""


class CustomDataset:
    """The prompt rows of a user's dataset: whatever its items lack is filled in.

    An item is a dict with the token ids of the prompt (``prompt_ids`` or ``raw_prompt_ids``), or with the prompt
    itself (``raw_prompt`` or ``data.prompt_key``: messages or text), which is then templated and cut as usual.
    """

    def __init__(self, inner: Any, template: PromptTemplate, settings: PromptSettings):
        self.inner = inner
        self.template = template
        self.settings = settings

    @cached_property
    def _names(self) -> list[str]:
        first = range(min(len(self), LOOKED_AT))
        return list(dict.fromkeys(name for position in first for name in self._item(position)))

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, position: int) -> Row:
        return {**dict.fromkeys(self._names), **self._item(position)}

    def _item(self, position: int) -> Row:
        where = f"{type(self.inner).__name__}, item {position}"
        item = self.inner[position]
        if not isinstance(item, Mapping):
            raise DataError(f"{where}: an item must be a dict, got {type(item).__name__}")
        row = {name: value for name, value in item.items() if name not in PADDED_FORMS}
        ids = row.pop("prompt_ids", row.pop("raw_prompt_ids", None))
        index = row.pop("index", position)
        key = self.settings.prompt_key
        if "raw_prompt" in row:
            row[key] = row.pop("raw_prompt")
        if key not in row:
            raise DataError(f"{where}: no raw_prompt and no '{key}' (data.prompt_key); it has {', '.join(row)}")
        complete = prompt_row(
            row,
            Layout.PROMPT,
            where,
            prompt_key=key,
            answer_key=self.settings.answer_key,
            source_key=self.settings.reward_fn_key,
            default_source=f"local/{type(self.inner).__name__}",
        )
        if ids is None:
            ids = self.template.encode(complete["raw_prompt"])
        return {**complete, "prompt_ids": self._cut(np.asarray(ids, dtype=np.int64), where), "index": index}

    def _cut(self, ids: np.ndarray, where: str) -> np.ndarray:
        limit, how = self.settings.max_prompt_length, self.settings.truncation
        if ids.ndim != 1 or not len(ids):
            raise DataError(f"{where}: prompt ids must be a list of at least one token, got shape {ids.shape}")
        if len(ids) > limit and how == "error":
            raise DataError(
                f"{where}: prompt length {len(ids)} > max_prompt_length {limit}. Raise data.max_prompt_length or cut "
                "with data.truncation=left|right|middle"
            )
        return truncate(ids, limit, how)
