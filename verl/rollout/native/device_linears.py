"""Linear layers of the twin that read the same input, as one product on a GPU.

At the width of a decode step a small product costs as much as its start: the keys' and values' projections of a 7B
model take 9 us each beside 14 us for the queries', and one product of all three takes 16 us. The joined weights are
derived: they are copied from the live ones when a rollout begins, and their memory is given back
when it ends. Their address stays, so captured graphs stay valid. The live weights are only read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from verl.errors import RolloutError
from verl.notices import notice
from verl.rollout.native.arena import Arena

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
MOST_BYTES = 64 << 20
"""Joined weights of one product at most: beyond that each part fills a GPU by itself, and joining gains nothing."""


class _Joined:
    """One product y = x W^T + b for layers that are called one after another with the same input."""

    def __init__(self, modules: list[nn.Linear]):
        self.modules = modules
        self.sizes = [m.out_features for m in modules]
        self.ready = False
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self.input: torch.Tensor | None = None
        self.rest: tuple[torch.Tensor, ...] = ()

    @property
    def numel(self) -> tuple[int, int]:
        """Numbers in the joined weight and in the joined bias."""
        first = self.modules[0]
        return sum(self.sizes) * first.in_features, 0 if first.bias is None else sum(self.sizes)


# Classes instead of forwards set on each module: a compiled layer's program then depends on no module in particular.


class _First(nn.Linear):
    """The first layer of a joined product: it computes for its siblings too."""

    joined: _Joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = self.joined
        if not joined.ready:
            return F.linear(x, self.weight, self.bias)
        first, *rest = F.linear(x, joined.weight, joined.bias).split(joined.sizes, -1)
        joined.input, joined.rest = x, tuple(rest)
        return first


class _Next(nn.Linear):
    """A sibling: it hands out what the first layer computed, if that saw the same input."""

    joined: _Joined
    place: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = self.joined
        if not joined.ready or joined.input is not x:
            return F.linear(x, self.weight, self.bias)
        out = joined.rest[self.place - 1]
        if self.place == len(joined.sizes) - 1:
            joined.input, joined.rest = None, ()
        return out


class DeviceLinears:
    """Joins the linear layers of ``model`` where that pays; their classes become ones of this file."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.device = device
        self.joined = [_Joined(modules) for modules in _groups_of(model)]
        self._arena: Arena | None = None
        self._stale = True
        for joined in self.joined:
            for place, module in enumerate(joined.modules):
                module.__class__ = _Next if place else _First
                module.joined, module.place = joined, place  # type: ignore[assignment]

    @property
    def ready(self) -> bool:
        return bool(self.joined) and self.joined[0].ready

    def weights_changed(self) -> None:
        self._stale = True

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Within this context every layer multiplies by itself: a wide batch gains nothing from joining, and what
        follows would read slices of a wider matrix."""
        ready = self.ready
        for joined in self.joined:
            joined.ready = False
        try:
            yield
        finally:
            for joined in self.joined:
                joined.ready = ready

    def refresh(self) -> bool:
        """Copy the live weights, if they changed or the memory was given back.

        Returns:
            False if there is no room: the layers then multiply one by one.
        """
        if not self.joined or (self.ready and not self._stale):
            return True
        try:
            if self._arena is None:
                self._place()
            assert self._arena is not None
            self._arena.map(self._arena.size)
        except (RolloutError, OSError) as problem:
            notice(f"Rollouts multiply queries, keys and values one by one, as joining them failed: {problem}")
            self.release()
            return False
        with torch.inference_mode(False), torch.no_grad():
            for joined in self.joined:
                assert joined.weight is not None
                torch.cat([m.weight for m in joined.modules], out=joined.weight.data)
                if joined.bias is not None:
                    torch.cat([m.bias for m in joined.modules], out=joined.bias.data)
                joined.ready = True
        self._stale = False
        return True

    def release(self) -> None:
        """Give back the memory of the joined weights."""
        for joined in self.joined:
            joined.ready = False
            joined.input, joined.rest = None, ()
        if self._arena is not None:
            self._arena.unmap()

    def _place(self) -> None:
        """Addresses for all joined weights. Parameters, as compiled layers take their shapes for fixed."""
        itemsize = self.joined[0].modules[0].weight.element_size()
        padded = [[-(-n * itemsize // 256) * 256 for n in joined.numel] for joined in self.joined]
        self._arena = Arena(1, sum(map(sum, padded)), self.device)
        self._arena.map(self._arena.size)
        flat, at = self._arena.tensor(), 0
        for joined, (weight_bytes, bias_bytes) in zip(self.joined, padded, strict=True):
            first, rows = joined.modules[0], sum(joined.sizes)
            weights, biases = joined.numel

            def view(offset: int, count: int, dtype: torch.dtype = first.weight.dtype) -> torch.Tensor:
                return flat[offset : offset + count * itemsize].view(dtype)

            with torch.inference_mode(False):
                joined.weight = nn.Parameter(view(at, weights).view(rows, first.in_features), requires_grad=False)
                if biases:
                    joined.bias = nn.Parameter(view(at + weight_bytes, biases), requires_grad=False)
            at += weight_bytes + bias_bytes


def _groups_of(model: nn.Module) -> list[list[nn.Linear]]:
    groups: list[list[nn.Linear]] = []
    dtypes = {p.dtype for p in model.parameters()}
    for parent in model.modules():
        children = dict(parent.named_children())
        for names in SIBLINGS:
            group = [children.get(name) for name in names]
            if len(dtypes) == 1 and all(type(m) in (nn.Linear, _First, _Next) for m in group) and _alike(group):  # type: ignore[arg-type]
                groups.append(group)  # type: ignore[arg-type]
    return groups


def _alike(group: list[nn.Linear]) -> bool:
    if any(type(m.weight) is not nn.Parameter for m in group):
        return False  # quantised, or a piece of a distributed tensor
    small = sum(m.weight.numel() * m.weight.element_size() for m in group) <= MOST_BYTES
    return small and len({(m.in_features, m.bias is None, m.weight.device) for m in group}) == 1
