"""Names of files and folders of a checkpoint directory.

::

    {directory}/latest_checkpointed_iteration.txt      the tracker: just the integer
    {directory}/global_step_N/manifest.json            written last: every file with its size
    {directory}/global_step_N/actor/ critic/ ...       what the run wrote
    {directory}/actor/global_step_N                    relative link to ../global_step_N/actor
"""

from __future__ import annotations

import re
from pathlib import Path

from verl.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
LOCK, RUN_LOCK = ".checkpoint.lock", ".run.lock"
ACTOR = "actor"
SAVING, REPLACED, DELETED = ".saving-", ".replaced-", ".deleted-"
"""Prefixes of a name that is not finished yet, was moved aside, or is being deleted."""

_STEP = re.compile(r"global_step_(0|[1-9][0-9]*)")
_LEFTOVER = re.compile(rf"\.(saving|replaced|deleted)-({_STEP.pattern}|{re.escape(TRACKER)})")


def step_name(step: int) -> str:
    return f"global_step_{step}"


def step_of(path: str | Path) -> int:
    """The N of a path that ends in ``global_step_N``.

    Raises:
        CheckpointError: it does not.
    """
    match = _STEP.fullmatch(Path(path).name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint folder: its name must be global_step_N with a number N.")
    return int(match[1])


def is_step_name(name: str) -> bool:
    return _STEP.fullmatch(name) is not None


def step_folders(directory: Path) -> dict[int, Path]:
    """Every ``global_step_N`` folder by its step, complete or not."""
    if not directory.is_dir():
        return {}
    return {step_of(path): path for path in directory.iterdir() if is_step_name(path.name) and path.is_dir()}


def leftovers(directory: Path) -> list[Path]:
    """What a killed save (or deletion) left behind."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name))
