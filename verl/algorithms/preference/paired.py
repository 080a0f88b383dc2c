"""Losses of pairs against a reference model.

In all formulas h = beta * (log-ratio of chosen - log-ratio of rejected), c and r are the two log-ratios
log pi - log pi_ref, s is the logistic function, e the label smoothing. Each function returns (B,).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.masked import LOG_RATIO_LIMIT
from verl.algorithms.preference.inputs import PairLogps, RunningMean, Stats
from verl.algorithms.preference.registry import register_preference_loss
from verl.algorithms.preference.settings import PreferenceSettings


def smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log s(h) - e log s(-h)."""
    if label_smoothing == 0:
        return -logsigmoid(logits)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


@register_preference_loss("sigmoid", uses=("label_smoothing",))
@register_preference_loss("sigmoid_norm", uses=("label_smoothing",), average=True)
def sigmoid(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """-(1 - e) log s(h) - e log s(-h).

    DPO, arXiv:2305.18290 (e = 0); cDPO (Mitchell 2023) with e > 0. "sigmoid_norm" takes log-probs per token.
    """
    return smoothed_logistic(s.beta * x.margin, s.label_smoothing)


@register_preference_loss("hinge")
def hinge(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """max(0, 1 - h). SLiC, arXiv:2305.10425, with the log-ratio as score (RSO, arXiv:2309.06657)."""
    return torch.relu(1 - s.beta * x.margin)


@register_preference_loss("ipo", average=True)
def ipo(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """(c - r - 1 / (2 beta))^2 with log-probs per token. IPO, arXiv:2310.12036, eq. 17 (beta is its tau)."""
    return (x.margin - 1 / (2 * s.beta)).square()


@register_preference_loss("robust", uses=("label_smoothing",))
def robust(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """(-(1 - e) log s(h) + e log s(-h)) / (1 - 2 e): unbiased under flipped labels. arXiv:2403.00409."""
    logits, e = s.beta * x.margin, s.label_smoothing
    return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)


@register_preference_loss("exo_pair", uses=("label_smoothing",))
def exo_pair(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """s(h) (log s(h) - log(1 - e)) + s(-h) (log s(-h) - log e): reverse KL to the labels. EXO, arXiv:2402.00856."""
    logits, e = s.beta * x.margin, s.label_smoothing
    win = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-e))
    return win + torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(e))


@register_preference_loss("nca_pair")
def nca_pair(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """-log s(beta c) - log s(-beta c) / 2 - log s(-beta r) / 2. NCA, arXiv:2402.05369."""
    chosen, rejected = s.beta * x.chosen_ratio, s.beta * x.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def prepare_bco(x: PairLogps, s: PreferenceSettings, running: RunningMean) -> tuple[Stats, RunningMean]:
    """The reward shift delta: the running mean of all rewards seen, chosen and rejected, this mini-batch included."""
    running = running.updated(s.beta * torch.cat([x.chosen_ratio, x.rejected_ratio]))
    return {"delta": torch.full_like(x.policy_chosen, running.mean)}, running


@register_preference_loss("bco_pair", stats=("delta",), prepare=prepare_bco)
def bco_pair(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """-log s(beta c - delta) - log s(-(beta r - delta)). BCO, arXiv:2404.04656; delta from `prepare_bco`."""
    delta = stats["delta"]
    return -logsigmoid(s.beta * x.chosen_ratio - delta) - logsigmoid(delta - s.beta * x.rejected_ratio)


@register_preference_loss("sppo_hard")
def sppo_hard(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2: win probabilities 1 and 0. SPPO, arXiv:2405.00675, eq. 4.7."""
    return (x.chosen_ratio - 0.5 / s.beta).square() + (x.rejected_ratio + 0.5 / s.beta).square()


@register_preference_loss("apo_zero")
def apo_zero(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """1 - s(beta c) + s(beta r): chosen up, rejected down. APO, arXiv:2408.06266, eq. 7."""
    return torch.sigmoid(-s.beta * x.chosen_ratio) + torch.sigmoid(s.beta * x.rejected_ratio)


@register_preference_loss("apo_down")
def apo_down(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """s(beta c) + 1 - s(h): both down, rejected more. APO, arXiv:2408.06266, eq. 8."""
    return torch.sigmoid(s.beta * x.chosen_ratio) + torch.sigmoid(-s.beta * x.margin)


@register_preference_loss("discopop", uses=("discopop_tau",))
def discopop(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """-(1 - m) log s(h) + m exp(-h) with m = s(h / tau). DiscoPOP (LRML), arXiv:2406.08414, eq. 5.

    exp is taken of -h clamped to at most 20; where that binds, m is 0 to fp32 precision.
    """
    logits = s.beta * x.margin
    mix = torch.sigmoid(logits / s.discopop_tau)
    return -logsigmoid(logits) * (1 - mix) + torch.exp((-logits).clamp(max=LOG_RATIO_LIMIT)) * mix
