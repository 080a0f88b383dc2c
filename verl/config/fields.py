"""How an option is declared, and how the tree of options is walked.

An option is a dataclass field made by :func:`option`: default, one line of documentation, bounds. Everything else
(coercion, validation, the reference page, printing) reads this one declaration.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any

SAME: Any = object()
"""Stands for "the same default as ByteDance's verl"."""


@dataclass(frozen=True)
class Option:
    """What is known about one leaf of the tree.

    Attributes:
        doc: one or two sentences: meaning, unit, what ``null`` means, why the default deviates.
        choices: the names it may have, or None.
        low, high: bounds of a number; ``above`` and ``below`` are the exclusive ones.
        path: the text is a file or folder: ``~`` and ``$NAME`` are expanded.
        normalise: applied to a non-null value after its type was checked.
        verl: the other default, where ours deviates.
    """

    doc: str
    choices: tuple[str, ...] | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    path: bool = False
    normalise: Callable[[Any], Any] | None = None
    verl: Any = SAME


def option(default: Any, doc: str, **about: Any) -> Any:
    """Declare a leaf. A list or dict default is copied for each config. ``about`` are the fields of :class:`Option`."""
    metadata = {"option": Option(doc, **about)}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(kind: Callable[[], Any], doc: str) -> Any:
    """Declare a group of options: a nested dataclass with its own defaults."""
    return field(default_factory=kind, metadata={"group": doc})


@dataclass(frozen=True)
class Leaf:
    """One option in its place: dotted ``key``, resolved type ``hint``, ``default`` and its :class:`Option`."""

    key: str
    hint: Any
    default: Any
    about: Option

    @property
    def nullable(self) -> bool:
        return type(None) in typing.get_args(self.hint) or self.hint is Any

    @property
    def is_mapping(self) -> bool:
        return typing.get_origin(self.hint) is dict


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def tree_fields(node: Any) -> list[Field]:
    """The fields of a node that belong to the tree (the record of explicit keys does not)."""
    return [item for item in fields(node) if "option" in item.metadata or "group" in item.metadata]


def walk(kind: type, prefix: str = "") -> Iterator[Leaf]:
    """Every leaf under a dataclass type, in order of declaration."""
    for item in tree_fields(kind):
        hint, key = _hints(kind)[item.name], f"{prefix}{item.name}"
        if is_dataclass(hint):
            yield from walk(hint, f"{key}.")
        else:
            default = item.default if item.default_factory is MISSING else item.default_factory()
            yield Leaf(key, hint, default, item.metadata["option"])


def groups(kind: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every group under a dataclass type: its dotted key and what it is."""
    for item in tree_fields(kind):
        hint, key = _hints(kind)[item.name], f"{prefix}{item.name}"
        if is_dataclass(hint):
            yield key, item.metadata["group"]
            yield from groups(hint, f"{key}.")


def get(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def put(config: Any, key: str, value: Any) -> None:
    """Set the value at a dotted key."""
    *parents, name = key.split(".")
    setattr(get(config, ".".join(parents)) if parents else config, name, value)


def copy_tree(node: Any) -> Any:
    """A copy with its own nodes, lists and dicts; callables and other values are shared, never copied."""
    if is_dataclass(node) and not isinstance(node, type):
        return type(node)(**{item.name: copy_tree(getattr(node, item.name)) for item in fields(node)})
    if type(node) is list:
        return [copy_tree(value) for value in node]
    if type(node) is dict:
        return {name: copy_tree(value) for name, value in node.items()}
    return node


def nest(flat: dict[str, Any], skip: Collection[str] = ()) -> dict[str, Any]:
    """``{"a.b": 1}`` → ``{"a": {"b": 1}}``. A later key replaces a plain value that stands in its way."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        if key in skip:
            continue
        *parents, name = key.split(".")
        node = nested
        for part in parents:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[name] = value
    return nested
