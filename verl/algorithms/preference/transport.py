"""AOT: stochastic dominance of chosen over rejected, by sorting over the whole mini-batch (arXiv:2406.05882).

Sorted values of rank k are compared with one another. A row only needs the value of its own rank on the other side,
which `prepare_*` finds once for the whole mini-batch; so micro-batches sum to the whole, in value and in gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.preference.inputs import PairLogps, RunningMean, Stats
from verl.algorithms.preference.paired import smoothed_logistic
from verl.algorithms.preference.registry import register_preference_loss
from verl.algorithms.preference.settings import PreferenceSettings


def matched(values: Tensor, others: Tensor) -> Tensor:
    """(B,) for each row, that one of ``others`` which has the rank of the row's own value. Equal values: row order."""
    partners = torch.empty_like(others)
    partners[values.argsort(stable=True)] = others.sort().values
    return partners


def prepare_aot(x: PairLogps, s: PreferenceSettings, running: RunningMean) -> tuple[Stats, RunningMean]:
    """``ref_margin``: the reference's margin of equal rank."""
    assert x.ref_chosen is not None and x.ref_rejected is not None
    margins = x.policy_chosen - x.policy_rejected
    return {"ref_margin": matched(margins, x.ref_chosen - x.ref_rejected)}, running


@register_preference_loss("aot", "aot_pair", uses=("label_smoothing",), stats=("ref_margin",), prepare=prepare_aot)
def aot(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """Paired AOT: logistic loss of beta * (policy margin - reference margin of the same rank).

    The policy's margins log pi(chosen) - log pi(rejected) and the reference's are each sorted over the mini-batch.
    """
    return smoothed_logistic(s.beta * (x.policy_chosen - x.policy_rejected - stats["ref_margin"]), s.label_smoothing)


def prepare_aot_unpaired(x: PairLogps, s: PreferenceSettings, running: RunningMean) -> tuple[Stats, RunningMean]:
    """``rejected_match``: the rejected ratio of the rank of the row's chosen one; ``chosen_match``: the reverse."""
    chosen, rejected = x.chosen_ratio, x.rejected_ratio
    return {"rejected_match": matched(chosen, rejected), "chosen_match": matched(rejected, chosen)}, running


@register_preference_loss(
    "aot_unpaired",
    uses=("label_smoothing",),
    stats=("rejected_match", "chosen_match"),
    prepare=prepare_aot_unpaired,
)
def aot_unpaired(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """Unpaired AOT: logistic loss of beta * (chosen ratio - rejected ratio of the same rank).

    Both partners of a rank carry gradient, but stand in different rows. The row of the chosen one has the value and
    the gradient to its own ratio; the row of the rejected one adds its gradient, with value 0.
    """
    own = smoothed_logistic(s.beta * (x.chosen_ratio - stats["rejected_match"]), s.label_smoothing)
    partner = smoothed_logistic(s.beta * (stats["chosen_match"] - x.rejected_ratio), s.label_smoothing)
    return own + (partner - partner.detach())
