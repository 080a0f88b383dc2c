"""Writing so that a crash or a power cut leaves either the old or the new, and saying what a full disk lacks."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from verl.checkpoint.layout import LOCK, RUN_LOCK, SAVING
from verl.errors import CheckpointError
from verl.notices import notice

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}


def flush_path(path: Path) -> None:
    """fsync of one file or folder. File systems that cannot flush a folder get a notice instead of an error."""
    is_folder = path.is_dir()
    if is_folder and fcntl is None:
        return  # Windows opens no folders, and writes its names through
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in _UNSUPPORTED:
            raise
        notice(
            f"The file system of {path} cannot flush folders: after a power cut the newest checkpoint may be "
            "incomplete (then the one before it is used).",
            key="flush_folder",
        )
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """fsync of all files and folders below, the inner ones first."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush_path(Path(root) / name)
        flush_path(Path(root))


def write_atomic(path: Path, text: str) -> None:
    """Replace a small file so that it is never seen half written, and stays after a power cut."""
    temporary = path.with_name(SAVING + path.name)
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_path(path.parent)


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def only_saver(directory: Path) -> AbstractContextManager[None]:
    """While one process saves a checkpoint, no other does.

    Raises:
        CheckpointError: another process saves one.
    """
    return _alone(directory / LOCK, f"Another process is saving a checkpoint in {directory};")


def only_run(directory: str | Path) -> AbstractContextManager[None]:
    """While one process runs in a run folder, no other does: their records and checkpoints would mix.

    Raises:
        CheckpointError: another process runs there.
    """
    return _alone(Path(directory) / RUN_LOCK, f"Another run is using the folder {directory}; wait for it to end, or")


@contextlib.contextmanager
def _alone(lock: Path, taken: str) -> Iterator[None]:
    """Hold a lock, which the system releases even after kill -9."""
    if fcntl is None:
        yield
        return
    with open(lock, "a", encoding="utf-8") as file:
        try:
            # a POSIX lock: unlike flock's it is not inherited by forked workers that outlive a killed run
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(f"{taken} give every run its own trainer.default_local_dir.") from None
            if error.errno not in _UNSUPPORTED:
                raise
            notice(
                f"The file system of {lock.parent} has no locks: take care that no other run uses this folder.",
                key="no_file_locks",
            )
        yield


def human(size: float) -> str:
    """Bytes for people: ``1.2 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


_NO_ROOM = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "has used up its quota",
    errno.EFBIG: "has a limit of file size (ulimit -f)",
}


def no_room(error: BaseException, free_bytes: int) -> str | None:
    """Whether ``error`` (or what caused it) means that nothing more can be written: "is full" or the like, else None.

    Libraries wrap the system's error: safetensors keeps its number in the text only, and torch not even that, for which
    a disk with nothing free is taken as the cause.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _NO_ROOM:
            return _NO_ROOM[seen.errno]
        for number, words in _NO_ROOM.items():
            if f"(os error {number})" in str(seen):
                return words
        seen = seen.__cause__ or seen.__context__
    return _NO_ROOM[errno.ENOSPC] if isinstance(error, (OSError, RuntimeError)) and free_bytes < 1_000_000 else None
