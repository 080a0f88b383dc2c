"""One outcome per response, compared with the other responses to the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.groups import Groups
from verl.algorithms.masked import as_mask
from verl.algorithms.rewards_shaping import settle_rewards, usable_rows


@dataclass(frozen=True)
class Outcomes:
    """Row sums of the rewards, (B,) float64, with their groups and the (B, R) mask of tokens that may learn.

    The rule for groups of one, for every estimator: with nothing to compare with, the advantage is 0.
    """

    scores: np.ndarray
    groups: Groups
    trainable: Tensor
    dtype: torch.dtype

    @staticmethod
    def of(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Sequence[Any] | np.ndarray,
        score_valid: Tensor | None = None,
        rewards_at_masked: str = "move_to_last",
    ) -> Outcomes:
        mask = as_mask(response_mask)
        if len(index) != len(mask):
            raise ValueError(f"index has {len(index)} group ids for {len(mask)} rows")
        rewards = settle_rewards(token_level_rewards, mask, rewards_at_masked, score_valid)
        usable = usable_rows(mask, score_valid)
        scores = rewards.detach().cpu().double().sum(dim=-1).numpy()
        groups = Groups.of(index, usable.cpu().numpy())
        return Outcomes(scores, groups, mask & usable.unsqueeze(-1), rewards.dtype)

    def per_row(self, per_group: np.ndarray) -> np.ndarray:
        """A statistic (groups,) at each row, (B,)."""
        return per_group[self.groups.group_of]

    def centred(self, baseline: np.ndarray | None = None) -> np.ndarray:
        """Scores minus ``baseline`` (groups,) (default: the mean); exactly 0 where a group has no spread."""
        baseline = self.groups.means(self.scores) if baseline is None else baseline
        varied = self.per_row(self.groups.differs(self.scores))
        return np.where(varied, self.scores - self.per_row(baseline), 0.0)

    def spread(self, per_row: np.ndarray) -> Tensor:
        """One number per row (B,) at each of its trainable tokens, (B, R); 0 elsewhere."""
        column = torch.from_numpy(per_row).to(self.dtype).to(self.trainable.device).unsqueeze(-1)
        return column.expand(self.trainable.shape).masked_fill(~self.trainable, 0.0)
