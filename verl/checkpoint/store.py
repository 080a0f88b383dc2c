"""The folder of a run's checkpoints: whole or absent, whatever kills the process.

Order of a save: fill a temporary folder, list its files in a manifest, fsync, rename to ``global_step_N``, write the
tracker, link the actor, and only then delete old checkpoints. A kill at any point leaves the older checkpoints and a
tracker that names a complete one; what it left half done is cleared away at the next start or save.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from verl.checkpoint.durable import flush_path, flush_tree, human, no_room, only_saver, remove, write_atomic
from verl.checkpoint.layout import (
    DELETED,
    REPLACED,
    SAVING,
    TRACKER,
    is_step_name,
    leftovers,
    step_folders,
    step_name,
)
from verl.checkpoint.links import links_outdated, refresh_links
from verl.checkpoint.manifest import Manifest, files_in, read_complete, write_manifest
from verl.errors import CheckpointError, ConfigError
from verl.notices import notice

MODES = ("auto", "disable", "resume_path")


class CheckpointStore:
    """Saves, finds and thins out the checkpoints of one directory. One process (the controller) uses it.

    Args:
        directory: made at the first save.
        keep_last: how many of the most recently saved checkpoints stay; None keeps all.
        keep_best: besides, the complete checkpoint with the highest score stays.
    """

    def __init__(self, directory: str | Path, keep_last: int | None = None, keep_best: bool = False):
        if keep_last is not None and keep_last < 1:
            raise ConfigError(f"at least 1 checkpoint must be kept (or null for all), not {keep_last}")
        self.directory = Path(directory).expanduser()
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._tidy_at_start()

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(self, step: int, write: Callable[[Path], None], *, score: float | None = None) -> Path:
        """Write the checkpoint of ``step``, replacing an earlier one of that step, and return its folder.

        Args:
            step: the global step that was finished.
            write: fills the (existing, empty) folder that it is given. What it raises is raised again, except
                system errors.
            score: how good this step is, higher is better; decides which checkpoint is the best.

        Raises:
            CheckpointError: disk full, no permission, another process saving here. Older checkpoints are untouched.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with only_saver(self.directory):
                self._clear_leftovers()
                self._write_and_publish(step, write, score)
                self._after_save(step)
        except OSError as error:
            remedy = "; set trainer.default_local_dir to a folder where you may write" if _refused(error) else ""
            raise CheckpointError(
                f"The checkpoint of step {step} cannot be written to {self.directory} ({_reason(error)}){remedy}. "
                "Older checkpoints are untouched."
            ) from error
        return self.directory / step_name(step)

    def _write_and_publish(self, step: int, write: Callable[[Path], None], score: float | None) -> None:
        temporary = self.directory / (SAVING + step_name(step))
        try:
            temporary.mkdir()
            write(temporary)
            known_score = float(score) if score is not None and math.isfinite(score) else None
            write_manifest(temporary, step, self._next_save_number(), known_score)
            flush_tree(temporary)
            self._publish(temporary, step)
            write_atomic(self.directory / TRACKER, str(step))
        except BaseException as error:
            what = no_room(error, shutil.disk_usage(self.directory).free)
            written = sum(path.stat().st_size for path in files_in(temporary))
            self._clear_after_failure()
            if what is None:
                raise
            raise CheckpointError(self._full_disk_message(step, what, written)) from error

    def _next_save_number(self) -> int:
        return 1 + max((manifest.save_number for manifest in self.complete().values()), default=0)

    def _publish(self, temporary: Path, step: int) -> None:
        final = self.directory / step_name(step)
        if final.exists():
            # killed between the two renames, the next start moves the old one back (see _clear_leftovers)
            os.rename(final, self.directory / (REPLACED + final.name))
        os.rename(temporary, final)
        flush_path(self.directory)

    def _after_save(self, step: int) -> None:
        """The new checkpoint is safe; from here on nothing may fail the run."""
        try:
            self._clear_leftovers()
            refresh_links(self.directory)
            self._retain(step)
        except OSError as error:
            notice(f"Old checkpoints in {self.directory} could not be tidied up: {_reason(error)}.")

    def _full_disk_message(self, step: int, what: str, written: int) -> str:
        free = shutil.disk_usage(self.directory).free
        known = self.complete()
        last = max(known, key=lambda saved: known[saved].save_number, default=None)
        if last is not None and known[last].total_bytes > written:
            needed = f"about {human(known[last].total_bytes)} (as global_step_{last})"
        else:
            needed = f"more than {human(written)}"
        return (
            f"The disk of {self.directory} {what}: the checkpoint of step {step} needs {needed}, and "
            f"{human(free)} are free. Older checkpoints are untouched; make room, or set "
            "trainer.default_local_dir to a larger disk or trainer.max_actor_ckpt_to_keep to keep fewer."
        )

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(self, mode: str = "auto", path: str | Path | None = None) -> Path | None:
        """The checkpoint to resume from, always a complete one; None to start from the beginning.

        Args:
            mode: ``auto`` takes the one that the tracker names, else (with a notice) the most recently saved complete
                one; ``disable`` takes none; ``resume_path`` takes ``path``, which names a ``global_step_N`` folder or
                something inside one.

        Raises:
            CheckpointError: mode ``resume_path``, and there is no complete checkpoint at ``path``.
        """
        if mode not in MODES:
            raise ConfigError(f"unknown resume mode '{mode}'; there are {', '.join(MODES)}")
        if mode == "disable":
            return None
        return self._newest() if mode == "auto" else self._at(path)

    def complete(self) -> dict[int, Manifest]:
        """The manifests of all complete checkpoints by step."""
        found = {}
        for step, folder in sorted(step_folders(self.directory).items()):
            try:
                found[step] = read_complete(folder)
            except CheckpointError:
                continue  # the caller asks for the complete ones; find() says what is wrong with the one it wanted
        return found

    def best(self) -> Path | None:
        """The complete checkpoint with the highest score, of equals the latest; None if none has a score."""
        scored = {step: manifest for step, manifest in self.complete().items() if manifest.score is not None}
        if not scored:
            return None
        step = max(scored, key=lambda s: (scored[s].score, scored[s].save_number))
        return self.directory / step_name(step)

    def _newest(self) -> Path | None:
        folders = step_folders(self.directory)
        tracker = self.directory / TRACKER
        if not folders and not tracker.exists():
            return None
        try:
            tracked = _read_tracker(tracker)
            read_complete(self.directory / step_name(tracked))
            return self.directory / step_name(tracked)
        except CheckpointError as error:
            problem = str(error)
        known = self.complete()
        if not known:
            notice(f"{problem}. No complete checkpoint is in {self.directory}: starting from the beginning.")
            return None
        newest = max(known, key=lambda step: (known[step].save_number, step))
        notice(f"{problem}. Resuming from the newest complete checkpoint instead: global_step_{newest}.")
        return self.directory / step_name(newest)

    def _at(self, path: str | Path | None) -> Path:
        if path is None or not str(path).strip():
            raise CheckpointError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N.")
        asked = Path(os.path.expandvars(path)).expanduser()
        resolved = asked.resolve()  # follows actor/global_step_N to the checkpoint that it belongs to
        folder = next((place for place in (resolved, *resolved.parents) if is_step_name(place.name)), None)
        if folder is None:
            raise CheckpointError(
                f"trainer.resume_from_path={asked} must name a global_step_N folder.{self._what_there_is(resolved)}"
            )
        if not folder.is_dir():
            raise CheckpointError(f"There is no checkpoint {asked}.{self._what_there_is(folder.parent)}")
        try:
            read_complete(folder)
        except CheckpointError as error:
            raise CheckpointError(f"Cannot resume: {error}.{self._what_there_is(folder.parent, folder)}") from None
        return folder

    def _what_there_is(self, directory: Path, besides: Path | None = None) -> str:
        names = []
        for _, folder in sorted(step_folders(directory).items()):
            try:
                if folder != besides:
                    read_complete(folder)
                    names.append(folder.name)
            except CheckpointError:
                continue
        return f" Complete ones in {directory}: {', '.join(names)}." if names else ""

    # ---- tidying -------------------------------------------------------------------------------------------------

    def _tidy_at_start(self) -> None:
        if not leftovers(self.directory) and not links_outdated(self.directory):
            return
        try:
            with only_saver(self.directory):
                self._clear_leftovers()
                refresh_links(self.directory)
        except CheckpointError:
            return  # another process is saving at this moment: nothing here is left over
        except OSError as error:
            notice(f"What a killed save left in {self.directory} could not be cleared away: {_reason(error)}.")

    def _clear_leftovers(self) -> None:
        for path in leftovers(self.directory):
            final = self.directory / path.name.removeprefix(REPLACED)
            if path.name.startswith(REPLACED) and not final.exists():
                os.rename(path, final)
            else:
                remove(path)

    def _clear_after_failure(self) -> None:
        try:
            self._clear_leftovers()
        except OSError as error:  # the error that brought us here matters more
            notice(f"What the failed save left in {self.directory} could not be cleared away: {_reason(error)}.")

    def _retain(self, just_saved: int) -> None:
        """Delete complete checkpoints beyond those to keep. Folders that we cannot vouch for are left alone."""
        if self.keep_last is None:
            return
        known = self.complete()
        by_age = sorted(known, key=lambda step: known[step].save_number, reverse=True)
        keep = {just_saved, *by_age[: self.keep_last]}
        best = self.best() if self.keep_best else None
        for step in by_age:
            folder = self.directory / step_name(step)
            if step in keep or folder == best:
                continue
            doomed = folder.with_name(DELETED + folder.name)  # renamed first: a kill leaves no half-deleted checkpoint
            os.rename(folder, doomed)
            refresh_links(self.directory)
            remove(doomed)


def _read_tracker(path: Path) -> int:
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if not text:
        raise CheckpointError(f"{path} is empty")
    if not is_step_name(f"global_step_{text}"):
        raise CheckpointError(f"{path} does not hold a step number but {text[:40]!r}")
    return int(text)


def _refused(error: OSError) -> bool:
    return isinstance(error, (PermissionError, FileExistsError, NotADirectoryError)) or error.errno == errno.EROFS


def _reason(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"
