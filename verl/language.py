"""In which language to talk to a person: English, or Chinese where the locale or an option says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl.errors import ConfigError

LANGUAGES = ("en", "zh")
_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")  # in the order in which they win


def language(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Either "zh" or "en": what ``--lang`` says, else the locale of the environment.

    Raises:
        ConfigError: ``--lang`` names another one.
    """
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name == "--lang":
            value = value if equals else (argv[i + 1] if i + 1 < len(argv) else "")
            if value and value.lower()[:2] not in LANGUAGES:
                raise ConfigError(f"--lang is '{value}'; there are {' and '.join(LANGUAGES)}")
            return "zh" if value.lower().startswith("zh") else "en"
    set_to = next((environ[name] for name in _VARIABLES if environ.get(name)), "")
    return "zh" if set_to.lower().startswith("zh") else "en"
