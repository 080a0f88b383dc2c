"""verl: reinforcement-learning post-training for language models.

Importing this package is cheap: what it offers is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verl._version import __version__

if TYPE_CHECKING:
    from verl.api.ray_dpo_trainer import RayDPOTrainer
    from verl.api.ray_trainer import RayPPOTrainer
    from verl.api.rl_trainer import RLTrainer
    from verl.api.settings import world_size
    from verl.api.vllm_actor import VLLMActor
    from verl.api.wrap import wrap_for_rl
    from verl.config import load_config
    from verl.protocol import DataProto
    from verl.trainer.base import Trainer

_LAZY = {
    "DataProto": "verl.protocol",
    "RLTrainer": "verl.api.rl_trainer",
    "RayDPOTrainer": "verl.api.ray_dpo_trainer",
    "RayPPOTrainer": "verl.api.ray_trainer",
    "Trainer": "verl.trainer.base",
    "VLLMActor": "verl.api.vllm_actor",
    "load_config": "verl.config",
    "world_size": "verl.api.settings",
    "wrap_for_rl": "verl.api.wrap",
}
"""Public name → module that defines it."""

__all__ = [
    "DataProto",
    "RLTrainer",
    "RayDPOTrainer",
    "RayPPOTrainer",
    "Trainer",
    "VLLMActor",
    "__version__",
    "load_config",
    "world_size",
    "wrap_for_rl",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'verl' has no attribute '{name}'")
    try:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    except ImportError as error:
        from verl.dependencies import missing_dependency

        missing = missing_dependency(error)
        if missing is None:
            raise
        raise missing from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
