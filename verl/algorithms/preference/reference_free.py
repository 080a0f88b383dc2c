"""Losses of pairs without a reference model; p_c and p_r are log pi(chosen) and log pi(rejected)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.preference.inputs import PairLogps, Stats
from verl.algorithms.preference.paired import smoothed_logistic
from verl.algorithms.preference.registry import register_preference_loss
from verl.algorithms.preference.settings import PreferenceSettings

# A response of probability 1 has infinite odds; log-probs per token are kept below this.
HIGHEST_LOG_PROB = -1e-6


@register_preference_loss("simpo", needs_reference=False, average=True, uses=("label_smoothing", "simpo_gamma"))
def simpo(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """-log s(beta (p_c - p_r) - gamma), log-probs per token. SimPO, arXiv:2405.14734."""
    return smoothed_logistic(s.beta * (x.policy_chosen - x.policy_rejected) - s.simpo_gamma, s.label_smoothing)


@register_preference_loss("cpo", needs_reference=False, uses=("label_smoothing", "cpo_alpha"))
def cpo(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """-log s(beta (p_c - p_r)), summed log-probs; `pair_loss` adds cpo_alpha * SFT term. CPO, arXiv:2401.08417."""
    return smoothed_logistic(s.beta * (x.policy_chosen - x.policy_rejected), s.label_smoothing)


def log1mexp(values: Tensor) -> Tensor:
    """log(1 - exp(v)) for v < 0, exact near 0 and far from it."""
    values = values.clamp(max=HIGHEST_LOG_PROB)
    near = torch.log(-torch.expm1(values))
    far = torch.log1p(-torch.exp(values))
    return torch.where(values > -math.log(2), near, far)


@register_preference_loss("orpo", needs_reference=False, average=True)
def orpo(x: PairLogps, s: PreferenceSettings, stats: Stats) -> Tensor:
    """-p_c - beta log s(log odds(chosen) - log odds(rejected)), log-probs per token, odds = p / (1 - p).

    ORPO, arXiv:2403.07691, eq. 6 and 7 (beta is its lambda). The first term is its SFT loss.
    """
    chosen, rejected = x.policy_chosen, x.policy_rejected
    log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
    return -chosen - s.beta * logsigmoid(log_odds)
