"""What Megatron's layers compute again in the backward pass instead of keeping it (Korthikanti et al. 2022,
arXiv:2205.05198): runs of whole layers, or some modules of every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.train_engine.parallel import Recompute


class Run:
    """Neighbouring layers; with ``again`` only their input is kept."""

    def __init__(self, layers: Sequence[nn.Module], again: bool):
        self.layers, self.again = list(layers), again

    def __call__(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        def compute(hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden, _ = layer(hidden, **options)
            return hidden

        return compute_again(compute, hidden) if self.again else compute(hidden)


def compute_again(compute: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """``compute(*given)``, of which nothing is kept where there will be a backward pass. Nothing in it is random."""
    if not torch.is_grad_enabled():
        return compute(*given, **options)
    return checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False, **options)


def runs_of(layers: Sequence[nn.Module], checkpointed: Sequence[bool], recompute: Recompute) -> list[Run]:
    """The layers of one stage as ``recompute`` joins them.

    Args:
        checkpointed: which of them gradient checkpointing chose; used where ``recompute`` says nothing of whole layers.
    """
    each = max(1, recompute.num_layers)
    if recompute.granularity != "full":
        return [Run([layer], again) for layer, again in zip(layers, checkpointed, strict=True)]
    if recompute.method == "block":
        return [Run([layer], number < each) for number, layer in enumerate(layers)]
    return [Run(layers[start : start + each], True) for start in range(0, len(layers), each)]


def wrap_modules(layers: Sequence[nn.Module], recompute: Recompute) -> None:
    """Let the modules that ``recompute`` names be computed again."""
    if recompute.granularity != "selective":
        return
    for layer in layers:
        named = {
            "core_attn": [layer.self_attention.core_attention],
            "mlp": [layer.mlp],
            "layernorm": [layer.input_layernorm, layer.pre_mlp_layernorm],
        }
        for name in recompute.modules:
            for module in named[name]:
                module.forward = _again(module.forward)


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **options: compute_again(forward, *given, **options)
