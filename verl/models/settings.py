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
class ModelSettings:
    """Path, dtype and device of one role's model.

    Attributes:
        attention: ``auto`` for packed attention where the model can, else the implementation's name in transformers.
        compile_layers: compile the decoder layers (CUDA).
        kernel: the packed attention to try first: ``sdpa``, ``varlen`` or ``flash_attn``.
    """

    path: str
    dtype: str = "float32"
    device: str = "cpu"
    attention: str = "auto"
    kernel: str = "sdpa"
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    gradient_checkpointing: bool = False
    compile_layers: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]
