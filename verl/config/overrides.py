"""Hydra's override grammar: ``key=value``, ``+key``, ``++key``, ``~key``, quotes, lists, mappings.

``+`` and ``++`` mean the same as nothing here: which keys exist does not depend on a file, so there is nothing to add.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.fields import Leaf
from verl.errors import ConfigError
from verl.notices import notice

PRESET, FILE, VALUES, OVERRIDES = range(4)
"""Layers, weakest first."""

_PATH_VALUE = re.compile(r"[+]{0,2}(?P<key>[\w.]+)=(?P<path>(~|\.{0,2}/|\$).*)")


@dataclass(frozen=True)
class Setting:
    """One value for one key.

    Attributes:
        key: dotted path, as spelled by the user.
        value: any plain value; a Python function in a dict.
        layer: where it came from; a stronger layer wins whatever the spelling.
        text: its spelling on the command line.
        delete: ``~key``: forget what was set before.
        weak: comes from a key that stands for several others, so it gives way to a direct one.
        source: the spelling it was derived from, for messages.
    """

    key: str
    value: Any
    layer: int
    text: str | None = None
    delete: bool = False
    weak: bool = False
    source: str | None = None


def parse_overrides(overrides: Iterable[str]) -> tuple[list[Setting], list[str]]:
    """Command-line overrides as settings, and a sentence for each that cannot be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    settings: list[Setting] = []
    problems: list[str] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            # The grammar has no word for ~, spaces or brackets in a path, and shells do not expand key=~/x.
            if found := _PATH_VALUE.fullmatch(text):
                settings.append(Setting(found["key"], found["path"], OVERRIDES, found["path"]))
            else:
                problems.append(_unreadable(text, error))
            continue
        if override.is_sweep_override():
            problems.append(
                f"override '{text}' gives several values (a sweep), and one run takes one: "
                "start a run for each value, or write a list as key=[a,b]"
            )
        elif "/" in override.key_or_group or override.package is not None:
            problems.append(
                f"override '{text}' chooses a config group, and there are none here: set the keys themselves"
            )
        else:
            settings.extend(_settings(override, text))
    return settings, problems


def _settings(override: Any, text: str) -> list[Setting]:
    key = override.key_or_group
    if override.is_delete():
        spelled = text.partition("=")[2] if "=" in text else None
        return [Setting(key, override.value() if spelled is not None else None, OVERRIDES, spelled, delete=True)]
    spelled = text.partition("=")[2].strip()
    return [
        Setting(found, value, OVERRIDES, spelled if found == key else None)
        for found, value in spread(override.value(), key)
    ]


def _unreadable(text: str, error: Exception) -> str:
    if "=" not in text:
        return f"override '{text}' cannot be read: expected key=value (or ~key to go back to the default)"
    key, _, value = text.partition("=")
    reason = str(error).splitlines()[0].rstrip(".")
    quoted = value.replace("'", "\\'")
    advice = f"put a value with special characters in quotes, \"{key}='{quoted}'\""
    return f"override '{text}' cannot be read ({reason}): {advice}"


def spread(value: Any, key: str = "", leaves: Mapping[str, Leaf] | None = None) -> list[tuple[str, Any]]:
    """A nested mapping as (dotted key, value) pairs; an option that is itself a mapping stays whole."""
    if leaves is None:
        from verl.config.tree import LEAVES as leaves
    if not isinstance(value, Mapping) or (key in leaves and leaves[key].is_mapping) or (not value and key):
        return [(key, value)]
    return [
        pair for name, item in value.items() for pair in spread(item, f"{key}.{name}" if key else str(name), leaves)
    ]


def last_of_each(settings: Iterable[Setting]) -> list[Setting]:
    """Of a key that is given again the last value, as Hydra takes it, with a notice of both; mappings are merged later.

    ``~key`` takes back what was said of it, so that giving it again after that is no surprise.
    """
    kept: list[Setting] = []
    latest: dict[str, Setting] = {}
    said: dict[str, str] = {}
    for setting in settings:
        if setting.delete:
            latest, said = (
                {key: value for key, value in known.items() if not f"{key}.".startswith(f"{setting.key}.")}
                for known in (latest, said)
            )
        else:
            _tell_of_repeats(setting, said)
            before = latest.get(setting.key)
            if before is not None and not isinstance(before.value, Mapping):
                kept = [s for s in kept if s is not before]
            latest[setting.key] = setting
        kept.append(setting)
    return kept


def _tell_of_repeats(setting: Setting, said: dict[str, str]) -> None:
    for key, value in spread(setting.value, setting.key, {}):
        now = str(value) if setting.text is None or key != setting.key else setting.text
        before = said.get(key, now)
        if before != now:
            notice(f"{key} is given twice, as {before} and as {now}: the last one counts, {now}")
        said[key] = now


ALGORITHM_KEYS = ("algorithm.name", "algorithm", "preset")


def algorithm_given(arguments: Iterable[str]) -> tuple[str, Any] | None:
    """The last override that names an algorithm, as (key, name); None where none does."""
    pairs = [text for text in arguments if "=" in text]
    named = [text for text in pairs if text.lstrip("+").partition("=")[0].strip() in ALGORITHM_KEYS]
    found = [setting for setting in parse_overrides(named)[0] if setting.key in ALGORITHM_KEYS]
    return (found[-1].key, found[-1].value) if found else None


def with_algorithm(arguments: Iterable[str]) -> list[str]:
    """Overrides in which a bare word, such as ``dpo``, is ``algorithm.name=dpo``.

    Raises:
        ConfigError: there are two words, or an override names another algorithm.
    """
    arguments = list(arguments)
    words = [text for text in arguments if "=" not in text and not text.startswith("~")]
    if not words:
        return arguments
    given = algorithm_given(arguments)
    others = [word for word in words if word != words[0]]
    if given is not None and given[1] != words[0]:
        others.append(f"{given[0]}={given[1]}")
    if others:
        raise ConfigError(f"'{words[0]}' and '{others[0]}' name two algorithms: give one of them")
    return [f"algorithm.name={text}" if text in words else text for text in arguments]
