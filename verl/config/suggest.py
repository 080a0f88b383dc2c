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


def near_path(path: str | Path) -> Path | None:
    """What exists and looks most like a ``path`` that does not, or None.

    First the same tail elsewhere: ``~/models/Qwen/X`` was asked for and ``./models/X`` is there. Then the most similar
    name in the deepest folder that exists.
    """
    wanted = Path(path).expanduser()
    for start in range(1, len(wanted.parts)):
        tail = Path(*wanted.parts[start:])
        for place in (tail, Path("models", tail.name), Path("data", tail.name)):
            if place != wanted and place.exists():
                return Path(".") / place
    folder, name = wanted.parent, wanted.name
    while not folder.is_dir() and folder != folder.parent:
        folder, name = folder.parent, folder.name
    if not folder.is_dir() or name in ("", "."):
        return None
    try:
        entries = sorted(entry.name for entry in folder.iterdir())
    except PermissionError:
        return None
    close = difflib.get_close_matches(name, entries, n=1, cutoff=0.5)
    close = close or [entry for entry in entries if Path(entry).stem == Path(name).stem][:1]
    return folder / close[0] if close else None
