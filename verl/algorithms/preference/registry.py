"""Names of preference losses, and what each needs."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from verl.errors import ConfigError

Frame = Literal["pair", "sample"]


@dataclass(frozen=True)
class PreferenceLoss:
    """A registered loss.

    Attributes:
        fn: ``fn(inputs, settings, stats) -> (B,)`` losses; a `PairLogps` or, for frame "sample", an `UnpairedLogps`.
        frame: rows are pairs, or single labelled responses.
        needs_reference: log-probs of a reference model are needed.
        average: it works on log-probs per token, not summed ones.
        uses: those settings beside beta that change it; setting another one is an error.
        stats: names of the statistics over the whole mini-batch that ``fn`` reads, made by ``prepare``.
        prepare: ``prepare(inputs, settings, running) -> stats, running`` over the whole mini-batch; None if no stats.
    """

    name: str
    fn: Callable[..., Tensor]
    frame: Frame = "pair"
    needs_reference: bool = True
    average: bool = False
    uses: frozenset[str] = frozenset()
    stats: tuple[str, ...] = ()
    prepare: Callable[..., Any] | None = None


_losses: dict[str, PreferenceLoss] = {}


def register_preference_loss(
    *names: str, uses: tuple[str, ...] = (), **declared: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Decorator: make a loss available as ``loss_type``; the fields of `PreferenceLoss` are given by keyword."""

    def decorate(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        for name in names:
            if name in _losses and _losses[name].fn is not fn:
                raise ConfigError(f"preference loss {name!r} is already registered; choose another name")
            _losses[name] = PreferenceLoss(name, fn, uses=frozenset(uses), **declared)
        return fn

    return decorate


def _load() -> None:
    import verl.algorithms.preference.paired
    import verl.algorithms.preference.reference_free
    import verl.algorithms.preference.transport
    import verl.algorithms.preference.unpaired  # noqa: F401  (importing registers the built-in names)


def preference_loss_names(frame: Frame | None = None) -> list[str]:
    """All names, or those of one frame, sorted."""
    _load()
    return sorted(name for name, loss in _losses.items() if frame in (None, loss.frame))


def get_preference_loss(name: str) -> PreferenceLoss:
    """The loss registered under ``name``; ConfigError with the nearest name if there is none."""
    _load()
    if name not in _losses:
        near = difflib.get_close_matches(name, _losses, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"loss_type={name!r}: no such preference loss; {hint}there are {', '.join(sorted(_losses))}")
    return _losses[name]
