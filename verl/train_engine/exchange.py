"""Every rank holds some rows of a matrix and wants another part of it: each sends what the others lack, at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from verl.models.cuts import Region


class Exchange:
    """One matrix on its way. The parts that are sent are kept until :meth:`wait`.

    Args:
        group: the ranks that hold the matrix together.
        held, wanted: the part that a rank of the group holds, and the one that it wants. Parts that are held are rows,
            those of later ranks behind those of earlier ones, none twice.
        own: (rows, columns) what this rank holds, in any type and on any device.
        target: contiguous; its first elements become the part that this rank wants, in order.

    Attributes:
        nbytes: bytes of the buffer that is sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        held: Callable[[int], Region],
        wanted: Callable[[int], Region],
        own: torch.Tensor,
        target: torch.Tensor,
    ):
        rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
        mine = held(rank)
        sent = [mine.overlap(wanted(other)) for other in ranks]
        received = [held(other).overlap(wanted(rank)).numel for other in ranks]
        self._sent = torch.empty(sum(part.numel for part in sent), dtype=target.dtype, device=target.device)
        self.nbytes = self._sent.nbytes
        for piece, part in zip(self._sent.split([part.numel for part in sent]), sent, strict=True):
            if part.numel:
                source = own.narrow(0, part.row - mine.row, part.rows).narrow(1, part.column, part.columns)
                piece.view(part.rows, part.columns).copy_(source, non_blocking=True)
        self._work = dist.all_to_all_single(
            target.view(-1)[: sum(received)], self._sent, received, [part.numel for part in sent], group, async_op=True
        )

    def wait(self) -> None:
        self._work.wait()
        self._sent = self._sent.new_empty(0)
