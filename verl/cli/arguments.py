"""Options of the subcommands: dashes and underscores are the same, and a bad one is one sentence with exit code 2."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from verl.errors import ConfigError


class Arguments(argparse.ArgumentParser):
    """An argument parser that takes ``--model-path`` for ``--model_path``, and raises what is wrong as ConfigError."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_args(None if args is None else underscored(args), namespace)

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
