"""Frozen linear layers in 4 or 8 bits under adapters (QLoRA, arXiv:2305.14314), through the package bitsandbytes.

Only the layers of the decoder are quantised; embeddings, norms and the output layer stay as they are. The rollout
twin shares the quantised tensors. An export holds what the policy computes: the dequantised base with the adapters
merged in.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.errors import MissingDependencyError, ModelError

KINDS = ("nf4", "int8")


class _WideProduct(torch.autograd.Function):
    """x @ (weight * scale).T for an int8 weight (out, in) with a scale (out,); the wide weight exists for a moment."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ _widened(weight, scale, x.dtype).t()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad @ _widened(*ctx.saved_tensors, grad.dtype), None, None


def _widened(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (weight.to(scale.dtype) * (scale / 127.0)[:, None]).to(dtype)


@functools.cache
def _int8_layer() -> type[nn.Module]:
    from bitsandbytes.nn import Linear8bitLt

    class Int8Linear(Linear8bitLt):
        """Narrow weights only. The library would round the inputs too, and treat their outliers column by column: then
        a row's result would depend on the rows beside it."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = _WideProduct.apply(x, self.weight.data, self.state.SCB)
            return out if self.bias is None else out + self.bias

    return Int8Linear


@torch.no_grad()
def quantize(model: PreTrainedModel, kind: str, device: torch.device | str | None = None) -> None:
    """Replace the decoder's linear layers by quantised ones on ``device``, one by one; call it before adapters.

    Raises:
        MissingDependencyError: bitsandbytes is not installed.
        ModelError: the model has no plain linear layers.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependencyError("bitsandbytes", f"A base model in {kind} (model.quantization)")
    layers = list(_plain_layers(model))
    if not layers:
        raise ModelError(f"{type(model).__name__} has no plain linear layers to quantise (model.quantization={kind}).")
    for parent, name, layer in layers:
        setattr(parent, name, _quantised(layer, kind, device or layer.weight.device))
    _mark(model, kind)


def quantization_of(model: nn.Module) -> str | None:
    """``nf4``, ``int8`` or None."""
    if getattr(model, "is_loaded_in_4bit", False):
        return "nf4"
    return "int8" if getattr(model, "is_loaded_in_8bit", False) else None


def mirror_quantised(source: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Give a twin on the meta device layers like those of ``source``; whoever calls puts the tensors in."""
    kind = quantization_of(source)
    if kind is None:
        return
    states = {name: module for name, module in source.named_modules() if _is_quantised(module)}
    for parent, name, layer in list(_plain_layers(twin)):
        setattr(parent, name, _empty(layer, kind, torch.device("meta"), layer.weight.dtype))
    for name, module in twin.named_modules():
        if kind == "int8" and _is_quantised(module):
            original = states.get(name) or states[f"{name}.base_layer"]  # where adapters lie around it
            module.state = original.state  # holds the scales
    _mark(twin, kind)


def dequantised(layer: nn.Module) -> torch.Tensor:
    """fp32 (out, in) weight of a quantised layer."""
    import bitsandbytes as bnb

    weight = layer.weight
    if isinstance(layer, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    return _widened(weight.data, layer.state.SCB.float(), torch.float32)


def dequantised_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's state with every quantised weight in fp32, and without its scales."""
    if quantization_of(model) is None:
        return model.state_dict()
    weights = {name: dequantised(module) for name, module in model.named_modules() if _is_quantised(module)}
    state = {}
    for name, tensor in model.state_dict().items():
        layer, _, rest = name.rpartition(".weight")
        owner = layer if layer in weights else name.rpartition(".")[0]
        if owner not in weights:
            state[name] = tensor
        elif name == f"{owner}.weight":
            state[name] = weights[owner]
        elif name == f"{owner}.bias" and not rest.startswith("."):
            state[name] = tensor
    return state


def _plain_layers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    head = model.get_output_embeddings()
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child is not head:
                yield parent, name, child


def _is_quantised(module: nn.Module) -> bool:
    if importlib.util.find_spec("bitsandbytes") is None:
        return False
    import bitsandbytes as bnb

    return isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))


def _empty(layer: nn.Linear, kind: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    sizes = {"input_features": layer.in_features, "output_features": layer.out_features}
    bias = layer.bias is not None
    if kind == "nf4":
        new = bnb.nn.Linear4bit(**sizes, bias=bias, compute_dtype=dtype, quant_type="nf4", device=device)
        # on such a CPU it would lay its weight out anew at the first inference: rollout and training share that tensor
        new.support_avx512bf16_for_cpu = False
        return new
    return _int8_layer()(**sizes, bias=bias, has_fp16_weights=False, device=device)


def _quantised(layer: nn.Linear, kind: str, device: torch.device | str) -> nn.Module:
    import bitsandbytes as bnb

    new = _empty(layer, kind, torch.device("meta"), layer.weight.dtype)
    if kind == "nf4":
        weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
        new.weight = weight.to(device)
        new.weight.module = new
    else:
        new.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False).to(device)
        new.init_8bit_state()
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.data.to(device), requires_grad=False)
    return new


def _mark(model: PreTrainedModel, kind: str) -> None:
    """What peft asks a model before it puts adapters beside quantised layers."""
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind == "nf4", kind == "int8"
