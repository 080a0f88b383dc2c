"""Several reward functions for one row: a weighted sum that knows the difference between "failed" and "no opinion"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl.errors import RewardError
from verl.rewards.contract import RewardResult


def combine(
    results_per_function: Mapping[str, Sequence[RewardResult]], weights: Mapping[str, float]
) -> list[RewardResult]:
    """One result per row: the sum of ``weight * score`` over the functions that gave the row a score.

    A function that abstained (score None without error) adds nothing. A row on which every function abstained has no
    score, and so stays out of its group's statistics. A row on which any function FAILED fails as a whole: a sum with
    a part missing would be compared with complete sums of the same group. Extra info is kept as ``{function}/{key}``.

    Raises :class:`RewardError` when the functions scored different numbers of rows or the names do not match.
    """
    if set(results_per_function) != set(weights):
        names, weighted = sorted(results_per_function), sorted(weights)
        raise RewardError(f"the reward functions are {names} but weights are given for {weighted}: name each once")
    lengths = {name: len(results) for name, results in results_per_function.items()}
    if len(set(lengths.values())) > 1:
        raise RewardError(f"the reward functions scored different numbers of rows: {lengths}")
    names = list(results_per_function)
    rows = zip(*(results_per_function[name] for name in names), strict=True)
    return [_combine_row(dict(zip(names, row, strict=True)), weights) for row in rows]


def _combine_row(row: Mapping[str, RewardResult], weights: Mapping[str, float]) -> RewardResult:
    extra = {f"{name}/{key}": value for name, result in row.items() for key, value in result.extra.items()}
    extra.update({f"{name}/score": result.score for name, result in row.items()})
    errors = [f"{name}: {result.error}" for name, result in row.items() if result.error is not None]
    if errors:
        return RewardResult(None, extra, "\n".join(errors))
    scores = [weights[name] * result.score for name, result in row.items() if result.score is not None]
    return RewardResult(sum(scores) if scores else None, extra)
