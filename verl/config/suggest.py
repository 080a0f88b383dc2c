"""The nearest names to one that does not exist: option keys, choices, and files."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def near_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Up to ``count`` of ``known`` that look like ``name``, best first."""
    folded: dict[str, str] = {}
    for option in known:
        folded.setdefault(option.lower().replace("-", "_"), option)
    close = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=count, cutoff=0.6)
    return [folded[match] for match in close]


def near_keys(key: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Up to ``count`` dotted keys that a user who typed ``key`` may have meant, best first.

    The last part decides, the path before it breaks ties: ``actor_rollout_ref.actor.lr`` finds
    ``actor_rollout_ref.actor.optim.lr`` before ``critic.optim.lr``.
    """
    parent, _, name = key.rpartition(".")
    scored = []
    for option in known:
        option_parent, _, option_name = option.rpartition(".")
        same_name = _ratio(name, option_name)
        same_place = _ratio(parent, option_parent) + (option_parent == parent)
        score = max(2 * same_name + same_place, 3 * _ratio(key, option))
        if max(same_name, _ratio(key, option)) >= 0.7:
            scored.append((-score, option))
    best = min(scored, default=(0.0, ""))[0]
    return [option for score, option in sorted(scored)[:count] if score <= 0.8 * best]


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def near_path(path: str | Path, *, folders: bool = False) -> Path | None:
    """What exists and looks most like a ``path`` that does not (or that is not what it should be), or None.

    First the same tail elsewhere: ``~/models/Qwen/X`` was asked for and ``./models/X`` is there. Then a name that is
    almost the same beside it, in ``./models`` or in ``./data``. Then the most similar name in the deepest folder that
    exists.

    Args:
        folders: only folders are wanted.
    """
    wanted = Path(path).expanduser()
    for start in range(1, len(wanted.parts)):
        tail = Path(*wanted.parts[start:])
        for place in (tail, Path("models", tail.name), Path("data", tail.name)):
            if (place.is_dir() if folders else place.exists()) and place.absolute() != wanted.absolute():
                return place
    for folder in (wanted.parent, Path("models"), Path("data")):
        if (near := _alike(folder, wanted, wanted.name, folders, 0.8)) is not None:
            return near
    folder, name = wanted.parent, wanted.name
    while not folder.is_dir() and folder != folder.parent:
        folder, name = folder.parent, folder.name
    return _alike(folder, wanted, name, folders, 0.5)


def _alike(folder: Path, wanted: Path, name: str, folders: bool, cutoff: float) -> Path | None:
    """The entry of ``folder`` that is most like ``name``, or has its stem, and is not ``wanted`` itself."""
    root = folder.absolute() == folder.absolute().parent  # holds the system's folders, which nobody means
    if root or not folder.is_dir() or name in ("", "."):
        return None
    try:
        there = [entry for entry in folder.iterdir() if entry.is_dir() or not folders]
    except PermissionError:
        return None
    entries = sorted(entry.name for entry in there if entry.absolute() != wanted.absolute())
    close = difflib.get_close_matches(name, entries, n=1, cutoff=cutoff)
    close = close or [entry for entry in entries if Path(entry).stem == Path(name).stem][:1]
    return folder / close[0] if close else None
