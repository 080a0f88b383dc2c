"""GSM8K: the number after the last ``####`` (strict), or the last number of the text (flexible).

Numbers are compared as numbers: ``42``, ``42.``, ``$42``, ``42.00`` are equal, and so are ``1,234`` and ``1234``.
"""

from __future__ import annotations

import math
import numbers
import re
from decimal import Decimal
from typing import Any

from verl.errors import RewardError

_NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+")
# Between the marker and the digits: blanks, Markdown stars, an opening of mathematics, a currency sign, a sign.
_LEADING_NUMBER = re.compile(rf"[\s*(:=\\$]*([-−]?)\s?\\?\$?\s?({_NUMBER.pattern})")
_MARKED_NUMBER = re.compile("####" + _LEADING_NUMBER.pattern)
_SIGN_BEFORE = re.compile(r"[-−]\\?\$?$")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer as a plain number (no separators, no currency sign), or None when there is none.

    ``strict`` takes the number right after the last ``####`` that has one, wherever that stands; ``flexible`` takes the
    last number of the text, whose minus counts as a sign only where it cannot be a subtraction.
    """
    if method == "strict":
        found = _MARKED_NUMBER.findall(solution_str)
        return _clean("".join(found[-1])) if found else None
    if method == "flexible":
        numbers_found = list(_NUMBER.finditer(solution_str))
        if not numbers_found:
            return None
        last = numbers_found[-1]
        return _sign(solution_str[: last.start()]) + _clean(last.group())
    raise RewardError(f"gsm8k method {method!r} does not exist: use 'strict' or 'flexible'")


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """``score`` for the right number, ``format_score`` for a wrong one, 0.0 when no answer could be extracted.

    ``ground_truth`` may be a number, or carry separators, a currency sign or a trailing dot.
    Raises :class:`RewardError` when it holds no number at all.
    """
    gold = _gold(ground_truth)
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return float(score if Decimal(answer) == gold else format_score)


def _gold(ground_truth: Any) -> Decimal:
    if isinstance(ground_truth, numbers.Real) and not isinstance(ground_truth, bool) and _is_finite(ground_truth):
        return Decimal(str(ground_truth))
    text = str(ground_truth)
    found = _LEADING_NUMBER.match(text.rpartition("####")[2])
    if found is None:
        raise RewardError(f"the gsm8k ground truth {text!r:.80} holds no number: repair reward_model.ground_truth")
    return Decimal(_clean("".join(found.groups())))


def _is_finite(number: numbers.Real) -> bool:
    return isinstance(number, int) or math.isfinite(number)


def _sign(before: str) -> str:
    """A minus, when the text in front of a number ends in a minus that is a sign and not a subtraction."""
    minus = _SIGN_BEFORE.search(before)
    if minus is None:
        return ""
    left = before[: minus.start()]
    subtraction = re.search(r"[\w)\]}.%]$|[\d)\]}%]\s+$", left)
    return "" if subtraction else "-"


def _clean(number: str) -> str:
    """Only digits, dot and sign: ``−1,234.50`` becomes ``-1234.50``."""
    return re.sub(r"[^\d.\-]", "", number.replace("−", "-"))
