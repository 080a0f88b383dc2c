"""Compiling the decoder layers of the twin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel


def decoder_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """The ``count`` layers of the model: the first module list of that length."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return []


class CompiledLayers:
    """Compiled forwards of the decoder layers, put in place while a step is captured.

    Prompts do without: their lengths vary so much that the program would be made anew, and a wide batch gains little.
    All layers share one program, for any batch size: the attention itself is left out of it (a captured graph makes
    the breaks free), so that nothing in it depends on the layer's number.
    """

    def __init__(self, twin: PreTrainedModel, count: int):
        self._layers = decoder_layers(twin, count)
        self._compiled: list = []
        self.on = False

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this context the layers run compiled, if that is on."""
        if not self.on or not self._layers:
            yield
            return
        if not self._compiled:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            self._compiled = [torch.compile(layer.forward, dynamic=True) for layer in self._layers]
        for layer, forward in zip(self._layers, self._compiled, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward
