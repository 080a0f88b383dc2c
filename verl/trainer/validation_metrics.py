"""Validation numbers of scored rows, under verl's names.

``val-core/{data_source}/{variable}/{mean@N|best@N/mean|maj@N/mean}`` for the variable ``acc`` (``reward`` where no row
reports an accuracy) at the largest number N of samples a prompt; everything else under ``val-aux``: other variables,
``std@N``, ``worst@k/mean``, and k = 2, 4, 8 ... below N. Each is the mean over prompts of an exact, unbiased estimate
from draws without replacement (:mod:`verl.algorithms.passk`); a bootstrap with replacement, as is usual, is biased.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import comb
from typing import Any, TypedDict

import numpy as np

from verl.algorithms.passk import best_of_k, worst_of_k
from verl.metrics import Metrics

ACCURACY, REWARD, PREDICTION = "acc", "reward", "pred"


class ValidationRow(TypedDict):
    """One scored sample. ``uid`` is that of the prompt draw, so that equal texts asked twice stay two prompts."""

    uid: str
    data_source: str
    score: float
    valid: bool
    extra: Mapping[str, Any]


def validation_metrics(rows: Iterable[ValidationRow]) -> Metrics:
    """The numbers of one validation.

    A row whose reward failed (``valid`` False) counts in ``val-aux/{data_source}/failed`` and nowhere else; N stays
    the number of samples that its prompt was given, and an estimate over k samples leaves out prompts with fewer than
    k valid ones. Values in ``extra`` that are no numbers have no mean; ``pred`` (an answer) votes in ``maj@k``.

    Returns:
        Metrics, all reduced by the mean over prompts, except the counts ``val-aux/{data_source}/{rows,failed}``.
    """
    sources: dict[str, dict[str, list[ValidationRow]]] = {}
    for row in rows:
        sources.setdefault(str(row["data_source"]), {}).setdefault(str(row["uid"]), []).append(row)
    metrics = Metrics()
    for source, groups in sources.items():
        _add_source(metrics, source, list(groups.values()))
    return metrics


def _add_source(metrics: Metrics, source: str, groups: list[list[ValidationRow]]) -> None:
    valid = [[row for row in group if row["valid"]] for group in groups]
    has_accuracy = any(_number(row["extra"].get(ACCURACY)) is not None for group in valid for row in group)
    core = ACCURACY if has_accuracy else REWARD
    most = max(len(group) for group in groups)
    core_names = {f"mean@{most}", f"best@{most}/mean", f"maj@{most}/mean"}
    for group, good in zip(groups, valid, strict=True):
        for variable, pairs in _variables(good).items():
            for name, value in _estimates(pairs, len(group)).items():
                section = "val-core" if variable == core and name in core_names else "val-aux"
                metrics.add(f"{section}/{source}/{variable}/{name}", value)
    counted = sum(map(len, valid))
    metrics.add(f"val-aux/{source}/rows", counted, reduce="sum")
    metrics.add(f"val-aux/{source}/failed", sum(map(len, groups)) - counted, reduce="sum")


def _variables(rows: Sequence[ValidationRow]) -> dict[str, list[tuple[float, Any]]]:
    """Variable -> (value, vote) of each row that reports it; the vote is None where a row gives no answer."""
    found: dict[str, list[tuple[float, Any]]] = {}
    for row in rows:
        extra = row["extra"]
        vote = extra.get(PREDICTION)
        for name, value in {**extra, REWARD: row["score"]}.items():
            number = _number(value)
            if number is not None and name != PREDICTION:
                found.setdefault(name, []).append((number, None if vote is None else str(vote)))
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (bool, np.bool_, int, float, np.integer, np.floating)) else None


def _estimates(pairs: Sequence[tuple[float, Any]], samples: int) -> dict[str, float]:
    """Metric name -> value of one prompt, from the valid ones of its ``samples`` samples."""
    values = [value for value, _ in pairs]
    found = {f"mean@{samples}": float(np.mean(values))}
    if samples == 1:
        return found
    found[f"std@{samples}"] = float(np.std(values))
    for k in _sizes(samples):
        if k > len(values):
            break
        found[f"best@{k}/mean"] = best_of_k(values, k)
        found[f"worst@{k}/mean"] = worst_of_k(values, k)
        if all(vote is not None for _, vote in pairs):
            found[f"maj@{k}/mean"] = majority_of_k(pairs, k)
    return found


def _sizes(samples: int) -> list[int]:
    """2, 4, 8 ... below ``samples``, and ``samples``."""
    return [k for k in (2**i for i in range(1, samples.bit_length())) if k < samples] + [samples]


# ---- majority vote ---------------------------------------------------------------------------------------------------


def majority_of_k(pairs: Sequence[tuple[float, Any]], k: int) -> float:
    """Expected value of the answer that wins a vote among k of the samples, drawn without replacement.

    Args:
        pairs: (value, vote) of each sample, with k <= their number. Of equally frequent answers each wins as often.
    """
    counts = Counter(vote for _, vote in pairs)
    totals: dict[Any, float] = dict.fromkeys(counts, 0.0)
    for value, vote in pairs:
        totals[vote] += value
    chances = _winning_chances(tuple(sorted(counts.values())), k)
    return sum(chances[count] * totals[vote] / count for vote, count in counts.items())


@lru_cache(maxsize=4096)
def _winning_chances(counts: tuple[int, ...], k: int) -> dict[int, float]:
    """Count of an answer -> probability that one answer of that count wins among k drawn samples."""
    chances = {}
    for count in set(counts):
        others = list(counts)
        others.remove(count)
        wins = 0.0
        for votes in range(1, min(count, k) + 1):
            ways = comb(count, votes)
            for ties, draws in enumerate(_draws(others, k - votes, votes)):
                wins += ways * draws / comb(sum(counts), k) / (ties + 1)
        chances[count] = wins
    return chances


def _draws(counts: Sequence[int], size: int, limit: int) -> list[int]:
    """Ways to draw ``size`` samples of other answers, none more than ``limit`` times, by how many reach ``limit``."""
    most = size // limit
    table = [[0] * (size + 1) for _ in range(most + 1)]  # table[ties][drawn]
    table[0][0] = 1
    for count in counts:
        new = [[0] * (size + 1) for _ in range(most + 1)]
        for ties, row in enumerate(table):
            for drawn, ways in enumerate(row):
                if not ways:
                    continue
                for more in range(min(count, limit, size - drawn) + 1):
                    new[ties + (more == limit)][drawn + more] += ways * comb(count, more)
        table = new
    return [row[size] for row in table]


# ---- one number ------------------------------------------------------------------------------------------------------


def headline(metrics: Mapping[str, float]) -> float | None:
    """The accuracy (or reward) of an average sample: ``val-core/.../mean@N`` over data sources, weighted by their rows.

    ``metrics`` is what :func:`validation_metrics` gave, or a record of it. None if no row was valid.
    """
    total = weight = 0.0
    for name, rows in metrics.items():
        match = re.fullmatch(r"val-aux/(.*)/rows", name, re.DOTALL)
        if match is None or not rows:
            continue
        core = re.compile(re.escape(f"val-core/{match[1]}/") + rf"({ACCURACY}|{REWARD})/mean@\d+")
        for other, value in metrics.items():
            if core.fullmatch(other):
                total += rows * value
                weight += rows
    return total / weight if weight else None
