"""Linear layers of the twin on a CPU: oneDNN's products, on the live weights or on copies in oneDNN's own layout.

torch multiplies float32 matrices with MKL, which is about half as fast as oneDNN on processors of other makers than
Intel, and it gives every call weights in the layout of training. A packed copy has the layout that the product wants,
and layers that read the same input (queries, keys and values; the two halves of a gated MLP) become one product.

Packed copies are derived: they are made from the live weights at the start of a rollout, and dropped when the weights
change or the rollout ends. The live weights are only read.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
DTYPES = (torch.float32, torch.bfloat16)
PACK_AFTER_STEPS = 16
"""Planned decode steps from which packing is repaid: it costs one or two steps and saves a tenth to a third of each."""


def onednn_works(device: torch.device, dtype: torch.dtype) -> bool:
    """x86 with oneDNN in torch, and a type that it multiplies (bfloat16 where the processor has instructions)."""
    if device.type != "cpu" or dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Product:
    """One product y = x W^T + b for one or several linear layers that read the same input."""

    def __init__(self, modules: list[nn.Linear]):
        self.modules = modules
        self.sizes = [m.out_features for m in modules]
        self._packed: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(m.weight.numel() * m.weight.element_size() for m in self.modules)

    def pack(self, rows: int) -> None:
        weights = [m.weight.detach() for m in self.modules]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        biases = [m.bias.detach() for m in self.modules if m.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def drop(self) -> None:
        self._packed = self._bias = self._input = None
        self._outputs = ()

    def __call__(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """Output of the layer at ``place``. The first layer that comes with an input computes for its siblings too."""
        if self._packed is None:
            module = self.modules[place]
            if x.dtype != module.weight.dtype or not module.weight.is_contiguous():
                return F.linear(x, module.weight, module.bias)
            return torch.ops.mkldnn._linear_pointwise(x, module.weight, module.bias, "none", [], "")
        if len(self.modules) == 1:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        if self._input is not x:
            y = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            self._input, self._outputs = x, y.split(self.sizes, -1)
        out = self._outputs[place]
        if place == len(self.modules) - 1:
            self._input, self._outputs = None, ()
        return out

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all layers side by side."""
        if self._packed is None:
            outputs = [self(place, x) for place in range(len(self.modules))]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


class HostLinears:
    """The linear layers of ``model``, whose forwards it takes over.

    Args:
        most_bytes: a model whose linear weights are larger is not packed.
    """

    def __init__(self, model: nn.Module, most_bytes: int):
        self.products = [Product(modules) for modules in _products_of(model)]
        self.packed = False
        self.fits = sum(p.bytes for p in self.products) <= most_bytes
        self._of: dict[nn.Module, Product] = {}
        for product in self.products:
            for place, module in enumerate(product.modules):
                module.forward = _Forward(product, place)  # type: ignore[method-assign, assignment]
                self._of[module] = product

    def together(self, modules: list[nn.Module]) -> bool:
        """Whether these layers, in this order, are one product."""
        return modules[0] in self._of and self._of[modules[0]].modules == modules

    def of(self, module: nn.Module) -> Product:
        """The product that a layer is in."""
        return self._of[module]

    def plan(self, rows: int, steps: int) -> None:
        """Pack, if ``steps`` decode steps of ``rows`` rows repay it."""
        if self.packed or not self.fits or steps < PACK_AFTER_STEPS:
            return
        with torch.inference_mode(False), torch.no_grad():  # oneDNN's tensors cannot be inference tensors
            for product in self.products:
                product.pack(rows)
        self.packed = True

    def drop(self) -> None:
        """Forget the packed copies."""
        for product in self.products:
            product.drop()
        self.packed = False


class _Forward:
    """A linear layer's forward."""

    def __init__(self, product: Product, place: int):
        self.product, self.place = product, place

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self.place, x)


def _products_of(model: nn.Module) -> list[list[nn.Linear]]:
    """The linear layers, those that read the same input together."""
    products: list[list[nn.Linear]] = []
    taken: set[nn.Module] = set()
    for parent in model.modules():
        children = dict(parent.named_children())
        for names in SIBLINGS:
            group = [children.get(name) for name in names]
            if all(_taken_over(m) for m in group) and _alike(group):  # type: ignore[arg-type]
                products.append(group)  # type: ignore[arg-type]
                taken.update(group)  # type: ignore[arg-type]
    products += [[m] for m in model.modules() if _taken_over(m) and m not in taken]  # type: ignore[list-item]
    return products


def _taken_over(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear and module.weight.dtype in DTYPES


def _alike(group: list[nn.Linear]) -> bool:
    return len({(m.in_features, m.bias is None, m.weight.dtype) for m in group}) == 1
