"""Names of advantage estimators and policy losses, the built-in ones and those of users' files."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.algorithms.masked import as_mask
from verl.errors import ConfigError
from verl.metrics import Metrics
from verl.notices import notice


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss: call it like the function that was registered.

    ``prepare(old_log_prob, log_prob, advantages, response_mask, config, generator_seed)`` is None for most. Where it is
    not, the loss depends on statistics over all rows of a mini-batch: run it once over the whole mini-batch with
    detached log-probs, and give each micro-batch its rows of the result as ``selection=``.
    """

    name: str
    fn: Callable[..., tuple[Tensor, Any]]
    prepare: Callable[..., Tensor] | None = None

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
        **selection: Tensor | None,
    ) -> tuple[Tensor, Metrics]:
        optional = {"rollout_is_weights": rollout_is_weights, **selection}
        known, _, takes_any = accepted(self.fn)
        unknown = [name for name, value in optional.items() if value is not None and name not in known]
        if unknown and not takes_any:
            raise ConfigError(f"policy loss {self.name!r} takes no {' or '.join(unknown)}; add the parameter to it")
        result = self.fn(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            config=config,
            **{name: value for name, value in optional.items() if value is not None},
        )
        if not isinstance(result, tuple) or len(result) != 2:
            raise ConfigError(f"policy loss {self.name!r} must return (loss, metrics), got {type(result).__name__}")
        loss, metrics = result
        if not isinstance(metrics, Metrics):
            tokens = as_mask(response_mask).sum()
            plain, metrics = metrics, Metrics()
            for key, value in plain.items():
                metrics.add(key, value, weight=tokens)
        return loss, metrics


_estimators: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}
_losses: dict[str, PolicyLoss] = {}


def _plain(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def _claim(table: dict[str, Any], kind: str, name: str, fn: Callable[..., Any]) -> None:
    taken = table.get(name)
    taken = taken.fn if isinstance(taken, PolicyLoss) else taken
    if taken is not None and taken is not fn:
        raise ConfigError(
            f"{kind} {name!r} of {fn.__module__} is already registered by {taken.__module__}; choose another name"
        )


def register_adv_est(name: str | Enum) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: make an advantage estimator available as ``algorithm.adv_estimator=name``."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        _claim(_estimators, "advantage estimator", _plain(name), fn)
        _estimators[_plain(name)] = fn
        return fn

    return decorate


def register_policy_loss(
    name: str | Enum, prepare: Callable[..., Tensor] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: make a policy loss available as ``actor.policy_loss.loss_mode=name``."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        _claim(_losses, "policy loss", _plain(name), fn)
        _losses[_plain(name)] = PolicyLoss(_plain(name), fn, prepare)
        return fn

    return decorate


def _find(table: dict[str, Any], kind: str, key: str, name: str | Enum) -> Any:
    import verl.algorithms.advantages
    import verl.algorithms.policy_loss  # noqa: F401  (importing registers the built-in names)

    if _plain(name) not in table:
        near = difflib.get_close_matches(_plain(name), table, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{key}={_plain(name)!r}: no such {kind}; {hint}there are {', '.join(sorted(table))}")
    return table[_plain(name)]


def get_adv_estimator_fn(name: str | Enum) -> Callable[..., tuple[Tensor, Tensor]]:
    """The estimator registered under ``name``; ConfigError with the nearest name if there is none."""
    return _find(_estimators, "advantage estimator", "algorithm.adv_estimator", name)


def get_policy_loss_fn(name: str | Enum) -> PolicyLoss:
    """The policy loss registered under ``name``; ConfigError with the nearest name if there is none."""
    return _find(_losses, "policy loss", "actor.policy_loss.loss_mode", name)


def registered_names() -> tuple[list[str], list[str]]:
    """(estimator names, loss names), both sorted."""
    import verl.algorithms.advantages
    import verl.algorithms.policy_loss  # noqa: F401

    return sorted(_estimators), sorted(_losses)


def accepted(fn: Callable[..., Any]) -> tuple[set[str], set[str], bool]:
    """(all parameter names, the required ones, whether it takes ``**kwargs``) of a registered function."""
    parameters = inspect.signature(fn).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name for p in named}, {p.name for p in named if p.default is p.empty}, takes_any


def _forget(module_name: str, before: list[set[str]]) -> None:
    """Undo a failed import: the module, and what it had registered before it failed."""
    del sys.modules[module_name]
    for table, known in zip((_estimators, _losses), before, strict=True):
        for name in set(table) - known:
            del table[name]


def load_custom(path: str | Path) -> list[str]:
    """Import a user's Python file once, so that its decorators run; returns the names that it registered.

    Raises ConfigError if the file is missing, does not parse or fails on import; a notice if it registers nothing.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"custom algorithms file {file} does not exist; check the path")
    module_name = f"verl_custom_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return list(sys.modules[module_name].__dict__["__verl_registered__"])
    before = [set(names) for names in registered_names()]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"custom algorithms file {file} is not a Python file; give a path that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        _forget(module_name, before)
        raise ConfigError(
            f"custom algorithms file {file}, line {error.lineno}: {error.msg}; correct the syntax"
        ) from error
    except (Exception, SystemExit) as error:
        _forget(module_name, before)
        raise ConfigError(f"custom algorithms file {file} failed on import: {type(error).__name__}: {error}") from error
    after = registered_names()
    names = sorted((set(after[0]) - before[0]) | (set(after[1]) - before[1]))
    module.__dict__["__verl_registered__"] = names
    if not names:
        notice(f"custom algorithms file {file} registers nothing; decorate with register_adv_est(name) or the like")
    return names
