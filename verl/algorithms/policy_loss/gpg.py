"""GPG: the plain policy gradient (arXiv:2504.02546)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.algorithms.policy_loss.common import aggregate, inputs_of
from verl.algorithms.registry import register_policy_loss
from verl.algorithms.token_metrics import token_metrics
from verl.metrics import Metrics


@register_policy_loss("gpg")
def gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """-A log p: no ratio and no clip (``old_log_prob`` serves the ``actor/ppo_kl`` metric only)."""
    x = inputs_of(old_log_prob, log_prob, advantages, response_mask)
    metrics = token_metrics(x.mask, {"actor/ppo_kl": -x.log_ratio})
    return aggregate(-x.advantages * x.log_prob, x, loss_agg_mode, config, rollout_is_weights), metrics
