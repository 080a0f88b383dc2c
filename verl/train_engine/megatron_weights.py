"""A distributed optimizer: copies of the weights share the masters and moments among them (ZeRO stage 1, Rajbhandari
et al. 2020, arXiv:1910.02054).

A parameter has one owner among the ranks that hold the same part of the model. Gradients are summed over all of them;
the owner takes the step, and sends the new live weight to the others. So a state has whole rows, and any number of
ranks reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from verl.comm import TorchDistComm
from verl.train_engine.master import MasterWeights, is_wide


def owners_of(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The owner of each parameter: the largest first, each to the rank that has least."""
    held = [0] * ranks
    owners = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owners[name] = min(range(ranks), key=lambda rank: (held[rank], rank))
        held[owners[name]] += size
    return owners


class OwnedWeights(MasterWeights):
    """Masters of the parameters that this rank owns; gradient sums of all.

    Attributes:
        owners: by name, ranks of ``same``.
    """

    def __init__(self, module: nn.Module, same: TorchDistComm, *, offload: bool = False):
        live = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.owners = owners_of({name: p.numel() for name, p in live.items()}, same.world_size)
        self._same = same
        self._sums: dict[str, torch.Tensor] = {}
        super().__init__(module, offload=offload)

    def _owns(self, name: str) -> bool:
        return self.owners[name] == self._same.rank

    def _watch(self, name: str, p: nn.Parameter) -> None:
        """Add the gradients of a parameter that another rank owns up in float32."""

        def add(live: torch.Tensor) -> None:
            assert live.grad is not None
            if name in self._sums:
                self._sums[name].add_(live.grad.to(self._sums[name].device))
            else:
                wide = torch.promote_types(live.dtype, torch.float32)
                self._sums[name] = live.grad.to("cpu" if self.offload else live.device, wide, copy=True)
            live.grad = None

        if not is_wide(p.dtype) or self.offload:
            self._hooks.append(p.register_post_accumulate_grad_hook(add))

    def gradients(self) -> list[torch.Tensor]:
        return [self._sum_of(name, p) for name, p in self.live.items()]

    def _sum_of(self, name: str, p: nn.Parameter) -> torch.Tensor:
        if self._owns(name):
            master = self.masters[name]
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            return master.grad
        found = self._sums.get(name, p.grad)
        if found is None:
            wide = torch.promote_types(p.dtype, torch.float32)
            found = self._sums[name] = torch.zeros_like(p, dtype=wide, device="cpu" if self.offload else p.device)
        return found

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self._sums.clear()

    @torch.no_grad()
    def publish(self) -> None:
        super().publish()
        for rank in range(self._same.world_size):
            self._same.broadcast([p for name, p in self.live.items() if self.owners[name] == rank], src=rank)
