"""The rollout's own copy of sharded weights, or of a rank's part of them, at addresses that never move.

Where every rank generates with all weights, a tensor has a slot as long as all ranks' shards together. A rank casts its
shard into its place in the slot, and an all-gather in place fills the rest, so that nothing is copied twice and no
other memory is needed. FSDP cuts the first dimension into equal parts, of which only the last may be short: the rows of
the tensor lie one behind the other at the start of the slot, with padding behind them. (Where a matrix is cut by
columns, as Megatron cuts some, its parts go through a buffer of its size.)

Where several ranks generate together, each with its part of every matrix, a slot is as large as the part. Ranks send
each other what each lacks of its part, a decoder layer at a time: no rank ever holds all weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from verl.errors import RolloutError
from verl.models.cuts import Cuts
from verl.notices import notice
from verl.rollout.native.arena import Arena
from verl.train_engine.spread import SpreadModule

ALIGNMENT = 512  # bytes


class WeightArena:
    """Room for the weights of ``sharded`` in the type that computes.

    On a GPU the memory can be given back between rollouts while the addresses stay; elsewhere it is kept.

    Args:
        cuts: how ``cuts.size`` neighbouring ranks share the weights; None: every rank has all of them.

    Attributes:
        parameters: views of the slots by name; frozen parameters with the shapes of the weights, or of the parts.
        nbytes: memory that the arena takes while it is held.
        most_sent: bytes of the buffers that :meth:`fill` needed besides, at the most; 0 where it needs none.
    """

    def __init__(self, sharded: SpreadModule, cuts: Cuts | None = None):
        self.sharded, self.cuts = sharded, cuts
        self.most_sent = 0
        item = sharded.live_dtype.itemsize
        places: dict[str, tuple[int, tuple[int, ...]]] = {}
        offset = 0
        for unit in sharded.units:
            for name in unit:
                padded = (sharded.slot_rows(name), *sharded.shapes[name][1:]) if cuts is None else cuts.slot_shape(name)
                places[name] = offset, padded
                offset += -(-math.prod(padded) * item // ALIGNMENT) * ALIGNMENT
        self.nbytes = offset
        self._pages = _pages(offset, sharded.device)
        if self._pages is None:
            memory = torch.empty(offset, dtype=torch.uint8, device=sharded.device)
        else:
            self._pages.map(self._pages.size)
            memory = self._pages.tensor()
        self.slots = {
            name: memory[start : start + math.prod(padded) * item].view(sharded.live_dtype).view(padded)
            for name, (start, padded) in places.items()
        }
        self.parameters: Mapping[str, nn.Parameter] = {
            name: nn.Parameter(slot[: sharded.shapes[name][0]] if cuts is None else slot, requires_grad=False)
            for name, slot in self.slots.items()
        }

    @property
    def held(self) -> bool:
        return self._pages is None or bool(self._pages.mapped)

    @property
    def gives_back(self) -> bool:
        """Whether :meth:`give_back` frees memory here."""
        return self._pages is not None

    @torch.no_grad()
    def fill(self) -> None:
        """Gather the present weights, layer by layer. All ranks call this together."""
        if self._pages is not None:
            self._pages.map(self._pages.size)
        if self.cuts is not None:
            for unit in self.sharded.units:
                self._fill_parts(unit, self.cuts)
            return
        works = [self.sharded.fill(name, self.slots[name]) for unit in self.sharded.units for name in unit]
        for work in works:
            if work is not None:
                work.wait()

    def _fill_parts(self, unit: list[str], cuts: Cuts) -> None:
        works = []
        for name in unit:
            slot = self.slots[name]
            # zeros: where no part comes, and the padding behind the last rows of the vocabulary
            slot.view(-1)[cuts.wanted(name, self.sharded.comm.rank % cuts.size).numel :].zero_()
            works.append(self.sharded.fill_part(name, slot, lambda r, name=name: cuts.wanted(name, r % cuts.size)))
        on_their_way = [work for work in works if work is not None]
        self.most_sent = max(self.most_sent, sum(work.nbytes for work in on_their_way))
        for work in on_their_way:
            work.wait()

    def give_back(self) -> None:
        """Free the memory behind the addresses until the next :meth:`fill`, where that can be done."""
        if self._pages is not None:
            self._pages.unmap()


def _pages(size: int, device: torch.device) -> Arena | None:
    if device.type != "cuda":
        return None
    try:
        return Arena(1, size, device)
    except (RolloutError, OSError) as error:
        notice(
            f"The rollout's copy of the weights ({size / 2**30:.1f} GiB on each GPU) stays in memory during updates: "
            f"{error}"
        )
        return None
