"""The loss of reward models: Bradley-Terry on the scores of two rival responses."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.masked import upcast
from verl.algorithms.preference.compute import _total, row_means
from verl.errors import ConfigError
from verl.metrics import Metrics


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, center_rewards_coefficient: float = 0.0
) -> Tensor:
    """(B,) -log s(chosen - rejected - margin) + coefficient * (chosen + rejected)^2.

    Bradley-Terry; the margin of Llama 2, arXiv:2307.09288, eq. 2; centering as in arXiv:2312.09244, which fixes the
    free constant of the scores at about 0. Raises ConfigError for a negative coefficient.
    """
    if not (math.isfinite(center_rewards_coefficient) and center_rewards_coefficient >= 0):
        raise ConfigError(f"center_rewards_coefficient={center_rewards_coefficient}: must be at least 0")
    chosen, rejected = upcast(chosen), upcast(rejected)
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -logsigmoid(difference) + center_rewards_coefficient * (chosen + rejected).square()


def reward_model_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    center_rewards_coefficient: float = 0.0,
    rows: float | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """A micro-batch of B pairs of scores: sum of `bradley_terry` / ``rows`` (pairs of the whole mini-batch).

    ``valid`` (B,) is False for filling rows. Metrics: ``rewards/{chosen,rejected,margins,accuracies}``, means over
    pairs (an equal pair counts as wrong), and ``rewards/{max,min}`` over all scores.
    """
    if valid is not None:
        chosen, rejected = (torch.where(valid, scores, torch.zeros_like(scores)) for scores in (chosen, rejected))
        margin = None if margin is None else torch.where(valid, margin, torch.zeros_like(margin))
    losses = bradley_terry(chosen, rejected, margin, center_rewards_coefficient)
    difference = chosen.detach() - rejected.detach()
    metrics = row_means(
        {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": difference,
            "rewards/accuracies": difference > 0,
        },
        valid,
    )
    scores = torch.cat([chosen.detach(), rejected.detach()] if valid is None else [chosen[valid], rejected[valid]])
    if scores.numel():
        metrics.add("rewards/max", float(scores.max()), reduce="max")
        metrics.add("rewards/min", float(scores.min()), reduce="min")
    return _total(losses, valid, rows), metrics
