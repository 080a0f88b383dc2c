"""The ``verl`` command: a table of subcommands, each loaded when it is used."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl._version import __version__
from verl.cli.run import run_cli
from verl.errors import ConfigError


@dataclass(frozen=True)
class Command:
    """A subcommand. ``target`` is ``module:function``; the function takes the rest of the arguments."""

    usage: str
    summary: str
    target: str


COMMANDS = {
    "quickstart": Command("[options]", "watch a small real model learn arithmetic", "verl.trainer.quickstart:main"),
    "train": Command("key=value ...", "train with PPO, GRPO and their kin", "verl.trainer.main_ppo:main"),
    "plan": Command("key=value ...", "show the resolved configuration, run nothing", "verl.cli.plan:main"),
    "report": Command("RUN_DIR", "write the run's report.html again", "verl.cli.report:main"),
    "doctor": Command("", "what this machine can do, what is chosen, what is missing", "verl.cli.doctor:main"),
}

_START = """To begin:
  verl quickstart                 a small real model learns arithmetic in minutes
  verl doctor                     see what this machine will use, and why
  verl train data.train_files=train.parquet actor_rollout_ref.model.path=MODEL"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``verl`` script. Returns the exit code."""
    return run_cli(_dispatch, sys.argv[1:] if argv is None else argv)


def _dispatch(argv: list[str]) -> int | None:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help() if argv else f"verl {__version__}\n\n{_START}\n\n`verl --help` lists all commands.")
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(f"verl {__version__}")
        return 0
    return _load(argv[0])(argv[1:])


def _load(name: str) -> Callable[[list[str]], int | None]:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `verl {near[0]}`?" if near else f"there are {', '.join(COMMANDS)}"
        if "=" in name:
            hint = f"to train with it, write `verl train {name} ...`"
        raise ConfigError(f"there is no command '{name}'; {hint}")
    module, _, function = COMMANDS[name].target.partition(":")
    return getattr(importlib.import_module(module), function)


def _help() -> str:
    width = max(len(f"{name} {command.usage}") for name, command in COMMANDS.items())
    rows = [f"  {f'{name} {command.usage}':<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    listing = "\n".join(rows)
    return f"usage: verl COMMAND ...\n\n{listing}\n\n{_START}\n\nHYDRA_FULL_ERROR=1 shows tracebacks of user errors."
