"""How to load a model: what workers are given, so that they do not read the configuration tree themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
PACKED_ATTENTIONS = ("sdpa", "varlen", "flash_attn")
"""Attentions of the hardware table that run over packed sequences."""


@dataclass(frozen=True)
class LoraSettings:
    """Adapters of rank ``rank``, scaled by alpha / rank.

    Attributes:
        target_modules: "all-linear" (all but the output layer), a regular expression over module names, or a list of
            their endings. exclude_modules: the same, for modules to leave out.
        adapter_path: a folder with an adapter to go on from; rank, alpha and targets are then its own.
        seed: of the fresh adapters' random values.
    """

    rank: int
    alpha: float = 16
    target_modules: str | list[str] = "all-linear"
    exclude_modules: str | list[str] | None = None
    adapter_path: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class ModelSettings:
    """Path, dtype and device of one role's model.

    Attributes:
        attention: ``auto`` for packed attention where the model can, else the implementation's name in transformers.
        lora: train adapters only; None: train all weights.
        checkpoint_every: with gradient checkpointing, every so many layers recompute.
        quantization: of the frozen linear layers under adapters: ``nf4``, ``int8`` or None.
        param_offload: the weights lie in host memory outside the role's phases (CUDA, reference and critic).
        compile_layers: compile the decoder layers (CUDA).
        kernel: the packed attention to try first: ``sdpa``, ``varlen`` or ``flash_attn``.
        custom_class: file and name of a value model class of the user's own.
    """

    path: str
    dtype: str = "float32"
    device: str = "cpu"
    attention: str = "auto"
    kernel: str = "sdpa"
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    gradient_checkpointing: bool = False
    checkpoint_every: int = 1
    quantization: str | None = None
    param_offload: bool = False
    compile_layers: bool = False
    lora: LoraSettings | None = None
    custom_class: tuple[str, str] | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]
