"""Where metrics go, by name: the values of ``trainer.logger``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from verl.errors import ConfigError
from verl.tracking.loggers.base import Console, Logger, RunInfo


def _tensorboard(info: RunInfo) -> Logger:
    from verl.tracking.loggers.tensorboard import TensorboardLogger

    return TensorboardLogger(info)


def _file(info: RunInfo) -> Logger:
    from verl.tracking.loggers.files import FileLogger

    return FileLogger(info)


def _hosted(class_name: str) -> Callable[[RunInfo], Logger]:
    def build(info: RunInfo) -> Logger:
        from verl.tracking.loggers import hosted

        return getattr(hosted, class_name)(info)

    return build


# "console" and "jsonl" are made by the tracker itself: the first needs the terminal, the second is always on.
BUILDERS: dict[str, Callable[[RunInfo], Logger]] = {
    "tensorboard": _tensorboard,
    "file": _file,
    "wandb": _hosted("WandbLogger"),
    "mlflow": _hosted("MlflowLogger"),
    "swanlab": _hosted("SwanlabLogger"),
    "trackio": _hosted("TrackioLogger"),
    "clearml": _hosted("ClearmlLogger"),
}
NAMES = ("console", "jsonl", *BUILDERS)


def check_names(loggers: str | Sequence[str]) -> list[str]:
    """``trainer.logger``, a name or a list, as a list without repeats; ConfigError names every unknown one."""
    names = [loggers] if isinstance(loggers, str) else list(loggers)
    problems = []
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(str(name).lower(), NAMES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            problems.append(f"trainer.logger: unknown logger {name!r}; {hint}there are {', '.join(NAMES)}")
    if problems:
        raise ConfigError(problems)
    return list(dict.fromkeys(names))


__all__ = ["BUILDERS", "NAMES", "Console", "Logger", "RunInfo", "check_names"]
