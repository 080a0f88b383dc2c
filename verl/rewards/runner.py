"""The reward runner: scores sample batches in the background, whole or in pieces, and says what went wrong.

Per-row functions run in a pool of worker processes, so that a limit per row holds even against C code that never
returns. Batch functions run in a thread of the driver, so that they see the user's globals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from verl.errors import RewardError
from verl.metrics import Metrics
from verl.notices import notice
from verl.protocol import DataProto
from verl.rewards.batch_view import BatchView
from verl.rewards.contract import (
    COLUMN_PARAMETERS,
    ROW_PARAMETERS,
    RewardFunction,
    RewardResult,
    inspect_function,
    normalise_batch,
)
from verl.rewards.failures import FailureLog, OnError, StepTally
from verl.rewards.launch import batch_pool, default_num_workers, row_pool
from verl.rewards.router import REFERENCE, check_data_sources, default_compute_score, find_scorer
from verl.rewards.rows import add_extra_metrics, response_lengths, reward_style, row_arguments, scored_batch
from verl.rewards.slot import Outcome

_SLOW_S_PER_ROW = 0.1


class RewardRunner:
    """Scores batches with one reward function.

    Args:
        fn: a per-row or batch function (see :mod:`verl.rewards.contract`), a loaded :class:`RewardFunction`, or None
            for the rule that belongs to each row's ``data_source``.
        tokenizer: anything with ``batch_decode(ids, skip_special_tokens=True)``.
        num_workers: worker processes for per-row functions; default one per core, at most 8.
        timeout_s: seconds of wall time for one row, or for one call of a batch function; None: no limit.
        on_error: what becomes of a row that failed: ``exclude`` (``score_valid`` False), ``zero`` (score 0.0, valid)
            or ``raise`` (the future raises). It is counted in ``reward/failed`` in any case.
        kwargs: further keyword arguments for ``fn`` (not for a loaded function, which has its own).
        per_batch: for batch functions: ``whole`` wants all rows of the step at once, so that a function that compares
            rows does not depend on how the batch was cut; ``piece`` scores each piece as it comes.

    ``per_row`` tells the dataflow whether pieces of a batch may be scored by themselves.
    """

    def __init__(
        self,
        fn: Callable[..., Any] | RewardFunction | None,
        tokenizer: Any,
        *,
        num_workers: int | None = None,
        timeout_s: float | None = 60.0,
        on_error: OnError = "exclude",
        kwargs: Mapping[str, Any] | None = None,
        per_batch: Literal["whole", "piece"] = "whole",
    ):
        if on_error not in ("exclude", "zero", "raise"):
            raise RewardError(f"on_error {on_error!r} does not exist: use exclude, zero or raise")
        if per_batch not in ("whole", "piece"):
            raise RewardError(f"per_batch {per_batch!r} does not exist: use whole or piece")
        if timeout_s is not None and timeout_s <= 0:
            raise RewardError(f"reward.timeout_s is {timeout_s}: give seconds above 0, or null for no limit")
        if num_workers is not None and num_workers < 1:
            raise RewardError(f"reward.num_workers is {num_workers}: give at least 1")
        if isinstance(fn, RewardFunction):
            if kwargs:
                raise RewardError("a loaded reward function has its kwargs already: give them to load_reward_function")
            self.function = fn
        else:
            self.function = inspect_function(default_compute_score if fn is None else fn, kwargs)
        self._is_default = self.function.fn is default_compute_score
        self._is_batch = self.function.style != "row"
        self.per_row = not self._is_batch or per_batch == "piece"
        self._tokenizer = tokenizer
        self._on_error = on_error
        self._lock = threading.Lock()
        self._failures = FailureLog(self.function.name, on_error)
        if self._is_batch:
            self._pool = batch_pool(self.function, timeout_s)
        else:
            slots = num_workers or default_num_workers()
            self._pool = row_pool(self.function, slots, timeout_s, take_first=self._is_default)

    def score(self, batch: DataProto) -> Future[DataProto]:
        """Start scoring a sample batch or a piece of one; the future gives :func:`verl.rewards.rows.scored_batch`.

        Raises :class:`RewardError` at once for a data source without a rule; the future raises it for a batch function
        that returned the wrong number of values, and with ``on_error="raise"`` for the first row that failed.
        """
        piece = _Piece(batch, response_lengths(batch.batch["response_mask"]).tolist())
        arguments = row_arguments(batch, self._tokenizer) if self.function.style != "view" else []
        if self._is_default:
            self._choose_rules(batch, arguments)
        if self._is_batch:
            calls = {-1: self._batch_arguments(batch, arguments)} if any(piece.lengths) else {}
        else:
            calls = {row: self.function.accepted(arguments[row]) for row, n in enumerate(piece.lengths) if n}
        piece.open = len(calls)
        if not calls:
            self._complete(piece)
        for row, offered in calls.items():
            self._pool.submit(offered).add_done_callback(lambda done, row=row: self._collect(piece, row, done))
        return piece.future

    def begin_step(self) -> None:
        """Start counting for :meth:`end_step`."""
        self._failures.begin_step()

    def end_step(self) -> StepTally:
        """The counts since :meth:`begin_step`. Raises :class:`RewardError` when every row failed."""
        return self._failures.end_step()

    def close(self) -> None:
        """End the workers; scores that are still awaited raise."""
        self._pool.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batch_arguments(self, batch: DataProto, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if self.function.style == "view":
            return {"view": BatchView(batch, self._tokenizer)}
        pairs = zip(COLUMN_PARAMETERS, ROW_PARAMETERS, strict=True)
        return self.function.accepted({many: [row[one] for row in rows] for many, one in pairs})

    def _choose_rules(self, batch: DataProto, arguments: list[dict[str, Any]]) -> None:
        """Rows of a source without a rule of its own, but with a reference answer, are scored by overlap with it."""
        for row, offered in enumerate(arguments):
            style = reward_style(batch.non_tensor_batch, row)
            if style == "reference" and find_scorer(offered["data_source"]) is None:
                offered["data_source"] = REFERENCE
        check_data_sources(offered["data_source"] for offered in arguments)

    def _collect(self, piece: _Piece, row: int, done: Future[Outcome]) -> None:
        """Called by the pool's thread for every call that ended; the last one of a piece completes it."""
        with self._lock:
            try:
                piece.outcomes[row] = done.result()
            except RewardError as error:  # the pool was closed
                piece.broken = error
            piece.open -= 1
            if piece.open:
                return
        self._complete(piece)

    def _complete(self, piece: _Piece) -> None:
        """Fill the future. Whatever goes wrong here must reach who waits for it, not the pool's thread."""
        try:
            if piece.broken is not None:
                raise piece.broken
            results, metrics = self._results(piece)
            scored = scored_batch(piece.batch, results, metrics)
        except BaseException as error:
            fill = partial(piece.future.set_exception, error)
        else:
            fill = partial(piece.future.set_result, scored)
        try:
            fill()
        except InvalidStateError:
            if not piece.future.cancelled():  # cancelled: the step was given up, and nobody waits any more
                raise

    def _results(self, piece: _Piece) -> tuple[list[RewardResult], Metrics]:
        results, timeouts, seconds = self._rows_of_batch(piece) if self._is_batch else _rows_of_calls(piece)
        answered = [row for row, length in enumerate(piece.lengths) if length]
        failed = []
        for row in answered:
            if results[row].score is None:
                if results[row].error is None:
                    results[row].error = "returned None; a reward function that is used alone must score every row"
                failed.append(row)
        self._failures.report(results, failed, len(answered), piece.batch.non_tensor_batch)
        metrics = Metrics()
        metrics.add("reward/failed", len(failed), reduce="sum")
        metrics.add("reward/timeouts", timeouts, reduce="sum")
        if answered:
            metrics.add("reward/seconds_per_row", seconds / len(answered), weight=len(answered))
        add_extra_metrics(metrics, [results[row] for row in answered])
        if self._on_error == "zero":
            for row in failed:
                results[row].score = 0.0
        return results, metrics

    def _rows_of_batch(self, piece: _Piece) -> tuple[list[RewardResult], int, float]:
        rows = len(piece.lengths)
        if not piece.outcomes:
            return [RewardResult(None) for _ in range(rows)], 0, 0.0
        outcome = piece.outcomes[-1]
        value = RewardResult(None, error=outcome.error) if outcome.error else outcome.value
        if isinstance(value, RewardResult):  # the call failed as a whole
            return [RewardResult(None, error=value.error) for _ in range(rows)], int(outcome.timed_out), outcome.seconds
        if outcome.seconds > _SLOW_S_PER_ROW * rows:
            notice(
                f"batch reward function '{self.function.name}' took {1000 * outcome.seconds / rows:.0f} ms a row; a "
                "per-row function compute_score(data_source, solution_str, ground_truth) runs in parallel processes",
                key=f"slow batch reward {self.function.name}",
            )
        return normalise_batch(self.function, value, rows), 0, outcome.seconds


@dataclass
class _Piece:
    """One batch given to ``score``: its outcomes by row (-1: the call of a batch function) until none is open."""

    batch: DataProto
    lengths: list[int]
    future: Future[DataProto] = field(default_factory=Future)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    open: int = 0
    broken: RewardError | None = None


def _rows_of_calls(piece: _Piece) -> tuple[list[RewardResult], int, float]:
    results = [RewardResult(None) for _ in piece.lengths]
    for row, outcome in piece.outcomes.items():
        results[row] = RewardResult(None, error=outcome.error) if outcome.error else outcome.value
    timeouts = sum(outcome.timed_out for outcome in piece.outcomes.values())
    return results, timeouts, sum(outcome.seconds for outcome in piece.outcomes.values())
