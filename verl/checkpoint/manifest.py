"""The manifest of a checkpoint: written last, it says which files with which sizes make it complete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from verl._version import __version__
from verl.checkpoint.durable import write_atomic
from verl.checkpoint.layout import MANIFEST, step_of
from verl.errors import CheckpointError

_FORMAT = "verl.checkpoint/1"


@dataclass(frozen=True)
class Manifest:
    """``save_number`` counts the saves of a directory: its order is that of time, whatever the clock or the step says
    (a run resumed from an older step writes smaller steps later). ``score``: higher is better, None is unknown."""

    step: int
    save_number: int
    score: float | None
    files: dict[str, int]
    verl_version: str = __version__
    format: str = _FORMAT

    @property
    def total_bytes(self) -> int:
        return sum(self.files.values())


def files_in(folder: Path) -> Iterator[Path]:
    """Every file below ``folder``."""
    for root, _, names in os.walk(folder):
        yield from (Path(root) / name for name in sorted(names))


def write_manifest(folder: Path, step: int, save_number: int, score: float | None) -> Manifest:
    """List what is in ``folder`` now."""
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files_in(folder)}
    manifest = Manifest(step, save_number, score, files)
    write_atomic(folder / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


def read_complete(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint: it is there, and every file that it lists has its size.

    Raises:
        CheckpointError: it is not complete; the message ends with what is wrong.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{folder} is not a complete checkpoint: its {MANIFEST} is damaged") from None
    except OSError as error:
        raise CheckpointError(f"{folder} is not readable: {error.strerror} ({MANIFEST})") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CheckpointError(f"{folder} is not a complete checkpoint: its {MANIFEST} is not of the format {_FORMAT}")
    try:
        manifest = Manifest(**document)
        numbers = [manifest.save_number, *manifest.files.values()]
        typed = all(type(number) is int for number in numbers) and isinstance(manifest.score, (int, float, type(None)))
    except (TypeError, AttributeError):
        typed = False
    if not typed:
        raise CheckpointError(f"{folder} is not a complete checkpoint: its {MANIFEST} is damaged")
    if manifest.step != step_of(folder):
        raise CheckpointError(f"{folder} was renamed: its {MANIFEST} says that it is step {manifest.step}")
    for name, size in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder} is not a complete checkpoint: its file {name} is missing")
        found = file.stat().st_size
        if found != size:
            raise CheckpointError(
                f"{folder} is not a complete checkpoint: its file {name} has {found:,} bytes instead of {size:,}"
            )
    return manifest
