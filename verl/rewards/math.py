"""Mathematics: the last ``\\boxed{...}`` is compared with the ground truth by ``math-verify``.

math-verify's own time limit rests on signals, which work in a main thread only and would disturb the caller's; it is
switched off here, and the reward runner's limit per row ends a comparison that does not come back.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence
from typing import Any

from verl.errors import MissingDependencyError

_BOXED = re.compile(r"\\f?boxed\s*\{")
_ANSWER_LINE = re.compile(r"(?:final\s+)?answer\s*(?:is\s*:?|:)\s*([^\n]+)", re.IGNORECASE)


def require_math_verify() -> None:
    """Raise :class:`MissingDependencyError` when math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise MissingDependencyError("math_verify", "scoring mathematical answers", "math-verify")


def extract_boxed(text: str) -> str | None:
    """The content of the last complete ``\\boxed{...}`` with balanced braces, or None."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position].strip() or None
    return None


def extract_solution(solution_str: str) -> str | None:
    """The boxed answer, else the rest of the last ``Answer: ...`` line, else None."""
    boxed = extract_boxed(solution_str)
    if boxed is not None:
        return boxed
    lines = _ANSWER_LINE.findall(solution_str)
    return (lines[-1].strip().strip("*").strip() or None) if lines else None


def is_equivalent(answer: str, ground_truth: Any) -> bool:
    """Whether both denote the same mathematical object. An empty or missing text equals nothing."""
    gold = str(ground_truth).strip()
    gold = extract_boxed(gold) or gold
    if not answer or not gold:
        return False
    if _squeezed(answer) == _squeezed(gold):
        return True
    require_math_verify()
    from math_verify import parse, verify

    # It warns that a caller without its time limit needs one of his own; ours is the runner's.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    golds, answers = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (gold, answer))
    return bool(golds and answers and verify(golds, answers, timeout_seconds=0))


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """1.0 when the extracted answer is equivalent to the ground truth (or to one of a list of them), else 0.0."""
    return float(_is_right(extract_solution(solution_str), ground_truth))


def compute_score_dapo(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """DAPO's rule reward: 1.0 for an equivalent answer, -1.0 otherwise (Yu et al. 2025, arXiv:2503.14476, equation 7).

    Returns ``score``, ``acc`` (bool) and ``pred``, the extracted answer ("" when there is none), for majority votes.
    """
    answer = extract_solution(solution_str)
    right = _is_right(answer, ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer or ""}


def _is_right(answer: str | None, ground_truth: Any) -> bool:
    if answer is None:
        return False
    several = isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str)
    return any(is_equivalent(answer, gold) for gold in (ground_truth if several else [ground_truth]))


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text.strip("$ "))
