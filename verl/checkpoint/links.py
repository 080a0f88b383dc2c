"""``{directory}/actor/global_step_N``: the trained model where scripts look for it, without a copy."""

from __future__ import annotations

import os
from pathlib import Path

from verl.checkpoint.durable import remove
from verl.checkpoint.layout import ACTOR, MANIFEST, SAVING, is_step_name, step_folders, step_name, step_of
from verl.checkpoint.manifest import files_in
from verl.notices import notice

_MARK = ".hard_links"
"""In a folder of hard links that stands in for a link, so that it is known as ours."""


def links_outdated(directory: Path) -> bool:
    """Whether :func:`refresh_links` has something to do."""
    return bool(_missing(directory) or _stale(directory))


def refresh_links(directory: Path) -> None:
    """Make the missing links, delete those whose checkpoint is gone. What is not ours stays; failures are notices."""
    for path in _stale(directory):
        remove(path)
    for step in _missing(directory):
        place = directory / ACTOR / step_name(step)
        try:
            place.parent.mkdir(exist_ok=True)
            if place.is_symlink() or place.exists():
                raise FileExistsError(17, "something else of that name is there")
            _link(directory, step, place)
        except OSError as error:
            notice(
                f"{place} could not be linked to the trained model ({error.strerror or error}): load "
                f"{directory / step_name(step) / ACTOR} instead."
            )


def _source(directory: Path, step: int) -> Path:
    return directory / step_name(step) / ACTOR


def _relative_target(step: int) -> str:
    # relative, so that the whole directory can be moved or packed
    return os.path.join("..", step_name(step), ACTOR)


def _missing(directory: Path) -> list[int]:
    return [
        step
        for step, folder in sorted(step_folders(directory).items())
        if (folder / ACTOR).is_dir()
        and (folder / MANIFEST).is_file()
        and not _is_ours(directory / ACTOR / folder.name, step)
    ]


def _stale(directory: Path) -> list[Path]:
    """Our links without their model, hard links to files of a replaced checkpoint, and half-made ones."""
    if not (directory / ACTOR).is_dir():
        return []
    found = []
    for place in sorted((directory / ACTOR).iterdir()):
        name = place.name.removeprefix(SAVING)
        if not is_step_name(name):
            continue
        half_made = name != place.name
        source = _source(directory, step_of(name))
        ours = _is_ours(place, step_of(name))
        if half_made or (ours and not (source.is_dir() and (place.is_symlink() or _mirrors(source, place)))):
            found.append(place)
    return found


def _is_ours(place: Path, step: int) -> bool:
    if place.is_symlink():
        return os.readlink(place) == _relative_target(step)
    return (place / _MARK).is_file()


def _mirrors(source: Path, place: Path) -> bool:
    pairs = ((file, place / file.relative_to(source)) for file in files_in(source))
    return all(copy.is_file() and os.path.samefile(file, copy) for file, copy in pairs)


def _link(directory: Path, step: int, place: Path) -> None:
    try:
        os.symlink(_relative_target(step), place, target_is_directory=True)
        return
    except OSError as error:
        reason = error.strerror or str(error)
    half_made = place.with_name(SAVING + place.name)
    half_made.mkdir()
    try:
        source = _source(directory, step)
        for file in files_in(source):
            copy = half_made / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, copy)
        (half_made / _MARK).touch()
        os.rename(half_made, place)
    except OSError:
        remove(half_made)
        raise
    notice(
        f"{directory} takes no symbolic links ({reason}): {ACTOR}/global_step_N are folders of hard links instead "
        "(no copies).",
        key=f"hard_links:{directory}",
    )
