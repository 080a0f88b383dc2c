"""Errors for people: what is wrong, where, and what to do about it.

Every mistake a user can make raises a subclass of :class:`VerlError`; the command line prints its one
sentence and exits with its code, mostly 2. ``assert`` is kept for our own invariants.
"""

from __future__ import annotations


class VerlError(Exception):
    """Base of everything that a user can put right. ``str(error)`` is the whole message."""

    exit_code = 2
    """Of a command that ends with it."""


class ConfigError(VerlError, ValueError):
    """A configuration value or key is wrong. ``problems`` lists every one that was found."""

    def __init__(self, problems: str | list[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(
            self.problems[0]
            if len(self.problems) == 1
            else f"{len(self.problems)} problems in the configuration:\n" + "\n".join(f"  - {p}" for p in self.problems)
        )


class DataError(VerlError, ValueError):
    """A data file, row or column is wrong."""


class ModelError(VerlError, ValueError):
    """A model or tokenizer cannot be loaded or used."""


class RewardError(VerlError, ValueError):
    """A reward function cannot be loaded, returned something unusable, or failed on every row."""


class DataflowError(VerlError, ValueError):
    """A dataflow graph is inconsistent, or a node broke its contract."""


class CrashError(VerlError):
    """Code raised something that is no message for people; ``__cause__`` is the original, with its traceback."""


class RolloutError(VerlError, RuntimeError):
    """A rollout engine cannot do what was asked."""


class TrainingError(VerlError, RuntimeError):
    """Training cannot go on (non-finite gradients in a row, out of memory for a single sequence...)."""


class WorkerDiedError(VerlError, RuntimeError):
    """The process of a rank ended by itself or was killed; ``rank`` and ``host`` say which (None: not known)."""

    exit_code = 1

    def __init__(self, message: str, *, rank: int | None = None, host: str | None = None):
        super().__init__(message)
        self.rank = rank
        self.host = host


class CheckpointError(VerlError, RuntimeError):
    """A checkpoint cannot be written or read."""


class MissingDependencyError(VerlError, ImportError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, purpose: str, install: str | None = None):
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed: pip install {install or package}"
        )
        self.package = package
