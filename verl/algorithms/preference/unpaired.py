"""Losses of single responses labelled desirable or undesirable. u is log pi - log pi_ref of the response."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.preference.inputs import RunningMean, Stats, UnpairedLogps
from verl.algorithms.preference.registry import register_preference_loss
from verl.algorithms.preference.settings import PreferenceSettings

CLASS_WEIGHTS = ("desirable_weight", "undesirable_weight")


def _signed(x: UnpairedLogps, values: Tensor) -> Tensor:
    """+v for desirable rows, -v for undesirable ones."""
    return torch.where(x.label, values, -values)


def _weighted(x: UnpairedLogps, s: PreferenceSettings, losses: Tensor) -> Tensor:
    return torch.where(x.label, s.desirable_weight * losses, s.undesirable_weight * losses)


def prepare_kto(x: UnpairedLogps, s: PreferenceSettings, running: RunningMean) -> tuple[Stats, RunningMean]:
    """``kl``: max(0, mean over the mini-batch of log pi - log pi_ref of the mismatched responses)."""
    if x.policy_kl is None or x.ref_kl is None:
        raise ValueError("kto needs policy_kl and ref_kl, the log-probs of the mismatched responses")
    # A mean over no rows has no effect, as there is no row that reads it.
    kl = (x.policy_kl - x.ref_kl).sum() / max(len(x), 1)
    return {"kl": kl.clamp(min=0).expand(len(x)).clone()}, running


@register_preference_loss("kto", frame="sample", uses=CLASS_WEIGHTS, stats=("kl",), prepare=prepare_kto)
def kto(x: UnpairedLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """w (1 - s(+-beta (u - KL))), + for desirable, - for undesirable. KTO, arXiv:2402.01306, eq. 7 and 8.

    KL is one number for the whole mini-batch (`prepare_kto`), at least 0, without gradient.
    """
    return _weighted(x, s, torch.sigmoid(-_signed(x, s.beta * (x.ratio - stats["kl"]))))


@register_preference_loss("apo_zero_unpaired", frame="sample", uses=CLASS_WEIGHTS)
def apo_zero_unpaired(x: UnpairedLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """w (1 - s(beta u)) for desirable, w s(beta u) for undesirable. APO-zero, arXiv:2408.06266, unpaired."""
    return _weighted(x, s, torch.sigmoid(-_signed(x, s.beta * x.ratio)))


def prepare_bco_unpaired(x: UnpairedLogps, s: PreferenceSettings, running: RunningMean) -> tuple[Stats, RunningMean]:
    """The reward shift delta: the mean of the two classes' mean rewards here, averaged over all mini-batches seen.

    A mini-batch with one class only leaves the average as it is.
    """
    rewards = s.beta * x.ratio
    desirable, undesirable = rewards[x.label], rewards[~x.label]
    if len(desirable) and len(undesirable):
        running = running.updated((0.5 * (desirable.mean() + undesirable.mean())).reshape(1))
    return {"delta": torch.full_like(x.policy, running.mean)}, running


@register_preference_loss("bco", frame="sample", uses=CLASS_WEIGHTS, stats=("delta",), prepare=prepare_bco_unpaired)
def bco(x: UnpairedLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """-w log s(+-(beta u - delta)): a binary classifier of the label. BCO, arXiv:2404.04656."""
    return _weighted(x, s, -logsigmoid(_signed(x, s.beta * x.ratio - stats["delta"])))
