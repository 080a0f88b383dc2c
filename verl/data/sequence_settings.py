"""The ``data.*`` keys that decide what a dataset of texts to learn from does (SFT, preferences, labelled answers)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config.tree.data import Data
from verl.data.messages import plain
from verl.data.settings import _TEMPLATE_MODES
from verl.data.templating import TemplateMode
from verl.errors import ConfigError

# verl's words for SFT, and TRL's, mean the same.
_TRUNCATIONS = {
    "error": "error",
    "right": "keep_start",
    "keep_start": "keep_start",
    "left": "keep_end",
    "keep_end": "keep_end",
}


@dataclass(frozen=True)
class SequenceSettings:
    """Settings of `SFTDataset`, `PreferenceDataset` and `UnpairedDataset`.

    Attributes:
        max_length: most tokens of prompt and response together.
        truncation: what happens to longer rows: "error", "keep_start" (also "right") or "keep_end" (also "left").
        on_bad_row: "error" stops at the first row that cannot be used, "drop" leaves such rows out and counts them.
        prompt_key, response_key, messages_key, tools_key, text_key: columns; a null response_key: found by name.
        apply_chat_template, apply_chat_template_kwargs, custom_chat_template, shuffle, seed: as for prompts.
    """

    max_length: int = 1024
    truncation: str = "error"
    on_bad_row: str = "error"
    prompt_key: str = "prompt"
    response_key: str | None = None
    messages_key: str = "messages"
    tools_key: str = "tools"
    text_key: str = "text"
    apply_chat_template: str | bool = "auto"
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    custom_chat_template: str | None = None
    shuffle: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.max_length, int) or isinstance(self.max_length, bool) or self.max_length < 2:
            problems.append(f"data.max_length={self.max_length!r}: must be a whole number of tokens, at least 2")
        if self.truncation not in _TRUNCATIONS:
            problems.append(f"data.truncation={self.truncation!r}: use error, keep_start (right) or keep_end (left)")
        if self.on_bad_row not in ("error", "drop"):
            problems.append(f"data.on_bad_row={self.on_bad_row!r}: use error or drop")
        if not isinstance(self.apply_chat_template, str | bool) or self.apply_chat_template not in _TEMPLATE_MODES:
            problems.append(f"data.apply_chat_template={self.apply_chat_template!r}: use auto, true or false")
        if problems:
            raise ConfigError(problems)

    @property
    def cut(self) -> str:
        """ "error", "keep_start" or "keep_end"."""
        return _TRUNCATIONS[self.truncation]

    @property
    def template_mode(self) -> TemplateMode:
        return _TEMPLATE_MODES[self.apply_chat_template]

    @classmethod
    def from_config(cls, config: Any = None, **overrides: Any) -> SequenceSettings:
        """Read a mapping (dict, OmegaConf), a dataclass or nothing; ``overrides`` win. Unknown names are errors.

        ``truncation_mode``, TRL's name of ``truncation``, is accepted.
        """
        names = [item.name for item in dataclasses.fields(cls)]
        known = {*names, "truncation_mode", *(item.name for item in dataclasses.fields(Data))}
        given: dict[str, Any] = {}
        if isinstance(config, Mapping):
            given = {str(key): config[key] for key in config}
        elif dataclasses.is_dataclass(config):
            given = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
        elif config is not None:
            raise ConfigError(f"the data configuration is a dict or a dataclass, got {type(config).__name__}")
        values = {**given, **overrides}
        problems = []
        for key in sorted(set(overrides if dataclasses.is_dataclass(config) else values) - known):
            near = difflib.get_close_matches(key, sorted(known), n=1)
            problems.append(f"unknown key data.{key}" + (f": did you mean {near[0]}?" if near else ""))
        if "truncation_mode" in values:
            mode = values.pop("truncation_mode")
            if values.setdefault("truncation", mode) != mode:
                problems.append(f"data.truncation={values['truncation']!r} and data.truncation_mode={mode!r} differ")
        if problems:
            raise ConfigError(problems)
        values = {key: plain(value) for key, value in values.items() if key in names}
        if values.get("apply_chat_template_kwargs") is None:
            values.pop("apply_chat_template_kwargs", None)
        return cls(**values)
