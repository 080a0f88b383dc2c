"""A model whose weights are spread over ranks, as those see it who only pass over it, gather it or export it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from verl.comm import TorchDistComm
from verl.metrics import Metrics
from verl.models.cuts import Region

if TYPE_CHECKING:
    from verl.train_engine.base import TrainEngine

Result = TypeVar("Result")
Item = TypeVar("Item")


class Waiting(Protocol):
    """Something on its way; ``nbytes``: of the buffers that it needs meanwhile."""

    nbytes: int

    def wait(self) -> None: ...


class SpreadModule(ABC):
    """Passes over it are made by all of its ranks together.

    Attributes:
        module: the Hugging Face model (or value model) that names the weights.
        comm: all ranks of the role.
        device: where this rank computes.
        live_dtype: the type in which the weights compute.
        units: names of the weights, those of each decoder layer in turn, and last those outside the layers.
        shapes: of every whole weight, by name.
    """

    module: nn.Module
    comm: TorchDistComm
    device: torch.device
    live_dtype: torch.dtype
    units: list[list[str]]
    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def together(self, items: Sequence[Item]) -> list[tuple[Item, int | None]]:
        """What this rank passes over: its own items, each with its number, and (with None) those of ranks that compute
        with it, in an order that is theirs as well."""

    @abstractmethod
    def infer(self, compute: Callable[[], Result]) -> Result | None:
        """``compute()`` without gradients; None: memory ran out here, and the others do not know yet."""

    def settle(self, results: list[Result]) -> list[Result]:
        """What :meth:`infer` gave for passes that ranks make together, on all of them; in a pipeline of ranks only the
        last one had it."""
        return results

    @abstractmethod
    def infer_nothing(self) -> None:
        """The pass of a rank that has nothing to compute while others do."""

    @abstractmethod
    def backward(
        self, loss_of: Callable[[], tuple[torch.Tensor, Metrics]], scale: float = 1.0, *, last: bool = True
    ) -> Metrics | None:
        """Add the gradients of ``scale`` times the loss; None as in :meth:`infer`."""

    @abstractmethod
    def slot_rows(self, name: str) -> int:
        """Rows of the slot that :meth:`fill` needs for a weight: its own, and padding behind them."""

    @abstractmethod
    def fill(self, name: str, slot: torch.Tensor) -> dist.Work | None:
        """Gather a weight, in the type that computes, into the first rows of ``slot``, on all ranks together.

        Returns:
            What to wait for before the slot is read; None if it is there.
        """

    def fill_part(self, name: str, slot: torch.Tensor, wanted: Callable[[int], Region]) -> Waiting | None:
        """Get this rank's part of a weight, in the type that computes, into the first elements of ``slot``.

        All ranks call this together. Here the weight is gathered and cut; a class that knows better sends no more than
        what is wanted.

        Args:
            slot: contiguous, with room for the part.
            wanted: the part that each rank of ``comm`` wants.

        Returns:
            What to wait for before the slot is read; None if it is there.
        """
        whole, part = self.whole(name), wanted(self.comm.rank)
        if part.numel:
            found = whole.view(len(whole), -1).narrow(0, part.row, part.rows).narrow(1, part.column, part.columns)
            slot.view(-1)[: part.numel].view(part.rows, part.columns).copy_(found)
        return None

    @torch.no_grad()
    def whole(self, name: str) -> torch.Tensor:
        """(on every rank, which all must call) a weight in the type that computes, on the device."""
        shape = self.shapes[name]
        slot = torch.empty(self.slot_rows(name), *shape[1:], dtype=self.live_dtype, device=self.device)
        work = self.fill(name, slot)
        if work is not None:
            work.wait()
        return slot[: shape[0]]


PIECE_BYTES = 512 * 2**20


@torch.no_grad()
def sent_weights(engine: TrainEngine, rank: int, piece_bytes: int = PIECE_BYTES) -> Iterator[dict[str, torch.Tensor]]:
    """The weights that are trained, by name, in the type that computes, about ``piece_bytes`` at a time.

    Rank 0 gives them; where they are spread, all ranks gather each together. Frozen ones are left out: they are as
    they were loaded.
    """
    spread, piece = engine.lockstep, {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = parameter.detach() if spread is None else spread.whole(name)
        if rank == 0:
            piece[name] = whole
            if sum(tensor.nbytes for tensor in piece.values()) >= piece_bytes:
                yield piece
                piece = {}
    if piece:
        yield piece


def rows_per_rank(rows: int, ranks: int) -> int:
    """The cut of a dimension: every rank has this many rows, the last ones fewer or none."""
    return -(-rows // ranks)
