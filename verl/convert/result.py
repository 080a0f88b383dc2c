"""What a conversion gives: values under our keys, and a word on everything that is not simply one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from verl.config.fields import nest
from verl.config.load import load_config
from verl.errors import ConfigError
from verl.notices import add_sink


@dataclass
class Converted:
    """A configuration of ours made from another.

    Attributes:
        source: what it was made from, for the heading.
        values: our key → value.
        comments: our key → where the value comes from, if that is worth a word.
        changed: lines on what was carried with another meaning, or has to be looked at.
        dropped: lines on what would change the training and could not be carried.
        unneeded: keys that change nothing here.
    """

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unneeded: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, comment: str | None = None) -> None:
        self.values[key] = value
        if comment:
            self.comments[key] = comment

    def yaml(self) -> str:
        """The file for ``verl train --config``: the values, with what was not carried as comments on top."""
        lines = [f"# Converted by verl from {self.source}"]
        for title, entries in (
            ("Not carried (training will differ):", self.dropped),
            ("Carried with a change, to be looked at:", self.changed),
            ("Not needed here:", [", ".join(self.unneeded)] if self.unneeded else []),
        ):
            if entries:
                lines += [f"# {title}", *(f"#   {entry}" for entry in entries)]
        return "\n".join([*lines, *self._tree()]) + "\n"

    def _tree(self) -> list[str]:
        text = yaml.safe_dump(nest(self.values), sort_keys=False, allow_unicode=True, width=10_000)
        wanted = dict(self.comments)
        lines: list[str] = []
        path: list[str] = []
        for line in text.splitlines():
            indent = (len(line) - len(line.lstrip())) // 2
            name, colon, _ = line.strip().partition(":")
            if colon and not line.lstrip().startswith("- "):
                path = [*path[:indent], name]
            comment = wanted.pop(".".join(path), None) if colon else None
            lines.append(f"{line}  # {comment}" if comment else line)
        return lines


def refusal(key: str, value: Any) -> str | None:
    """Why our option ``key`` does not take the value, or None."""
    remove = add_sink(lambda _: None)  # what a value brings with it is told when it is used
    try:
        load_config(values=nest({key: value}))
    except ConfigError as error:
        return error.problems[0]
    finally:
        remove()
    return None
