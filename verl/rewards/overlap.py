"""Overlap with a reference answer: the reward for datasets that bring an answer text but no rule.

The score is the F1 of the two bags of words (as in SQuAD's evaluation, Rajpurkar et al. 2016, arXiv:1606.05250):
case and punctuation do not count, and every CJK character is a word of its own, because those scripts do not
separate words by spaces.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")


def words(text: str) -> list[str]:
    """The lower-cased words of ``text`` without punctuation."""
    return _WORD.findall(text.lower())


def overlap_f1(solution_str: str, reference: str) -> float:
    """F1 in [0, 1] between the words of both texts; 0.0 when either has no words (empty never equals empty)."""
    mine, gold = Counter(words(solution_str)), Counter(words(reference))
    common = (mine & gold).total()
    if common == 0:
        return 0.0
    precision, recall = common / mine.total(), common / gold.total()
    return 2 * precision * recall / (precision + recall)


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """The overlap with the reference, or with the best of several (a list of references)."""
    if isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str):
        return max((overlap_f1(solution_str, str(reference)) for reference in ground_truth), default=0.0)
    return overlap_f1(solution_str, str(ground_truth))
