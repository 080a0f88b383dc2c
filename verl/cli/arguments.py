"""Options of the subcommands: dashes and underscores are the same, and a bad one is one sentence with exit code 2."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NoReturn

from verl.errors import ConfigError


class Arguments(argparse.ArgumentParser):
    """An argument parser that takes ``--model-path`` for ``--model_path``, and raises what is wrong as ConfigError."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_args(None if args is None else underscored(args), namespace)

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_intermixed_args(None if args is None else underscored(args), namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; `{self.prog} --help` lists the options")


def underscored(argv: list[str]) -> list[str]:
    """Options with underscores in their names, whatever dashes they were typed with; values are left alone."""
    result, options = [], True
    for argument in argv:
        options = options and argument != "--"
        if options and argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            argument = f"--{name.replace('-', '_')}{equals}{value}"
        result.append(argument)
    return result


def count(text: str) -> int:
    """A whole number from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1")
    return value


def port(text: str) -> int:
    """A TCP port; 0 is any that is free."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port; there are 0 (any that is free) to 65535")
    return value


def finite(text: str) -> float:
    """A number that is neither NaN nor infinite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number")
    return value


def output_file(path: str | Path) -> Path:
    """A file to write, its folder made: to be asked for before the work that it is to hold.

    Raises:
        ConfigError: a folder is there, or its own folder cannot be.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ConfigError(f"--output {path} is a folder: name a file in it, such as {file / 'out'}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"--output {path}: {error.filename} is a file, so nothing can be written below it") from error
    return file
