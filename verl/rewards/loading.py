"""Loading a user's reward function from a Python file. Imported by worker processes: no torch here."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.errors import RewardError
from verl.rewards.contract import RewardFunction, inspect_function


def load_reward_function(
    path: str | os.PathLike[str], name: str = "compute_score", reward_kwargs: Mapping[str, Any] | None = None
) -> RewardFunction:
    """The function ``name`` of the file ``path``, inspected, with ``reward_kwargs`` bound.

    Raises :class:`RewardError` for a missing file (naming the nearest one), a syntax error (file and line), a file that
    fails while it runs, a name that is not in it (listing what is), or an unusable signature.
    """
    file = _resolve(path)
    fn = read_function(str(file), name)
    return inspect_function(fn, reward_kwargs, origin=(str(file), name))


def read_function(file: str, name: str) -> Callable[..., Any]:
    """Run the file as a module of its own and return what it calls ``name`` (dots reach into classes)."""
    module = load_module(file)
    value: Any = module
    for part in name.split("."):
        if part not in vars(value):
            there = sorted(
                k for k, v in vars(value).items() if inspect.isfunction(v) and v.__module__ == module.__name__
            )
            near = difflib.get_close_matches(part, there, n=1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise RewardError(f"reward file {file} has no '{name}'{hint}: it defines {', '.join(there) or 'nothing'}")
        value = vars(value)[part]
    return value


def load_module(file: str) -> ModuleType:
    """Import ``file`` under a name made of its path, anew at each call."""
    stem = Path(file).stem
    name = f"verl_user_{stem}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file, loader=None)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward file {file} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = f"{error.filename or file}, line {error.lineno}"
        raise RewardError(f"reward file {where}: {error.msg}: {(error.text or '').strip()}") from None
    except (Exception, SystemExit) as error:  # a script that ends itself would end the run without a word
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        where = f"{file}, line {frames[-1].lineno}" if frames else file
        raise RewardError(f"reward file {where}: {type(error).__name__} while loading it: {error}") from error
    return module


def _resolve(path: str | os.PathLike[str]) -> Path:
    file = Path(os.path.expandvars(os.path.expanduser(os.fspath(path)))).absolute()
    if file.is_file():
        return file
    if file.is_dir():
        raise RewardError(f"custom_reward_function.path is the folder {file}: name a Python file in it")
    folder = file.parent
    while not folder.is_dir():
        folder = folder.parent
    if folder != file.parent:
        raise RewardError(f"reward file {file} does not exist: of its folders only {folder} is there")
    names = sorted(p.name for p in folder.iterdir() if p.suffix == ".py")
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.4)
    hint = f"did you mean {folder / near[0]}?" if near else f"the Python files there are {', '.join(names) or 'none'}"
    raise RewardError(f"reward file {file} does not exist: {hint}")
