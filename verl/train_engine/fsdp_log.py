"""Which collectives a pass over a sharded model makes, so that a rank that had to give a pass up can make the rest.

When memory runs out in the middle of a pass, the other ranks are waiting, or will be, in the collectives that this rank
has not come to. The passes of all ranks make the same calls in the same order, so the missing ones are known from an
earlier pass: they are made with zeros, every rank gets to the end, and there they agree to take the step again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class _Call:
    """One collective: its kind, the sizes of what goes out and what comes in, and the rest of its arguments."""

    reduce: bool
    sent: int
    received: int
    dtype: torch.dtype
    device: torch.device
    group: Any
    op: Any = None

    def make(self) -> None:
        sent = torch.zeros(self.sent, dtype=self.dtype, device=self.device)
        received = torch.empty(self.received, dtype=self.dtype, device=self.device)
        if self.reduce:
            dist.reduce_scatter_tensor(received, sent, op=self.op, group=self.group)
        else:
            dist.all_gather_into_tensor(received, sent, group=self.group)


class CollectiveLog:
    """The calls of the pass at hand, and those of a complete pass of each kind."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._complete: dict[str, list[_Call]] = {}

    def begin(self) -> None:
        self._calls = []

    def add(self, call: _Call) -> None:
        self._calls.append(call)

    def keep(self, kind: str) -> None:
        """The pass at hand is over: this is what a pass of its kind does."""
        self._complete[kind] = self._calls

    def make_the_rest(self, kind: str) -> None:
        """Make the calls that the pass at hand still owes the other ranks."""
        for call in self._complete[kind][len(self._calls) :]:
            call.make()
        self._calls = list(self._complete[kind])


class _Allocating:
    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class LoggedAllGather(_Allocating):
    """FSDP's all-gather with an entry in the log. A call is entered once it is under way."""

    def __init__(self, log: CollectiveLog):
        self.log = log

    def __call__(self, output_tensor, input_tensor, group, async_op: bool = False):
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        self.log.add(
            _Call(False, input_tensor.numel(), output_tensor.numel(), input_tensor.dtype, input_tensor.device, group)
        )
        return work


class LoggedReduceScatter(_Allocating):
    """FSDP's reduce-scatter with an entry in the log."""

    def __init__(self, log: CollectiveLog):
        self.log = log

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False):
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self.log.add(
            _Call(True, input_tensor.numel(), output_tensor.numel(), input_tensor.dtype, input_tensor.device, group, op)
        )
        return work
