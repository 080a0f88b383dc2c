"""From what the user wrote to the declared type of an option."""

from __future__ import annotations

import os
import re
import types
import typing
from typing import Any

from verl.config.fields import Leaf
from verl.config.suggest import near_names

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}
_NULL = {"none", "null"}
_AUTO = "auto"  # the other way to say null to a switch that is decided for the user
_UNSET_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class Mismatch(Exception):
    """The value cannot be read as the wanted type; ``str()`` says what was wanted."""


def coerce(leaf: Leaf, value: Any, text: str | None = None) -> Any:
    """``value`` as the type of ``leaf``.

    Args:
        value: what a YAML file, a Python dict or the override grammar gave.
        text: how the value was spelled on the command line: text options take the spelling, so that
            ``experiment_name=007`` stays ``007``.

    Raises:
        Mismatch: with a sentence that names key, value and expected type.
        ConfigError: from the option's own reader (a dtype that does not exist).
    """
    if leaf.hint is Any:
        return _callable(leaf, value)
    try:
        result = _convert(value, leaf.hint, text)
    except Mismatch:
        what = "null" if value is None else f"{_shown(value)} ({type(value).__name__})"
        raise Mismatch(f"{leaf.key}={what}: expected {describe(leaf.hint)}") from None
    if leaf.about.path:
        result = _expand(leaf.key, result)
    if leaf.about.normalise is not None and result is not None:
        result = leaf.about.normalise(result)
    return result


def describe(hint: Any) -> str:
    """A type in words: ``int | None`` → "an integer or null"."""
    options = _options(hint)
    words = [_describe_one(option) for option in options if option is not type(None)]
    return " or ".join([*words, "null"] if type(None) in options else words)


def out_of_bounds(leaf: Leaf, value: Any) -> str | None:
    """What is wrong with a typed value, or None: the declared choices and bounds."""
    about, key = leaf.about, leaf.key
    if value is None:
        return None
    if about.choices is not None:
        for item in value if isinstance(value, list) else [value]:
            if item not in about.choices:
                hint = did_you_mean(item, about.choices)
                return f"{key}={item!r} does not exist{hint}; there are {', '.join(about.choices)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value != value:
            return f"{key} must be a number, got nan"
        for bound, bad, words in (
            (about.low, about.low is not None and value < about.low, "at least"),
            (about.high, about.high is not None and value > about.high, "at most"),
            (about.above, about.above is not None and value <= about.above, "greater than"),
            (about.below, about.below is not None and value >= about.below, "less than"),
        ):
            if bad:
                return f"{key} must be {words} {bound:g}, got {value}"
    return None


def did_you_mean(name: object, known: typing.Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` or nothing."""
    near = near_names(str(name), known, count=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _describe_one(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        return f"a list of {'texts' if inner is str else 'integers' if inner is int else 'numbers'}"
    if typing.get_origin(hint) is dict:
        return "a mapping"
    return _NAMES[hint]


def _convert(value: Any, hint: Any, text: str | None) -> Any:
    options = _options(hint)
    if value is None or (type(None) in options and isinstance(value, str) and value.lower() in _NULL):
        if type(None) in options:
            return None
        raise Mismatch
    if options == (bool, type(None)) and isinstance(value, str) and value.lower() == _AUTO:
        return None
    kinds = [option for option in options if option is not type(None)]
    # A list is never read as text, nor a text as a list, where an option takes both.
    if len(kinds) > 1:
        is_list = isinstance(value, (list, tuple))
        kinds = [kind for kind in kinds if (typing.get_origin(kind) is list) == is_list]
    return _convert_one(value, kinds[0], text)


def _convert_one(value: Any, kind: Any, text: str | None) -> Any:
    origin = typing.get_origin(kind)
    if origin is list:
        (inner,) = typing.get_args(kind)
        items = [value] if isinstance(value, str) and inner is str else value
        if not isinstance(items, (list, tuple)):
            raise Mismatch
        return [_convert_one(item, inner, None) for item in items]
    if origin is dict:
        if not isinstance(value, dict):
            raise Mismatch
        return {str(name): item for name, item in value.items()}
    return {int: _integer, float: _number, bool: _boolean, str: _text}[kind](value, text)


def _integer(value: Any, text: str | None) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _number(value, text)
    if number != number or number in (float("inf"), float("-inf")) or number != int(number):
        raise Mismatch
    return int(number)


def _number(value: Any, text: str | None) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Mismatch
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise Mismatch from None


def _boolean(value: Any, text: str | None) -> bool:
    word = str(value).lower() if isinstance(value, (bool, int, str)) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise Mismatch


def _text(value: Any, text: str | None) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (bool, int, float)):
        return text if text is not None else str(value).lower() if isinstance(value, bool) else str(value)
    if (type(value).__module__, type(value).__name__) == ("torch", "dtype"):  # known by name: torch stays out of here
        return str(value).removeprefix("torch.")
    raise Mismatch


def _callable(leaf: Leaf, value: Any) -> Any:
    if value is None or callable(value):
        return value
    raise Mismatch(
        f"{leaf.key}={_shown(value)}: expected a Python function; the key beside it that ends in path names a file"
    )


def _expand(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_expand(key, item) for item in value]
    if not isinstance(value, str):
        return value
    expanded = os.path.expanduser(os.path.expandvars(value))
    if unset := _UNSET_VARIABLE.search(expanded):
        raise Mismatch(f"{key}={value}: the environment variable {unset.group(1).strip('{}')} is not set")
    return expanded


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
