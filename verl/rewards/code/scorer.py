"""The share of a problem's tests that the answer's program passes.

Three kinds of tests, as the public data sets have them: input and output texts (``inputs``, ``outputs``); a function to
call (``fn_name`` beside them); statements with ``assert`` (``assert_case``, or a text of code).
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from verl.errors import RewardError
from verl.rewards.code.sandbox import Limits, Outcome, run_program

_FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py", "")
_BUDGET_S = 40.0  # for all tests of an answer; below the reward runner's own limit of a row

_CALL = """
import json as _json, sys as _sys
_fn = {name!r}
_of = Solution() if _fn not in globals() and "Solution" in globals() else None
_value = (globals()[_fn] if _of is None else getattr(_of, _fn))(*_json.loads({arguments!r}))
_sys.stdout.write("\\n{mark}" + _json.dumps(_value))
"""
_ASSERT = """
{statements}
print("\\n{mark}")
"""


def extract_program(text: str) -> str | None:
    """The last fenced block of Python (or of no named language); None when there is none."""
    blocks = [code for language, code in _FENCE.findall(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks and blocks[-1].strip() else None


def compute_score(solution_str: str, ground_truth: Any, *, memory_limit_mb: int = 1024, case_s: float = 6.0) -> dict:
    """Run the answer's program on every test.

    Args:
        ground_truth: a mapping (or its JSON) with ``inputs`` and ``outputs``, and ``fn_name`` where a function is to be
            called; or with ``assert_case``, a list of statements; or a text of statements.
        memory_limit_mb, case_s: limits of each test. Tests that are not reached within 40 s in all count as failed.

    Returns:
        ``score``: the share of the tests that passed. ``acc``: all did. ``tests_timed_out``: how many ran out of time.

    Raises:
        RewardError: the ground truth holds no tests.
    """
    cases = _cases(ground_truth)
    program = extract_program(solution_str)
    if program is None:
        return {"score": 0.0, "acc": False, "tests_timed_out": 0}
    limits = Limits(wall_s=case_s, memory_bytes=memory_limit_mb << 20)
    deadline = time.monotonic() + _BUDGET_S
    passed = late = 0
    for case in cases:
        if time.monotonic() > deadline:
            late += 1
            continue
        right, outcome = case.run(program, limits)
        passed += right
        late += outcome.timed_out
    return {"score": passed / len(cases), "acc": passed == len(cases), "tests_timed_out": late}


class _TextCase:
    """The program reads a text and prints one."""

    def __init__(self, stdin: str, expected: str):
        self.stdin, self.expected = stdin, expected

    def run(self, program: str, limits: Limits) -> tuple[bool, Outcome]:
        outcome = run_program(program, self.stdin, limits)
        return outcome.returncode == 0 and same_output(outcome.stdout, self.expected), outcome


class _MarkedCase:
    """Statements after the program, at whose end a mark is printed that the program cannot know beforehand: leaving
    early with exit code 0 passes nothing."""

    def __init__(self, template: str, expected: Any = None, **fields: Any):
        self.template, self.expected, self.fields = template, expected, fields

    def run(self, program: str, limits: Limits) -> tuple[bool, Outcome]:
        mark = secrets.token_hex(16)
        outcome = run_program(program + "\n" + self.template.format(mark=mark, **self.fields), "", limits)
        _, found, after = outcome.stdout.rpartition("\n" + mark)
        if outcome.returncode != 0 or not found:
            return False, outcome
        return self.template is _ASSERT or _equal_values(after, self.expected), outcome


def _cases(ground_truth: Any) -> list[Any]:
    tests = ground_truth
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:  # not JSON: statements
            tests = {"assert_case": [ground_truth]} if ground_truth.strip() else {}
    if not isinstance(tests, Mapping):
        raise RewardError(f"the tests of a program are a mapping or its JSON, not {str(ground_truth)!r:.60}")
    cases: list[Any] = [_MarkedCase(_ASSERT, statements=code) for code in _listed(tests, "assert_case")]
    inputs, outputs = _listed(tests, "inputs"), _listed(tests, "outputs")
    if len(inputs) != len(outputs):
        raise RewardError(f"the tests of a program have {len(inputs)} inputs and {len(outputs)} outputs")
    name = tests.get("fn_name")
    for given, expected in zip(inputs, outputs, strict=True):
        if name:
            cases.append(_MarkedCase(_CALL, _value(expected), name=name, arguments=json.dumps(_arguments(given))))
        else:
            cases.append(_TextCase(_joined(given), _joined(expected)))
    if not cases:
        raise RewardError("a program's ground truth holds no tests: give inputs and outputs, or assert_case")
    return cases


def _listed(tests: Mapping, key: str) -> list[Any]:
    value = tests.get(key)
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _joined(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, (list, tuple)) else str(lines)


def _arguments(given: Any) -> list[Any]:
    """A list of arguments, or a text with one JSON value a line."""
    return [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)


def _value(expected: Any) -> Any:
    try:
        return json.loads(expected) if isinstance(expected, str) else expected
    except ValueError:
        return expected


def _equal_values(text: str, expected: Any) -> bool:
    value = json.loads(text)
    # some data sets wrap the one result in a list
    return _close(value, expected) or (isinstance(expected, list) and len(expected) == 1 and _close(value, expected[0]))


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return a == b
    decimal = isinstance(a, float) or isinstance(b, float)
    return a == b or (decimal and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9))


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs are equal word by word, line by line; decimals within 1e-6. Blank ends do not count."""
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    if "." not in a + b:  # whole numbers and names are equal or they are not
        return False
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False
