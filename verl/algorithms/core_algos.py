"""The functions of ``verl.trainer.ppo.core_algos`` under the names that public scripts import; all thin."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from verl.algorithms import advantages as _advantages
from verl.algorithms import policy_loss as _policy_loss
from verl.algorithms.aggregation import GlobalCounts, agg_loss
from verl.algorithms.entropy import entropy_from_logits
from verl.algorithms.kl import kl_penalty
from verl.algorithms.kl_controller import AdaptiveKLController, FixedKLController, get_kl_controller
from verl.algorithms.masked import as_mask, clean
from verl.algorithms.registry import (
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from verl.algorithms.value_loss import value_loss

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_policy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]

compute_policy_loss_vanilla = _policy_loss.vanilla
compute_policy_loss_gspo = _policy_loss.gspo
compute_policy_loss_sapo = _policy_loss.sapo
compute_policy_loss_gpg = _policy_loss.gpg
compute_policy_loss_clip_cov = _policy_loss.clip_cov
compute_policy_loss_kl_cov = _policy_loss.kl_cov
compute_policy_loss_geo_mean = _policy_loss.geo_mean
compute_policy_loss_cispo = _policy_loss.cispo


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(whitened advantages, returns), (B, R)."""
    return _advantages.gae(token_level_rewards, response_mask, values=values, gamma=gamma, lam=lam)


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    return _advantages.grpo(
        token_level_rewards,
        response_mask,
        index=index,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        config=config,
    )


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    return _advantages.grpo_passk(
        token_level_rewards,
        response_mask,
        index=index,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        config=config,
    )


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None
) -> tuple[Tensor, Tensor]:
    return _advantages.rloo(token_level_rewards, response_mask, index=index, config=config)


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None
) -> tuple[Tensor, Tensor]:
    return _advantages.opo(token_level_rewards, response_mask, index=index, config=config)


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, f_norm: float = 1.0, config: Any = None
) -> tuple[Tensor, Tensor]:
    return _advantages.gpg(token_level_rewards, response_mask, index=index, f_norm=f_norm, config=config)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None
) -> tuple[Tensor, Tensor]:
    return _advantages.reinforce_plus_plus(token_level_rewards, response_mask, config=config)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None
) -> tuple[Tensor, Tensor]:
    return _advantages.reinforce_plus_plus_baseline(token_level_rewards, response_mask, index=index, config=config)


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None
) -> tuple[Tensor, Tensor]:
    return _advantages.remax(token_level_rewards, response_mask, reward_baselines=reward_baselines, config=config)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, float]:
    """(loss, clip fraction), with verl's denominators: see `agg_loss`."""
    counts = None
    if batch_num_tokens is not None or global_batch_size is not None:
        local = GlobalCounts.of(response_mask)
        tokens = local.tokens if batch_num_tokens is None else float(batch_num_tokens)
        counts = GlobalCounts(tokens, local.sequences if global_batch_size is None else float(global_batch_size))
    elif dp_size > 1:
        raise ValueError(f"{loss_agg_mode} over {dp_size} ranks needs the global counts of the optimizer step")
    loss, metrics = value_loss(
        vpreds, returns, values, response_mask, cliprange_value, loss_agg_mode, counts, loss_scale_factor
    )
    return loss * dp_size, metrics.results().get("critic/vf_clipfrac", 0.0)


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregated entropy of softmax(logits (B, R, V))."""
    valid = as_mask(response_mask).unsqueeze(-1).expand_as(logits)
    return agg_loss(entropy_from_logits(clean(logits, valid)), response_mask, loss_agg_mode)


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Scores minus ``kl_ratio`` times the k1 estimate of the KL; prefer `rewards_shaping.apply_kl_penalty`."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float = 0.2,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, float, float, float]:
    """The vanilla loss with explicit bounds: (loss, clip fraction, approximate KL, lower clip fraction)."""
    bounds = {"clip_ratio": cliprange, "clip_ratio_low": cliprange_low, "clip_ratio_high": cliprange_high}
    loss, metrics = _policy_loss.vanilla(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        {**bounds, "clip_ratio_c": clip_ratio_c},
    )
    found = metrics.results()
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return (loss, *(found.get(name, 0.0) for name in names))
