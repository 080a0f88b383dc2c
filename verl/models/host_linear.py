"""Matrix products on a CPU whose maker is not Intel: oneDNN in place of MKL, forward and backward.

torch multiplies float32 matrices with MKL, which takes its fast paths on Intel's processors only; on others oneDNN,
which is in torch too, is up to twice as fast (`python benchmarks/cpu_matmul.py` measures yours). Which one is used
depends on the processor alone, never on a measurement, so that runs can be repeated.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from verl.hardware import cpu_maker


@functools.cache
def onednn_is_better() -> bool:
    """x86 that is not Intel's, with oneDNN in torch."""
    return cpu_maker() not in (None, "GenuineIntel") and torch.backends.mkldnn.is_available()


def _uses_onednn(*tensors: torch.Tensor) -> bool:
    return onednn_is_better() and all(
        t.device.type == "cpu"
        and t.dtype == torch.float32
        and type(t) in (torch.Tensor, nn.Parameter)
        and t.numel() > 0
        for t in tensors
    )


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a b^T + bias for a (..., K) and b (N, K), without a gradient; transposed views are read as they lie."""
    if _uses_onednn(a, b):
        return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return F.linear(a, b, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = product(rows, weight.t()).reshape(x.shape) if ctx.needs_input_grad[0] else None
        of_weight = product(rows.t(), x.reshape(-1, x.shape[-1]).t()) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias


class HostLinear(nn.Linear):
    """A linear layer with these products; otherwise an ``nn.Linear``, and saved as one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _uses_onednn(input, self.weight):
            return _Linear.apply(input, self.weight, self.bias)
        return super().forward(input)


def use_host_products(model: nn.Module) -> None:
    """Let the plain linear layers of ``model`` use the faster products, where this processor has them."""
    if not onednn_is_better():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = HostLinear
