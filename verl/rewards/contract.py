"""The reward-function contract: what a user may write, how it is recognised, and what its answer means.

Three styles are understood, told apart by the signature alone:

* ``row``: verl's ``compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)``,
  any subset of those names, called with keywords, sync or async, once per response.
* ``view``: ``fn(batch)``, called with the :class:`verl.rewards.BatchView` of many responses.
* ``columns``: ``fn(data_sources, solution_strs, ground_truths, extra_infos)``, the lists of verl's batch manager.

This module must not import torch: worker processes import it and have to start quickly.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl.errors import RewardError

ROW_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
COLUMN_PARAMETERS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_LARGEST_SCORE = 3.4e38
Style = Literal["row", "view", "columns"]
_FORMS = "write compute_score(data_source, solution_str, ground_truth, extra_info=None) for one row, or fn(batch)"


@dataclass
class RewardResult:
    """The outcome of one row.

    ``score`` is a finite float, or None when there is none: with ``error`` the row failed, without it the function
    abstained (returned None). ``extra`` holds whatever else the function reported.
    """

    score: float | None
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def cause(self) -> str | None:
        """The last line of ``error``: the exception without its traceback."""
        return self.error.strip().splitlines()[-1] if self.error else None


@dataclass(frozen=True)
class RewardFunction:
    """A user's function after inspection. ``accepts`` is None when it takes any keyword.

    ``origin`` is (file, name in it) for one loaded by :func:`verl.rewards.load_reward_function`, else None.
    """

    fn: Callable[..., Any]
    name: str
    style: Style
    is_async: bool
    accepts: frozenset[str] | None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    origin: tuple[str, str] | None = None

    def accepted(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """What it takes of the ``offered`` keyword arguments."""
        return {k: v for k, v in offered.items() if self.accepts is None or k in self.accepts}


def inspect_function(
    fn: Callable[..., Any], kwargs: Mapping[str, Any] | None = None, *, origin: tuple[str, str] | None = None
) -> RewardFunction:
    """Classify ``fn`` by its signature and check that everything it requires will be passed.

    Raises :class:`RewardError` for something that is not callable, a signature of none of the three styles, a required
    parameter that nobody gives, or a keyword in ``kwargs`` that it does not take.
    """
    name = function_name(fn)
    if not callable(fn):
        raise RewardError(f"the reward function must be callable, got {type(fn).__name__} ({fn!r}): {_FORMS}")
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):
        raise RewardError(f"the signature of reward function '{name}' cannot be read; wrap it: {_FORMS}") from None
    kwargs = dict(kwargs or {})
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = {p.name for p in named}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    style = _style(name, parameters, takes_any, kwargs)
    offered = {"row": ROW_PARAMETERS, "columns": COLUMN_PARAMETERS, "view": ()}[style]
    if style == "view":
        if parameters[0].name in kwargs:
            raise RewardError(
                f"reward function '{name}' gets the batch as '{parameters[0].name}', which reward_kwargs sets too: "
                "leave it out there"
            )
        named = named[1:] if named and parameters[0] is named[0] else named
        names = {p.name for p in named}
    missing = [p.name for p in named if p.default is p.empty and p.name not in offered and p.name not in kwargs]
    if missing:
        raise RewardError(
            f"reward function '{name}' requires {_quoted(missing)}, which nobody passes: give a default value, or the "
            f"value in custom_reward_function.reward_kwargs"
        )
    unknown = [] if takes_any else [k for k in kwargs if k not in names]
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(names), n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise RewardError(f"reward function '{name}' takes no parameter {_quoted(unknown)} from reward_kwargs{hint}")
    return RewardFunction(
        fn=fn,
        name=name,
        style=style,
        is_async=_is_async(fn),
        accepts=None if takes_any else frozenset(names),
        kwargs=kwargs,
        origin=origin,
    )


def function_name(fn: Any) -> str:
    """A name to show for any callable: partials show what they wrap, instances their class."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if inspect.isroutine(fn):
        return getattr(fn, "__qualname__", repr(fn))
    return type(fn).__qualname__


def _style(name: str, parameters: Sequence[inspect.Parameter], takes_any: bool, kwargs: Mapping[str, Any]) -> Style:
    names = {p.name for p in parameters}
    if names & set(ROW_PARAMETERS):
        return "row"
    if names & set(COLUMN_PARAMETERS):
        return "columns"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    required = [
        p for p in positional if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in kwargs
    ]
    if len(required) == 1 or (not required and positional and positional[0].name == "batch"):
        return "view"
    if not required and len(positional) == 1:
        return "view"
    if not parameters or required or not takes_any:
        raise RewardError(f"reward function '{name}' has parameters {_quoted([p.name for p in parameters])}: {_FORMS}")
    return "row"


def _is_async(fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{n}'" for n in names) or "none at all"


def normalise_result(value: Any, *, take_first: bool = False) -> RewardResult:
    """What one returned value means.

    A number (int, bool, numpy scalar, 0-d array or tensor) is the score, with extra info ``{"acc": score}``. A mapping
    needs the key ``score``; all its keys are extra info. A RewardResult is itself. None means "no opinion".
    ``take_first`` accepts the first element of a tuple or list (built-in scorers only). Anything else, NaN and
    infinities give a result with ``error``.
    """
    if value is None:
        return RewardResult(None)
    if isinstance(value, RewardResult):
        return value
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = _quoted(str(k)[:40] for k in list(value)[:10])
            return RewardResult(None, error=f"returned a dict without the key 'score' (it has {keys})")
        inner = normalise_result(value["score"])
        if inner.score is None:
            return RewardResult(None, error=f"key 'score': {inner.error or 'is None'}")
        return RewardResult(inner.score, {str(k): plain(v) for k, v in value.items()})
    if take_first and isinstance(value, (tuple, list)) and value:
        value = value[0]
    value = plain(value)
    if isinstance(value, (bool, int, float)):
        if not is_finite(value):
            return RewardResult(None, error=f"returned {_shown(value)}, which is not a finite float32 number")
        return RewardResult(float(value), {"acc": float(value)})
    return RewardResult(
        None, error=f"returned {type(value).__name__} {_shown(value)}; return a number or a dict with the key 'score'"
    )


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return "an integer beyond all bounds"  # Python refuses to write out very long ones
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_finite(value: float) -> bool:
    """Whether a number can be held by a float32; False for NaN, infinities and endless integers."""
    return abs(value) <= _LARGEST_SCORE


def plain(value: Any) -> Any:
    """A numpy scalar, 0-d array, one-number tensor or other real number as int, float or bool; the rest unchanged."""
    if isinstance(value, (bool, int, float, str)):
        return value
    # Looked up, not imported: a value of these types exists only if the library is loaded already.
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.item() if value.ndim == 0 else value
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        return value.item() if value.ndim == 0 else value
    if isinstance(value, numbers.Real):
        return float(value)
    return value


def normalise_batch(function: RewardFunction, value: Any, rows: int) -> list[RewardResult]:
    """The results of a batch function: exactly ``rows`` numbers or dicts, as list, tuple, array or tensor (B,).

    Raises :class:`RewardError` naming the function when there are more, fewer, or something else altogether.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    shape: tuple[int, ...] | None = None
    if torch is not None and isinstance(value, torch.Tensor):
        shape, value = tuple(value.shape), value.detach().cpu().tolist()
    elif numpy is not None and isinstance(value, numpy.ndarray):
        shape, value = tuple(value.shape), value.tolist()
    elif not isinstance(value, (list, tuple)):
        raise RewardError(
            f"reward function '{function.name}' returned {type(value).__name__}; it must return {rows} numbers, one "
            f"for each row of the batch (a list, an array or a tensor of shape ({rows},))"
        )
    if (shape is not None and len(shape) != 1) or len(value) != rows:
        got = f"shape {shape}" if shape is not None and len(shape) != 1 else f"{len(value)} values"
        raise RewardError(f"reward function '{function.name}' returned {got}, expected {rows}: one for each row")
    return [normalise_result(v) for v in value]
