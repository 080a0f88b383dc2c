"""The scorer of the built-in arithmetic task: the first line of the response is the answer, nothing else counts."""

from __future__ import annotations

from typing import Any


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """1.0 when the text before the first newline, stripped, equals the ground truth; else 0.0."""
    answer = solution_str.split("\n", 1)[0].strip()
    return float(bool(answer) and answer == str(ground_truth).strip())
