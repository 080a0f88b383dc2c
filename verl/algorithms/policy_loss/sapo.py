"""SAPO: a smooth gate in place of the clip (arXiv:2511.20347)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.policy_loss.common import aggregate, inputs_of, per_sequence_mode
from verl.algorithms.registry import register_policy_loss
from verl.algorithms.settings import setting
from verl.algorithms.token_metrics import token_metrics
from verl.errors import ConfigError
from verl.metrics import Metrics


@register_policy_loss("sapo")
def sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """-A (4 / tau) sigmoid(tau (r - 1)) with tau = ``tau_pos`` for A > 0, else ``tau_neg`` (defaults 1.0, 1.05).

    At r = 1 its gradient is that of the plain surrogate. Always aggregated as seq-mean-token-mean.
    """
    tau_pos, tau_neg = float(setting(config, "tau_pos", 1.0)), float(setting(config, "tau_neg", 1.05))
    if tau_pos <= 0 or tau_neg <= 0:
        raise ConfigError(f"actor.tau_pos and actor.tau_neg must be positive, got {tau_pos} and {tau_neg}")
    mode = per_sequence_mode("sapo", loss_agg_mode)
    x = inputs_of(old_log_prob, log_prob, advantages, response_mask)
    tau = torch.full_like(x.advantages, tau_neg).masked_fill(x.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (x.ratio - 1.0)) * (4.0 / tau)
    metrics = token_metrics(x.mask, {"actor/ppo_kl": -x.log_ratio})
    return aggregate(-x.advantages * gate, x, mode, config, rollout_is_weights), metrics
