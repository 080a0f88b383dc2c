"""The ``verl`` command: a table of subcommands, each loaded when it is used."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl._version import __version__
from verl.cli import chinese
from verl.cli.next_steps import commands, last_run
from verl.cli.run import run_cli
from verl.errors import ConfigError
from verl.language import language


@dataclass(frozen=True)
class Command:
    """A subcommand. ``target`` is ``module:function``; the function takes the rest of the arguments."""

    usage: str
    summary: str
    target: str


COMMANDS = {
    "quickstart": Command("[options]", "watch a small real model learn arithmetic", "verl.trainer.quickstart:main"),
    "train": Command(
        "[ALGORITHM] key=value ...",
        "train: grpo, ppo, dpo, kto, sft, rm, ... (default ppo)",
        "verl.trainer.main_ppo:main",
    ),
    "plan": Command("key=value ...", "show the resolved configuration, run nothing", "verl.cli.plan:main"),
    "profile": Command("--steps N key=value ...", "train a few steps and trace them", "verl.cli.profile:main"),
    "report": Command("RUN [RUN ...]", "the page of a run, or one that compares runs", "verl.cli.report:main"),
    "dash": Command("[DIR]", "runs in the browser while they train", "verl.cli.dash:main"),
    "export": Command(
        "--model_path DIR --output_dir OUT", "write what was trained as a folder to serve", "verl.cli.export:main"
    ),
    "generate": Command("MODEL --prompt TEXT", "answer prompts with a model", "verl.cli.generate:main"),
    "chat": Command("MODEL", "talk to a model in the terminal", "verl.cli.chat:main"),
    "compare": Command("BASE TUNED --prompts FILE", "answers of two models side by side", "verl.cli.compare:main"),
    "serve": Command("MODEL", "serve a model to OpenAI clients", "verl.cli.serve:main"),
    "convert-config": Command(
        "FILE", "rewrite a TRL config or a verl script as a configuration of ours", "verl.cli.convert:main"
    ),
    "completion": Command("bash|zsh|fish", "print the shell's completion script", "verl.cli.completion:main"),
    "doctor": Command("", "what this machine can do, what is chosen, what is missing", "verl.cli.doctor:main"),
}

_START = """To begin:
  verl quickstart                 a small real model learns arithmetic in minutes
  verl doctor                     see what this machine will use, and why
  verl train data.train_files=train.parquet actor_rollout_ref.model.path=MODEL"""

_NEXT_LINES = {
    "report": "its page: curves, samples, configuration",
    "chat": "talk to the trained model",
    "compare": "its answers beside those of the model before",
    "export": "write it as a folder to serve",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``verl`` script. Returns the exit code."""
    return run_cli(_dispatch, sys.argv[1:] if argv is None else argv)


def _dispatch(argv: list[str]) -> int | None:
    spoken = language(argv, os.environ)
    if argv and argv[0].startswith("--lang"):
        argv = argv[1:] if "=" in argv[0] else argv[2:]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(spoken) if argv else _welcome(spoken))
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


def _help(spoken: str) -> str:
    summaries = {name: command.summary for name, command in COMMANDS.items()}
    usage, start, end = "usage: verl COMMAND ...", _START, "HYDRA_FULL_ERROR=1 shows tracebacks of user errors."
    if spoken == "zh":
        usage, start, end, summaries = chinese.USAGE, chinese.START, chinese.TRACEBACK, chinese.SUMMARIES
    width = max(len(f"{name} {command.usage}") for name, command in COMMANDS.items())
    rows = [f"  {f'{name} {command.usage}':<{width}}  {summaries[name]}" for name, command in COMMANDS.items()]
    listing = "\n".join(rows)
    return f"{usage}\n\n{listing}\n\n{start}\n\n{end}"


def _welcome(spoken: str) -> str:
    """What one can do next: with the last run of this folder, or to begin."""
    zh = spoken == "zh"
    parts = [f"verl {__version__}"]
    run = last_run(Path.cwd())
    if run is not None:
        head = (chinese.NEXT if zh else "The last run here: {run}\nNext:").format(run=run.folder)
        texts = chinese.NEXT_LINES if zh else _NEXT_LINES
        lines = [f"  {line}\n      {texts[name]}" for name, line in commands(run).items()]
        parts.append("\n".join([head, *lines]))
    parts += [chinese.START if zh else _START, chinese.ALL if zh else "`verl --help` lists all commands."]
    return "\n\n".join(parts)
