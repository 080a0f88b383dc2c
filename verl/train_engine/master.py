"""Live weights, fp32 masters and fp32 gradient sums.

Live weights narrower than fp32 compute; the optimizer works on an fp32 master and writes ``live <- round(master)``
into the same storage. Gradients of micro-batches are added up in fp32: a bf16 sum would lose the small ones.
With offload, masters, gradient sums and moments lie in host memory and the optimizer runs there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def is_wide(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)


class MasterWeights:
    """The trainable parameters of a module with their masters.

    ``masters[name]`` is the parameter itself where it is fp32 or fp64, else an fp32 copy. Masters' ``.grad`` hold the
    gradient sums.

    Args:
        offload: every master is a copy in (pinned) host memory.
    """

    def __init__(self, module: nn.Module, *, offload: bool = False):
        self.live = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters: dict[str, nn.Parameter] = {}
        self.offload = offload
        self._hooks = []
        for name, p in self.live.items():
            if not self._owns(name):
                self._watch(name, p)
                continue
            if is_wide(p.dtype) and not offload:
                self.masters[name] = p
                continue
            wide = torch.promote_types(p.dtype, torch.float32)
            copy = p.detach().to("cpu" if offload else p.device, wide, copy=True)
            master = nn.Parameter(copy.pin_memory() if offload and p.is_cuda else copy)
            self.masters[name] = master
            self._hooks.append(p.register_post_accumulate_grad_hook(self._adder(master)))

    def _owns(self, name: str) -> bool:
        """Whether this rank has the master of a parameter."""
        return True

    def _watch(self, name: str, p: nn.Parameter) -> None:
        """Add up the gradients of a parameter whose master another rank has."""
        raise NotImplementedError

    @staticmethod
    def _adder(master: nn.Parameter):
        def add(live: torch.Tensor) -> None:
            if master.grad is None:
                master.grad = live.grad.to(master.device, master.dtype)
            else:
                master.grad.add_(live.grad.to(master.device))
            live.grad = None

        return add

    def gradients(self) -> list[torch.Tensor]:
        """Gradient sums in the order of the parameters; a parameter without one gets zeros."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [m.grad for m in self.masters.values()]

    def discard_gradients(self) -> None:
        for p in (*self.masters.values(), *self.live.values()):
            p.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters into the live weights, in place."""
        pairs = [(self.live[name], master) for name, master in self.masters.items() if master is not self.live[name]]
        if not pairs:
            return
        if pairs[0][0].device == pairs[0][1].device:
            torch._foreach_copy_([live for live, _ in pairs], [master for _, master in pairs])
            return
        for live, master in pairs:  # over the link as they are, from pinned memory: the GPU rounds faster than the host
            live.copy_(master.to(live.device, non_blocking=True))

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.masters.items()
