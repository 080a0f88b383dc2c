"""What the losses are given: log-probs of responses, a number a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.masked import upcast

Stats = dict[str, Tensor]
"""Statistics over the whole mini-batch, spread over its rows: each a (B,) tensor without gradient."""

_Rows = TypeVar("_Rows", "PairLogps", "UnpairedLogps")


def _check_rows(inputs: Any, first: str) -> None:
    shape = getattr(inputs, first).shape
    if len(shape) != 1:
        raise ValueError(f"{first} must have one number a row, got shape {tuple(shape)}")
    for item in fields(inputs):
        value = getattr(inputs, item.name)
        if value is not None and value.shape != shape:
            raise ValueError(f"{item.name} has shape {tuple(value.shape)}, {first} has {tuple(shape)}")


def _map(inputs: _Rows, function: Callable[[Tensor], Tensor]) -> _Rows:
    changed = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    values: dict[str, Any] = {name: None if value is None else function(value) for name, value in changed.items()}
    return replace(inputs, **values)


def _cleaned(inputs: _Rows) -> _Rows:
    """Floating-point values upcast; rows that are not valid hold 0 (lengths 1), whatever stood there."""
    valid = inputs.valid

    def clean(value: Tensor) -> Tensor:
        value = upcast(value) if value.is_floating_point() else value
        if valid is None or value.dtype == torch.bool:
            return value
        filling = torch.zeros_like(value) if value.is_floating_point() else torch.ones_like(value)
        return torch.where(valid, value, filling)

    return _map(inputs, clean)


@dataclass(frozen=True)
class PairLogps:
    """B pairs. Log-probs are summed over each response's trained tokens.

    Attributes:
        policy_chosen, policy_rejected: (B,) with gradient.
        ref_chosen, ref_rejected: (B,) of the reference; None for losses without one.
        chosen_lengths, rejected_lengths: (B,) integer, trained tokens; None where no average is taken.
        valid: (B,) bool; False marks filling rows, which have loss 0 and enter no statistic. None: all are pairs.
    """

    policy_chosen: Tensor
    policy_rejected: Tensor
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None
    chosen_lengths: Tensor | None = None
    rejected_lengths: Tensor | None = None
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        _check_rows(self, "policy_chosen")

    def __len__(self) -> int:
        return len(self.policy_chosen)

    def select(self, index: Tensor) -> PairLogps:
        """The rows at ``index`` (numbers or a bool mask)."""
        return _map(self, lambda value: value[index])

    def detach(self) -> PairLogps:
        return _map(self, Tensor.detach)

    def cleaned(self) -> PairLogps:
        return _cleaned(self)

    def averaged(self) -> PairLogps:
        """Log-probs per trained token instead of summed."""
        if self.chosen_lengths is None or self.rejected_lengths is None:
            raise ValueError("averaged log-probs need chosen_lengths and rejected_lengths")
        chosen, rejected = self.chosen_lengths.clamp(min=1), self.rejected_lengths.clamp(min=1)
        return replace(
            self,
            policy_chosen=self.policy_chosen / chosen,
            policy_rejected=self.policy_rejected / rejected,
            ref_chosen=None if self.ref_chosen is None else self.ref_chosen / chosen,
            ref_rejected=None if self.ref_rejected is None else self.ref_rejected / rejected,
        )

    @property
    def chosen_ratio(self) -> Tensor:
        """(B,) log pi(chosen) - log pi_ref(chosen); without a reference, log pi(chosen)."""
        return self.policy_chosen if self.ref_chosen is None else self.policy_chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.policy_rejected if self.ref_rejected is None else self.policy_rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        """(B,) chosen ratio - rejected ratio: beta times this is DPO's reward margin."""
        return self.chosen_ratio - self.rejected_ratio


@dataclass(frozen=True)
class UnpairedLogps:
    """B labelled responses; log-probs are summed over each response's trained tokens.

    Attributes:
        policy, ref: (B,) of the response.
        label: (B,) bool, True = desirable.
        policy_kl, ref_kl: (B,) of the mismatched response (another row's response to this row's prompt), without
            gradient; only `prepare` of "kto" reads them.
        valid: as in `PairLogps`.
    """

    policy: Tensor
    ref: Tensor
    label: Tensor
    policy_kl: Tensor | None = None
    ref_kl: Tensor | None = None
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        _check_rows(self, "policy")
        if self.label.dtype != torch.bool:
            raise ValueError(f"label must be bool (True = desirable), got {self.label.dtype}")

    def __len__(self) -> int:
        return len(self.policy)

    def select(self, index: Tensor) -> UnpairedLogps:
        return _map(self, lambda value: value[index])

    def detach(self) -> UnpairedLogps:
        return _map(self, Tensor.detach)

    def cleaned(self) -> UnpairedLogps:
        return _cleaned(self)

    @property
    def ratio(self) -> Tensor:
        """(B,) log pi - log pi_ref of the response."""
        return self.policy - self.ref


@dataclass(frozen=True)
class RunningMean:
    """The mean of everything seen so far: ``count`` numbers with mean ``mean``. Immutable; `updated` gives the next."""

    count: float = 0.0
    mean: float = 0.0

    def updated(self, values: Tensor) -> RunningMean:
        """With all of ``values`` taken in; the same whether they come at once or in parts."""
        if values.numel() == 0:
            return self
        total = self.count + values.numel()
        return RunningMean(total, (self.mean * self.count + float(values.detach().double().sum())) / total)

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean}

    @staticmethod
    def from_state(state: dict[str, float]) -> RunningMean:
        return RunningMean(float(state["count"]), float(state["mean"]))


@dataclass(frozen=True)
class PairRows:
    """Which rows of a sample batch are the two sides of each pair: joined by id, whatever the order of the rows.

    ``ids`` (B,) in order of first appearance; ``chosen``, ``rejected`` (B,) row numbers.
    """

    ids: list[str]
    chosen: Tensor
    rejected: Tensor

    @staticmethod
    def of(pair_id: Sequence[str] | np.ndarray, side: Sequence[str] | np.ndarray) -> PairRows:
        """Raises ValueError for a pair without exactly one chosen and one rejected row."""
        rows: dict[str, dict[str, int]] = {}
        for number, (pair, which) in enumerate(zip(pair_id, side, strict=True)):
            if which not in ("chosen", "rejected"):
                raise ValueError(f"side of row {number} is {which!r}, not 'chosen' or 'rejected'")
            if which in rows.setdefault(str(pair), {}):
                raise ValueError(f"pair {pair!r} has two {which} rows")
            rows[str(pair)][which] = number
        for pair, sides in rows.items():
            if len(sides) != 2:
                raise ValueError(f"pair {pair!r} has only its {next(iter(sides))} row: keep both sides together")
        numbers = [(sides["chosen"], sides["rejected"]) for sides in rows.values()]
        table = torch.tensor(numbers, dtype=torch.long).reshape(-1, 2)
        return PairRows(list(rows), table[:, 0], table[:, 1])
