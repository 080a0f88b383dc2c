"""Does the memory of this process grow from step to step? A leak of a few MB a step ends a run days later."""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path

MIB, GIB = 2**20, 2**30
WARM = 5  # first steps, in which caches fill
WINDOW = 24  # steps looked at together
LEAST = 64 * MIB  # growth over the window below which nothing is said
SHARE = 0.02  # or this share of what the process holds, whichever is more


class MemoryWatch:
    """Told the host memory of the process after every step, it says once when that grows steadily.

    Steadily: over the last ``WINDOW`` steps, each quarter of them lies above the one before, the last wholly above the
    first, and what was gained is more than ``LEAST`` and ``SHARE``.
    """

    def __init__(self, total_bytes: int):
        self.total = total_bytes
        self._seen = 0
        self._last: deque[int] = deque(maxlen=WINDOW)
        self._told = False

    def after_step(self, held: int) -> str | None:
        """``held``: bytes resident now. Returns a sentence to tell, or None."""
        self._seen += 1
        if self._seen <= WARM:
            return None
        self._last.append(held)
        if self._told or len(self._last) < WINDOW:
            return None
        values = list(self._last)
        size = WINDOW // 4
        quarters = [sum(values[i : i + size]) / size for i in range(0, WINDOW, size)]
        apart = min(values[-size:]) > max(values[:size])  # more than lengths that come and go
        rising = all(later > earlier for earlier, later in itertools.pairwise(quarters))
        gained = quarters[-1] - quarters[0]
        if not (rising and apart) or gained < max(LEAST, SHARE * quarters[0]):
            return None
        self._told = True
        each = gained / (WINDOW - size)
        left = max(0, self.total - held)
        return (
            f"The host memory of this process grows by about {each / MIB:.0f} MiB a step and is {held / GIB:.1f} GiB "
            f"now: at this rate the machine's {self.total / GIB:.0f} GiB are full in {int(left / each):,} steps. Look "
            "for what a reward function, an environment or a callback keeps from step to step."
        )


def resident_bytes() -> int:
    """Host memory that this process holds."""
    file = Path("/proc/self/statm")
    if file.is_file():
        import os

        return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.Process().memory_info().rss)
