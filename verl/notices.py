"""Notices: one line on the console and in the run's record whenever a choice was changed for the user.

Nothing falls back in silence: code that picks something other than what was asked calls :func:`notice`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_lock = threading.Lock()
_seen: dict[str, str] = {}
_sinks: list[Callable[[str], None]] = []


def notice(text: str, *, key: str | None = None) -> None:
    """Tell the user one line, once. ``key`` identifies the notice when its text varies (default: the text itself)."""
    with _lock:
        key = key or text
        if key in _seen:
            return
        _seen[key] = text
        sinks = list(_sinks)
    if not sinks:
        print(f"[notice] {text}", flush=True)
    for sink in sinks:
        sink(text)


def add_sink(sink: Callable[[str], None]) -> Callable[[], None]:
    """Send notices to ``sink`` too (with no sink they are printed). Returns a function that removes it again."""
    with _lock:
        _sinks.append(sink)
    return lambda: _sinks.remove(sink) if sink in _sinks else None


def seen() -> list[str]:
    """All notices of this process, oldest first: what a run's record starts with."""
    with _lock:
        return list(_seen.values())


def reset() -> None:
    """Forget what was said (a new run in the same process says it again)."""
    with _lock:
        _seen.clear()
