"""A configuration object as plain data: nested, flattened to dotted keys, and without secrets."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from omegaconf import DictConfig, ListConfig, OmegaConf

_SECRET_KEY = re.compile(
    r"(^|[_-])(api_?key|password|passwd|secret|secret_key|access_key|(access|auth|hf|bearer)_token)$", re.I
)
_SECRET_URL = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
HIDDEN = "***"


def plain_config(config: Any) -> dict[str, Any]:
    """A mapping, dataclass tree or OmegaConf as nested dicts, lists and scalars; secrets are replaced by ``***``.

    A run folder is made to be shown to others, so values of keys such as ``api_key`` or ``hf_token`` never enter it.
    """
    value = _plain(config, "")
    if not isinstance(value, dict):
        raise TypeError(f"a configuration is a mapping or a dataclass, not {type(config).__name__}")
    return value


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value, resolve=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(name): _plain(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, key) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if _SECRET_KEY.search(key) and value != "":
        return HIDDEN
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else _callable_name(value)
    return hide_secrets(str(value))


def _callable_name(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', '')}.{name}".lstrip(".")


def hide_secrets(text: str) -> str:
    """``text`` with the password of a ``scheme://user:password@host`` address hidden."""
    return _SECRET_URL.sub(HIDDEN, text)


def hide_in_argument(argument: str) -> str:
    """One command-line argument (``key=value`` or other) with a secret value hidden."""
    key, sign, _ = argument.partition("=")
    if sign and _SECRET_KEY.search(key.rsplit(".", 1)[-1].lstrip("+~-")):
        return f"{key}={HIDDEN}"
    return hide_secrets(argument)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys; lists stay values, an empty dict stays ``{}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def config_value(config: Mapping[str, Any], *keys: str) -> Any:
    """The first of several dotted keys that is present and not None, or None."""
    flat = flatten(config)
    return next((flat[key] for key in keys if flat.get(key) is not None), None)
