"""What a training engine does: sum the gradients of micro-batches, then take one optimizer step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from verl.metrics import Metrics

if TYPE_CHECKING:
    from verl.train_engine.spread import SpreadModule

Micro = TypeVar("Micro")
# forward a micro-batch through the module; the returned loss is its share of the step's loss: they are summed
LossOf = Callable[[Micro], tuple[torch.Tensor, Metrics]]


@dataclass(frozen=True)
class StepReport:
    """One optimizer step. ``skipped`` means that the gradient was not finite and no weight was touched."""

    grad_norm: float
    lr: float
    skipped: bool
    metrics: Metrics


class TrainEngine(ABC):
    """Owns the live weights, their fp32 masters, the optimizer and the schedule of one role on one rank.

    Attributes:
        module: the model whose parameters are the live weights, or that names them where ``lockstep`` holds them; their
            storage never moves.
        version: grows by one at every write to the weights.
        lockstep: where weights are spread over ranks: through it all ranks make their passes together; else None.
    """

    module: nn.Module
    version: int
    lockstep: SpreadModule | None = None

    @abstractmethod
    def train_step(self, micro_batches: Sequence[Micro], loss_of: LossOf) -> StepReport:
        """Gradients of all micro-batches of all ranks are summed in fp32, clipped and applied.

        Raises:
            MemoryShortageError: on every rank, if memory ran out on one of them before a weight was touched.
        """

    @abstractmethod
    def schedule_step(self) -> None:
        """One training step (not optimizer step) is over: move the learning-rate schedule on."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything that resuming needs, as tensors by name."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Write a state of :meth:`state_dict` into the existing storages."""
