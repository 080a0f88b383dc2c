"""verl's reward managers by name, and what each becomes here.

There is one runner: it scores rows in parallel, recognises batch functions by their signature, and does not let one
bad row stop the others. What the managers of verl differ in is therefore not a class but at most a setting.
"""

from __future__ import annotations

import difflib
from typing import Literal

from verl.errors import RewardError
from verl.notices import notice

Manager = Literal["naive", "dapo"]
_SAME_AS_NAIVE = {
    "batch": "batch functions are recognised by their signature",
    "prime": "rows are always scored in parallel processes, each with a timeout",
}


def resolve_manager(name: str) -> Manager:
    """``naive``, or ``dapo`` when the soft overlong penalty may be asked for.

    ``batch`` and ``prime`` become ``naive`` with a notice. Raises :class:`RewardError` for any other name.
    """
    if name in ("naive", "dapo"):
        return name
    if name in _SAME_AS_NAIVE:
        notice(f"reward manager '{name}' is served by the one reward runner: {_SAME_AS_NAIVE[name]}")
        return "naive"
    known = ["naive", "dapo", *_SAME_AS_NAIVE]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise RewardError(f"reward manager '{name}' does not exist{hint}: use one of {', '.join(known)}")
