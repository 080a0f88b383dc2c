"""A configuration as text: what ``--cfg job``, ``verl plan`` and the run's record show."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from verl.config.fields import get, tree_fields
from verl.config.tree import GROUPS, LEAVES, Config
from verl.errors import ConfigError


def flatten(config: Config) -> dict[str, Any]:
    """Every option by its dotted key, with its value as it is."""
    return {key: get(config, key) for key in LEAVES}


def to_dict(config: Any) -> dict[str, Any]:
    """The tree, or a part of it, as nested dicts; a Python function becomes its name."""
    return {item.name: _plain(getattr(config, item.name)) for item in tree_fields(config)}


def to_yaml(config: Any) -> str:
    """The tree, or a part of it, as YAML that :func:`verl.config.load_config` reads back to the same values.

    A Python function is written as null with its name beside it: only Python can give it again.
    """
    import yaml

    functions: dict[str, str] = {}
    content = _without_functions(to_dict(config), config, functions)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)
    for name, function in functions.items():
        text = text.replace(f"{name}: null\n", f"{name}: null  # the Python function {function}\n", 1)
    return text


def job(config: Config, package: str | None = None) -> str:
    """What ``--cfg job`` prints; ``package`` (``--package``) limits it to a group or a single option.

    Raises:
        ConfigError: there is no such group or option.
    """
    if package is None:
        return to_yaml(config)
    if package in GROUPS:
        return to_yaml(get(config, package))
    if package in LEAVES:
        return f"{_plain(get(config, package))}\n"
    raise ConfigError(f"'{package}' is neither a group nor an option of the configuration; docs/config.md lists them")


def changed(config: Config) -> dict[str, Any]:
    """The options whose value is not the default, by dotted key."""
    return {key: value for key, value in flatten(config).items() if value != LEAVES[key].default}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        return _function_name(value)
    return str(value)


def _function_name(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{name}"


def _without_functions(content: dict[str, Any], node: Any, functions: dict[str, str]) -> dict[str, Any]:
    for name, value in content.items():
        original = getattr(node, name)
        if is_dataclass(original):
            _without_functions(value, original, functions)
        elif callable(original):
            functions[name], content[name] = value, None
    return content
