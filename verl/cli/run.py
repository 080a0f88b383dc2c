"""How a command ends: what a person sees, and the exit code.

0 done · 1 our bug · 2 something the user can put right · 130 interrupted · 143 terminated.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from verl._version import __version__
from verl.dependencies import missing_dependency
from verl.errors import CrashError, VerlError

_TRACEBACK_VARIABLES = ("HYDRA_FULL_ERROR", "VERL_TRACEBACK")
_OS_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space or write elsewhere (trainer.default_local_dir)",
    errno.EDQUOT: "your disk quota is used up; free some space or write elsewhere (trainer.default_local_dir)",
    errno.EACCES: "permission denied; choose a path that you may use",
    errno.EPERM: "not permitted; choose a path that you may use",
    errno.EROFS: "the file system is read-only; choose another path",
}


class _Terminated(KeyboardInterrupt):
    """SIGTERM came, as schedulers send it: the run ends as it does at Ctrl-C, with its report and its workers."""


def run_cli(command: Callable[[list[str]], int | None], argv: Sequence[str]) -> int:
    """Run ``command(argv)`` and turn whatever it raises into a message on stderr and an exit code.

    ``HYDRA_FULL_ERROR=1`` or ``VERL_TRACEBACK=1`` shows the traceback of user errors too.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a terminal or pipe that is not UTF-8 ends no command
    try:
        with _terminable():
            return command(list(argv)) or 0
    except KeyboardInterrupt as error:
        terminated = isinstance(error, _Terminated)
        how, more = "terminated" if terminated else "interrupted", str(error)
        print(f"{how} {more}".rstrip(), file=sys.stderr)
        return 143 if terminated else 130
    except BrokenPipeError:
        # The reader has gone (`verl ... | head`). Nothing more can be said, at interpreter exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        sentence = user_message(error)
        if sentence is None:
            traceback.print_exc()
            print(
                f"This is a bug in verl {__version__}: please report it with the lines above and the command.",
                file=sys.stderr,
            )
            return 1
        if wants_traceback(os.environ):
            traceback.print_exc()
        print(f"error: {sentence}", file=sys.stderr)
        return error.exit_code if isinstance(error, VerlError) else 2


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception; only the main thread may set that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def user_message(error: Exception) -> str | None:
    """What to tell the user about an error that they can put right; None if it is a bug of ours."""
    if isinstance(error, CrashError):
        return user_message(error.__cause__) if isinstance(error.__cause__, Exception) else None
    if isinstance(error, VerlError):
        return str(error)
    if isinstance(error, ImportError):
        missing = missing_dependency(error)
        return str(missing) if missing else _unfit_package(error)
    if isinstance(error, OSError) and error.errno in _OS_REMEDIES:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{_OS_REMEDIES[error.errno]}"
    return None


def _unfit_package(error: ImportError) -> str | None:
    """transformers imports an installed torchvision, which fails where it was built for another torch."""
    seen: BaseException | None = error
    while seen is not None:
        if "torchvision::" in str(seen):
            return (
                f"the installed torchvision does not fit the installed torch ({seen}): pip uninstall torchvision (not "
                "needed here), or install the version that belongs to your torch"
            )
        seen = seen.__cause__ or seen.__context__
    return None


def wants_traceback(environ: Mapping[str, str]) -> bool:
    """Did the user ask for tracebacks of user errors?"""
    return any(environ.get(name, "").lower() in ("1", "true") for name in _TRACEBACK_VARIABLES)
