"""Unbiased estimates of what the best (or worst) of k samples would score, from n >= k samples of a prompt.

Drawing k of the n WITHOUT replacement (arXiv:2107.03374): a bootstrap with replacement underestimates, and gives less
than 1 for pass@n of a prompt that was solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from verl.errors import DataError


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the probability that k of the n samples hold a correct one."""
    _check(num_samples, k)
    if not 0 <= num_correct <= num_samples:
        raise DataError(f"pass@{k}: {num_correct} correct of {num_samples} samples is impossible")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Expected maximum of k scores drawn without replacement; equals `pass_at_k` for 0/1 scores."""
    _check(len(scores), k)
    total = comb(len(scores), k)
    # The i-th smallest score (from 0) is the maximum of C(i, k - 1) of the subsets.
    return sum(comb(i, k - 1) / total * score for i, score in enumerate(sorted(scores)) if i >= k - 1)


def worst_of_k(scores: Sequence[float], k: int) -> float:
    """Expected minimum of k scores drawn without replacement."""
    return -best_of_k([-score for score in scores], k)


def _check(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise DataError(f"pass@{k} needs 1 <= k <= samples, but there are {num_samples} samples of the prompt")
