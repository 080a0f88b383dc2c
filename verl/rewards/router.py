"""The default scorer: which rule belongs to which ``data_source``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from verl.errors import RewardError
from verl.rewards import arithmetic, code, gsm8k, overlap
from verl.rewards import math as math_rule

REFERENCE = "verl/reference"
_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_MATH_DAPO = ("math_dapo", "math", "math_dapo_reasoning")
_GSM8K_OPTIONS = ("method", "format_score", "score")
_CODE = ("codecontests", "apps", "codeforces", "taco")
# Options of verl's scorer for programs, passed along by scripts whatever the data. Programs run in our own sandbox, so
# only the limit has a meaning here.
_SANDBOX_OPTIONS = ("sandbox_fusion_url", "concurrent_semaphore", "memory_limit_mb")

_ROUTES: dict[str, Callable[..., Any]] = {
    "openai/gsm8k": gsm8k.compute_score,
    "verl/arithmetic": arithmetic.compute_score,
    REFERENCE: overlap.compute_score,
    **dict.fromkeys(_MATH, math_rule.compute_score),
    **dict.fromkeys(_MATH_DAPO, math_rule.compute_score_dapo),
    **dict.fromkeys(_CODE, code.compute_score),
}


def find_scorer(data_source: Any) -> Callable[..., Any] | None:
    """The built-in scorer of a data source, or None."""
    if isinstance(data_source, str) and data_source.startswith("aime"):
        return math_rule.compute_score_dapo
    return _ROUTES.get(data_source) if isinstance(data_source, str) else None


def check_data_sources(data_sources: Iterable[Any]) -> None:
    """Raise before anything is scored: :class:`RewardError` for a data source without a rule,
    :class:`verl.errors.MissingDependencyError` for one whose rule needs a package that is not installed."""
    checked: set[str] = set()
    for data_source in data_sources:
        if isinstance(data_source, str):  # anything else has no rule, and need not be hashable
            if data_source in checked:
                continue
            checked.add(data_source)
        scorer = find_scorer(data_source)
        if scorer is None:
            raise _no_rule(data_source)
        if scorer in (math_rule.compute_score, math_rule.compute_score_dapo):
            math_rule.require_math_verify()


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **options: Any
) -> float | dict[str, Any]:
    """The score of one response by the rule of its ``data_source``.

    ``openai/gsm8k`` reads the options ``method``, ``format_score`` and ``score``, programs read ``memory_limit_mb``.
    Raises :class:`RewardError` for a data source without a rule or an option that no rule knows.
    """
    unknown = [k for k in options if k not in _GSM8K_OPTIONS + _SANDBOX_OPTIONS]
    if unknown:
        raise RewardError(f"the default scorer has no option '{unknown[0]}': it has {', '.join(_GSM8K_OPTIONS)}")
    scorer = find_scorer(data_source)
    if scorer is None:
        raise _no_rule(data_source)
    if scorer is gsm8k.compute_score:
        return scorer(solution_str, ground_truth, **{k: v for k, v in options.items() if k in _GSM8K_OPTIONS})
    if scorer is code.compute_score:
        return _score_program(solution_str, ground_truth, options)
    return scorer(solution_str, ground_truth)


def _score_program(solution_str: str, ground_truth: Any, options: dict[str, Any]) -> dict[str, Any]:
    if options.get("sandbox_fusion_url"):
        raise RewardError(
            "sandbox_fusion_url is set, but programs run in the built-in sandbox: leave it out, or call your sandbox "
            "from a reward function of your own"
        )
    limit = options.get("memory_limit_mb")
    return code.compute_score(solution_str, ground_truth, **({} if limit is None else {"memory_limit_mb": limit}))


def _no_rule(data_source: Any) -> RewardError:
    return RewardError(
        f"no built-in reward for data_source {data_source!r:.60}: give reward_fn=... in Python, or set "
        "custom_reward_function.path (and .name) to a file with your compute_score, or use one of "
        f"{', '.join(_ROUTES)}, aime*"
    )
