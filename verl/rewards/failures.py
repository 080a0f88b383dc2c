"""Rows that got no score: counted for the step, shown with their cause once, or stopping the run."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl.errors import RewardError
from verl.notices import notice
from verl.rewards.contract import RewardResult

OnError = Literal["exclude", "zero", "raise"]
_CAUSES_SHOWN = 5


@dataclass
class StepTally:
    """What one step's scoring came to: rows that had a response, those without a score, and the first error text."""

    function: str
    rows: int = 0
    failed: int = 0
    first_error: str | None = None


def check_all_failed(tally: StepTally) -> None:
    """Raise :class:`RewardError` with the first traceback when not one row of a step got a score."""
    if tally.rows and tally.failed == tally.rows:
        raise RewardError(
            f"reward function '{tally.function}' failed on all {tally.rows} rows of the step; repair it, the first "
            f"error was:\n{tally.first_error}"
        )


class FailureLog:
    """Takes in the failures of pieces, from any thread."""

    def __init__(self, function: str, on_error: OnError):
        self._function = function
        self._on_error = on_error
        self._lock = threading.Lock()
        self._causes: set[str] = set()
        self._tally = StepTally(function)

    def begin_step(self) -> None:
        with self._lock:
            self._tally = StepTally(self._function)

    def end_step(self) -> StepTally:
        """The tally since :meth:`begin_step`; raises as :func:`check_all_failed` does."""
        with self._lock:
            tally = self._tally
        check_all_failed(tally)
        return tally

    def report(
        self, results: Sequence[RewardResult], failed: Sequence[int], rows: int, columns: Mapping[str, Any]
    ) -> None:
        """Count a piece with ``rows`` scored rows of which ``failed`` got no score.

        Each new cause is one notice, up to a few. With ``on_error="raise"`` raises :class:`RewardError` for the first.
        """
        new_causes: dict[str, int] = {}
        with self._lock:
            self._tally.rows += rows
            self._tally.failed += len(failed)
            if failed and self._tally.first_error is None:
                self._tally.first_error = results[failed[0]].error
            for row in failed:
                cause = results[row].cause or "no cause given"
                if cause not in self._causes:
                    self._causes.add(cause)
                    new_causes[cause] = row
            known = len(self._causes) - len(new_causes)
        name = self._function
        if failed and self._on_error == "raise":
            where = _place(columns, failed[0])
            raise RewardError(f"reward function '{name}' failed for {where}:\n{results[failed[0]].error}")
        outcome = "scored 0" if self._on_error == "zero" else "left out of its group"
        for number, (cause, row) in enumerate(new_causes.items(), known):
            if number < _CAUSES_SHOWN:
                where = _place(columns, row)
                text = f"reward function '{name}' failed for {where} ({outcome}, see reward/failed): {cause}"
            else:
                text = f"reward function '{name}' fails in still other ways, which are only counted"
            notice(text)


def _place(columns: Mapping[str, Any], row: int) -> str:
    place = f"row {columns['sample_id'][row] if 'sample_id' in columns else row}"
    return f"{place} of {columns['data_source'][row]}" if "data_source" in columns else place
