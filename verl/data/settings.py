"""The ``data.*`` keys that decide what a prompt dataset does."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config.tree.data import Data
from verl.data.messages import plain
from verl.data.templating import TemplateMode
from verl.errors import ConfigError

TRUNCATIONS = ("error", "left", "right", "middle")
_KEPT = {"keep_start": "right", "keep_end": "left"}  # other words for the same
_TEMPLATE_MODES: dict[str | bool, TemplateMode] = {
    "auto": "auto",
    "true": True,
    "false": False,
    True: True,
    False: False,
}

# Keys of verl's configuration that a script may still hand to a dataset; nothing here reads them.
_PUBLIC_ELSEWHERE = frozenset(
    {"return_raw_chat", "return_raw_input_ids", "return_full_prompt", "dataloader_num_workers", "use_shm"}
    | {
        "filter_overlong_prompts_workers",
        "image_key",
        "video_key",
        "audio_key",
        "tool_config_path",
        "trust_remote_code",
    }
)


@dataclass(frozen=True)
class PromptSettings:
    """Names and defaults are those of ``data.*``; ``custom_chat_template`` is the model's key of that name."""

    prompt_key: str = "prompt"
    answer_key: str | None = None
    reward_fn_key: str = "data_source"
    max_prompt_length: int = 512
    max_response_length: int = 512
    truncation: str = "error"
    filter_overlong_prompts: bool = False
    apply_chat_template: str | bool = "auto"
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    custom_chat_template: str | None = None
    shuffle: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.truncation not in TRUNCATIONS:
            problems.append(f"data.truncation={self.truncation!r}: use one of {', '.join(TRUNCATIONS)}")
        for name in ("max_prompt_length", "max_response_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"data.{name}={value!r}: must be a whole number of tokens, at least 1")
        if not isinstance(self.apply_chat_template, str | bool) or self.apply_chat_template not in _TEMPLATE_MODES:
            problems.append(f"data.apply_chat_template={self.apply_chat_template!r}: use auto, true or false")
        if problems:
            raise ConfigError(problems)

    @property
    def template_mode(self) -> TemplateMode:
        return _TEMPLATE_MODES[self.apply_chat_template]

    @classmethod
    def from_config(cls, config: Any = None, **overrides: Any) -> PromptSettings:
        """Read a mapping (dict, OmegaConf), a dataclass or nothing; ``overrides`` win. Unknown names are errors."""
        given: dict[str, Any]
        if config is None:
            given = {}
        elif isinstance(config, PromptSettings):
            given = vars(config).copy()
        elif isinstance(config, Mapping):
            given = {str(key): config[key] for key in config}
            _refuse_unknown(given)
        elif dataclasses.is_dataclass(config):
            given = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
        else:
            raise ConfigError(f"the data configuration is a dict or a dataclass, got {type(config).__name__}")
        _refuse_unknown(overrides)
        names = {item.name for item in dataclasses.fields(cls)}
        values = {key: plain(value) for key, value in {**given, **overrides}.items() if key in names}
        if values.get("apply_chat_template_kwargs") is None:
            values.pop("apply_chat_template_kwargs", None)
        if isinstance(values.get("truncation"), str):
            values["truncation"] = _KEPT.get(values["truncation"], values["truncation"])
        return cls(**values)


def _refuse_unknown(keys: Mapping[str, Any]) -> None:
    ours = dataclasses.fields(PromptSettings) + dataclasses.fields(Data)
    known = {item.name for item in ours} | _PUBLIC_ELSEWHERE
    problems = []
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            problems.append(f"unknown key data.{key}" + (f": did you mean {near[0]}?" if near else ""))
    if problems:
        raise ConfigError(problems)
