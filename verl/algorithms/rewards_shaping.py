"""From scores to rewards: where they stand, which rows count, the KL penalty and DAPO's overlong penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.kl import kl_penalty as kl_estimate
from verl.algorithms.masked import as_mask, clean, masked_mean, upcast
from verl.errors import ConfigError, RewardError
from verl.metrics import Metrics

REWARDS_AT_MASKED = ("move_to_last", "drop")


def usable_rows(response_mask: Tensor, score_valid: Tensor | None = None) -> Tensor:
    """(B,) bool: rows with at least one trainable token whose reward did not fail."""
    usable = as_mask(response_mask).any(dim=-1)
    return usable if score_valid is None else usable & torch.as_tensor(score_valid).to(usable.device, torch.bool)


def settle_rewards(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    rewards_at_masked: str = "move_to_last",
    score_valid: Tensor | None = None,
) -> Tensor:
    """Token rewards (B, R) that stand at trainable tokens only; rows that are not usable get 0.

    ``move_to_last``: rewards at masked positions go to the row's last trainable token (an episode that ends with tool
    output keeps its verdict). ``drop``: they are left out (the tokens were rejected). What is not finite at a masked
    position is garbage, not a reward.

    Raises RewardError if a reward at a trainable token of a usable row is not finite.
    """
    if rewards_at_masked not in REWARDS_AT_MASKED:
        raise ConfigError(f"rewards_at_masked={rewards_at_masked!r}: use one of {', '.join(REWARDS_AT_MASKED)}")
    rewards = upcast(token_level_rewards)
    usable = usable_rows(response_mask, score_valid)
    trainable = as_mask(response_mask) & usable.unsqueeze(-1)
    settled = rewards.masked_fill(~trainable, 0.0)
    if bool(rewards.detach().sum().isfinite() & (rewards.count_nonzero() == settled.count_nonzero())):
        return settled  # the usual case: all is finite, and nothing stands elsewhere
    broken = (trainable & ~rewards.isfinite()).any(dim=-1)
    if bool(broken.any()):
        row = int(broken.nonzero()[0])
        raise RewardError(
            f"row {row} has a reward that is not finite; a failed reward must be marked with score_valid=False"
        )
    if rewards_at_masked == "move_to_last":
        stray = rewards.masked_fill(trainable | ~usable.unsqueeze(-1) | ~rewards.isfinite(), 0.0).sum(dim=-1)
        settled = torch.where(last_token(trainable), settled + stray.unsqueeze(-1), settled)
    return settled


def last_token(mask: Tensor) -> Tensor:
    """(B, R) bool: True at the last valid position of each row that has one."""
    valid = as_mask(mask)
    if not valid.shape[-1]:
        return valid
    number = torch.arange(1, valid.shape[-1] + 1, dtype=torch.int32, device=valid.device)
    return valid & (number == number.where(valid, 0).amax(-1, keepdim=True))


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    kl_penalty: str = "kl",
) -> tuple[Tensor, float, Metrics]:
    """(token_level_rewards, observed KL, metrics): scores minus ``kl_coef`` times the KL, at trainable tokens only.

    The observed KL is the mean over non-empty rows of their mean per token: what
    `AdaptiveKLController.update` takes. Metrics: ``actor/reward_kl_penalty`` (that KL) and ``.._coeff``.
    """
    mask = as_mask(response_mask)
    divergence = kl_estimate(old_log_probs.detach(), ref_log_prob.detach(), kl_penalty, mask)
    rewards = upcast(token_level_scores) - kl_coef * clean(divergence, mask)
    rows = mask.any(dim=-1)
    observed = float(masked_mean(masked_mean(divergence, mask, axis=-1), rows))
    metrics = Metrics()
    metrics.add("actor/reward_kl_penalty", observed, weight=float(rows.sum()))
    metrics.add("actor/reward_kl_penalty_coeff", kl_coef, reduce="last")
    return rewards, observed, metrics


def overlong_penalty(lengths: Tensor, max_resp_len: int, buffer_len: int, penalty_factor: float) -> Tensor:
    """DAPO's soft overlong punishment (B,), between -``penalty_factor`` and 0 (arXiv:2503.14476, equation 13).

    0 up to ``max_resp_len - buffer_len`` tokens, then linear down to -``penalty_factor`` at ``max_resp_len`` tokens.
    """
    if not 0 < buffer_len <= max_resp_len:
        raise ConfigError(f"overlong_buffer_cfg.len={buffer_len} must lie between 1 and max_resp_len={max_resp_len}")
    excess = (lengths.float() - (max_resp_len - buffer_len)) / buffer_len
    return -excess.clamp(0.0, 1.0) * penalty_factor
