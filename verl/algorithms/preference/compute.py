"""A micro-batch's share of a preference loss, with its metrics."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from verl.algorithms.preference.inputs import PairLogps, RunningMean, Stats, UnpairedLogps
from verl.algorithms.preference.registry import PreferenceLoss, get_preference_loss
from verl.algorithms.preference.settings import PreferenceSettings
from verl.errors import ConfigError
from verl.metrics import Metrics


def _pairs_for(loss: PreferenceLoss, x: PairLogps, s: PreferenceSettings) -> PairLogps:
    """The inputs as the loss takes them: without a reference it does not use, averaged where it averages."""
    if loss.frame != "pair":
        raise ConfigError(f"loss_type={loss.name} learns from labelled single responses, not from pairs")
    if not loss.needs_reference:
        x = replace(x, ref_chosen=None, ref_rejected=None)
    elif x.ref_chosen is None or x.ref_rejected is None:
        raise ValueError(f"{loss.name} needs ref_chosen and ref_rejected")
    return x.averaged() if s.average else x


def prepare(
    x: PairLogps | UnpairedLogps, s: PreferenceSettings, running: RunningMean | None = None
) -> tuple[Stats, RunningMean]:
    """The statistics over rows that the loss needs: once, over the GLOBAL mini-batch.

    Args:
        x: all rows of the mini-batch; its gradient is not used.
        running: the mean over earlier mini-batches, for the losses that have one ("bco_pair", "bco").

    Returns:
        statistics by name, each (B,) in the order of the rows (give each micro-batch its rows of them; empty for most
        losses), and the mean to go on with.
    """
    loss = get_preference_loss(s.loss_type)
    running = running or RunningMean()
    if loss.prepare is None:
        return {}, running
    x = x.detach().cleaned()
    if isinstance(x, PairLogps):
        x = _pairs_for(loss, x, s)
    elif loss.frame != "sample":
        raise ConfigError(f"loss_type={loss.name} learns from pairs, not from labelled single responses")
    rows = len(x)
    if x.valid is None:
        return loss.prepare(x, s, running)
    found, running = loss.prepare(x.select(x.valid), s, running)
    spread = {name: value.new_zeros(rows).masked_scatter(x.valid, value) for name, value in found.items()}
    return spread, running


def _check_stats(loss: PreferenceLoss, stats: Stats, rows: int) -> None:
    for name in loss.stats:
        if name not in stats or stats[name].shape != (rows,):
            raise ValueError(f"{loss.name} needs the statistic {name!r} for its {rows} rows: run prepare() first")


def _total(losses: Tensor, valid: Tensor | None, rows: float | None) -> Tensor:
    """Sum over real rows / rows of the whole mini-batch; 0 with zero gradient where there is none."""
    if valid is not None:
        losses = torch.where(valid, losses, torch.zeros_like(losses))
    count = rows if rows is not None else float(len(losses) if valid is None else valid.sum())
    return losses.sum() / count if count > 0 else losses.sum()


def pair_loss(
    x: PairLogps,
    s: PreferenceSettings,
    stats: Stats | None = None,
    rows: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """A micro-batch of B pairs: sum of their losses / ``rows``.

    Args:
        stats: its rows of what `prepare` gave for the whole mini-batch.
        rows: pairs of the whole mini-batch, over all micro-batches and ranks; None: this micro-batch is all.
        weights: (B,) WPO weights (products of the two rows'), needed with ``use_weighting``. They multiply the
            preference loss, not the SFT term.

    Metrics, means over pairs: ``rewards/{chosen,rejected,margins,accuracies}`` (beta times the log-ratio as the loss
    takes it, summed or per token; an equal pair counts as wrong), ``logps/{chosen,rejected}`` (summed), and where there
    is one the SFT term ``nll_loss`` before its weight, and ``weights``.
    """
    loss = get_preference_loss(s.loss_type)
    if (weights is None) == s.use_weighting:
        raise ValueError("use_weighting and weights go together")
    _check_stats(loss, stats or {}, len(x))
    x = x.cleaned()
    seen = _pairs_for(loss, x, s)
    losses = loss.fn(seen, s, stats or {})
    extra = {}
    if weights is not None:
        weights = weights if x.valid is None else torch.where(x.valid, weights, torch.ones_like(weights))
        losses, extra["weights"] = losses * weights.detach(), weights
    alpha = (s.rpo_alpha or 0.0) + (s.cpo_alpha if "cpo_alpha" in loss.uses else 0.0)
    if alpha:
        extra["nll_loss"] = -x.averaged().policy_chosen
        losses = losses + alpha * extra["nll_loss"]
    rewards = {"chosen": s.beta * seen.chosen_ratio, "rejected": s.beta * seen.rejected_ratio}
    margins = rewards["chosen"] - rewards["rejected"]
    values = {f"rewards/{side}": value for side, value in rewards.items()}
    values |= {"rewards/margins": margins, "rewards/accuracies": margins > 0}
    values |= {"logps/chosen": x.policy_chosen, "logps/rejected": x.policy_rejected, **extra}
    return _total(losses, x.valid, rows), row_means(values, x.valid)


def unpaired_loss(
    x: UnpairedLogps, s: PreferenceSettings, stats: Stats | None = None, rows: float | None = None
) -> tuple[Tensor, Metrics]:
    """A micro-batch of B labelled responses: sum of their losses / ``rows`` (of the whole mini-batch, both classes).

    Metrics: ``rewards/{chosen,rejected}`` and ``logps/{chosen,rejected}`` are means over the rows of a class, and
    absent where it has none; ``kl`` for kto. `with_margin` adds the margin once all micro-batches are merged.
    """
    loss = get_preference_loss(s.loss_type)
    if loss.frame != "sample":
        raise ConfigError(f"loss_type={loss.name} learns from pairs, not from labelled single responses")
    _check_stats(loss, stats or {}, len(x))
    x = x.cleaned()
    losses = loss.fn(x, s, stats or {})
    valid = torch.ones_like(x.label) if x.valid is None else x.valid
    metrics = Metrics()
    for side, members in (("chosen", x.label & valid), ("rejected", ~x.label & valid)):
        metrics.merge(row_means({f"rewards/{side}": s.beta * x.ratio, f"logps/{side}": x.policy}, members))
    if "kl" in loss.stats:
        assert stats is not None
        metrics.merge(row_means({"kl": stats["kl"]}, valid))
    return _total(losses, x.valid, rows), metrics


def with_margin(metrics: Metrics) -> Metrics:
    """``metrics`` of `unpaired_loss`, merged over the window, plus ``rewards/margins`` where both classes occurred."""
    if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
        metrics.add("rewards/margins", metrics["rewards/chosen"] - metrics["rewards/rejected"], reduce="last")
    return metrics


def row_means(values: dict[str, Tensor], valid: Tensor | None) -> Metrics:
    """Means of (B,) tensors over the valid rows, weighted by their number; nothing is read from the device."""
    first = next(iter(values.values()))
    valid = torch.ones_like(first, dtype=torch.bool) if valid is None else valid
    count = valid.sum()
    metrics = Metrics()
    for name, value in values.items():
        metrics.add_total(name, torch.where(valid, value.detach().float(), 0.0).sum(), count)
    return metrics
