"""How a function reaches a worker process: by file, by import path, or pickled whole.

Import paths are preferred to pickles because the worker then runs the user's module as it stands on disk, and because
a pickle of a function drags its globals along. Functions of the main script are always pickled: a worker must never
run the main script a second time. Imported by worker processes: no torch here.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import cloudpickle

from verl.rewards.contract import RewardFunction
from verl.rewards.loading import read_function

MAX_PICKLE_BYTES = 64 * 2**20


class UnsendableError(Exception):
    """The function cannot go to another process; the text says why."""


def pack(function: RewardFunction) -> bytes:
    """The function with its kwargs as bytes for :func:`unpack`. Raises :class:`UnsendableError`."""
    try:
        packed = cloudpickle.dumps((_place(function), dict(function.kwargs)))
    except Exception as error:  # pickling runs code of any class that the function refers to
        raise UnsendableError(f"{type(error).__name__}: {error}") from error
    if len(packed) > MAX_PICKLE_BYTES:
        raise UnsendableError(f"with what it refers to it has {len(packed) / 2**20:.0f} MiB")
    return packed


def unpack(packed: bytes) -> Callable[..., Any]:
    """The function that :func:`pack` sent, with its kwargs bound."""
    (kind, where, name), kwargs = pickle.loads(packed)
    if kind == "file":
        fn = read_function(where, name)
    elif kind == "module":
        fn = _reach(importlib.import_module(where), name)
    else:
        fn = pickle.loads(where)
    return functools.partial(fn, **kwargs) if kwargs else fn


def _place(function: RewardFunction) -> tuple[str, str | bytes, str]:
    fn = function.fn
    if function.origin is not None:
        return ("file", *function.origin)
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return ("pickle", cloudpickle.dumps(fn), "")
    if not _on_disk(module):
        # Made at run time: another process could not import it, so what it defines travels by value.
        cloudpickle.register_pickle_by_value(module)
        try:
            return ("pickle", cloudpickle.dumps(fn), "")
        finally:
            cloudpickle.unregister_pickle_by_value(module)
    name = getattr(fn, "__qualname__", "<no name>")
    if "<" not in name and _reach(module, name) is fn:
        return ("module", module.__name__, name)
    return ("pickle", cloudpickle.dumps(fn), "")


def _on_disk(module: ModuleType) -> bool:
    """Whether another process with this import path finds this module under its name."""
    parent = module.__name__.rpartition(".")[0]
    found = PathFinder.find_spec(module.__name__, sys.modules[parent].__path__ if parent else None)
    return found is not None and module.__spec__ is not None and found.origin == module.__spec__.origin


def _reach(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
