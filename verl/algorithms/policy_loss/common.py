"""What the policy losses share: cleaned inputs, the clip range, the rollout weights and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from verl.algorithms.aggregation import agg_loss
from verl.algorithms.masked import LOG_RATIO_LIMIT, as_mask, clean
from verl.algorithms.settings import setting
from verl.errors import ConfigError
from verl.notices import notice


@dataclass
class Inputs:
    """Inputs of a policy loss, (B, R) each, in float32 or float64 and 0 at masked positions."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    log_ratio: Tensor  # log_prob - old_log_prob, clamped to +-20

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()


def inputs_of(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Inputs:
    """Clean the four tensors; only ``log_prob`` carries a gradient. Raises ValueError if the shapes differ."""
    shapes = {tuple(t.shape) for t in (old_log_prob, log_prob, advantages, response_mask)}
    if len(shapes) != 1:
        raise ValueError(f"old_log_prob, log_prob, advantages and response_mask differ in shape: {sorted(shapes)}")
    mask = as_mask(response_mask)
    old, new = clean(old_log_prob.detach(), mask), clean(log_prob, mask)
    log_ratio = (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return Inputs(old, new, clean(advantages.detach(), mask), mask, log_ratio)


def clip_range(config: Any) -> tuple[float, float]:
    """(low, high): ``clip_ratio_low`` / ``clip_ratio_high`` where they are set, else ``clip_ratio`` (default 0.2)."""
    both = setting(config, "clip_ratio", 0.2)
    return float(setting(config, "clip_ratio_low", both)), float(setting(config, "clip_ratio_high", both))


def dual_clip(config: Any, default: float = 3.0) -> float:
    """``clip_ratio_c``, which must be above 1."""
    bound = float(setting(config, "clip_ratio_c", default))
    if bound <= 1.0:
        raise ConfigError(f"actor.clip_ratio_c={bound} must be greater than 1: it bounds the ratio of bad actions")
    return bound


def aggregate(
    per_token: Tensor, inputs: Inputs, loss_agg_mode: str, config: Any, rollout_is_weights: Tensor | None
) -> Tensor:
    """Weigh the per-token losses by the (detached) rollout correction and aggregate them."""
    if rollout_is_weights is not None:
        per_token = per_token * clean(rollout_is_weights.detach(), inputs.mask)
    scale = setting(config, "loss_scale_factor", None)
    return agg_loss(per_token, inputs.mask, loss_agg_mode, loss_scale_factor=scale)


def per_sequence_mode(name: str, loss_agg_mode: str) -> str:
    """The aggregation of the losses that are defined per sequence; tells the user when another one was asked for."""
    if loss_agg_mode != "seq-mean-token-mean":
        notice(f"loss_mode={name} averages per sequence (seq-mean-token-mean); loss_agg_mode={loss_agg_mode} is unused")
    return "seq-mean-token-mean"
