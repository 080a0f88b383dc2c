"""The interface through which ranks talk, and the rank that is alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class CommError(RuntimeError):
    """The ranks do not agree on what they are doing together (different calls, shapes, or one of them has left)."""


class CommAbortedError(CommError):
    """This rank was waiting for others when the call was ended, because another rank failed or a stream was closed."""


class Comm(ABC):
    """Collectives over ``world_size`` ranks. Every rank must make the same calls in the same order."""

    rank: int
    world_size: int

    @abstractmethod
    def all_reduce_sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor, in place, by its sum over ranks; afterwards all ranks hold the same bits."""

    @abstractmethod
    def all_gather_object(self, obj: Any) -> list[Any]:
        """The (picklable) objects of all ranks, in rank order. Objects of other ranks are copies."""

    @abstractmethod
    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Overwrite each tensor, in place, by that of rank ``src``."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""


class SoloComm(Comm):
    """The only rank there is: every collective is already done."""

    rank = 0
    world_size = 1

    def all_reduce_sum(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj]

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        check_src(src, 1)

    def barrier(self) -> None:
        pass


def check_src(src: int, world_size: int) -> None:
    if not 0 <= src < world_size:
        raise CommError(f"broadcast from rank {src}, but the ranks are 0 to {world_size - 1}")
