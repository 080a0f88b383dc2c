"""From a trained policy to a folder that others serve: plain Hugging Face weights, an adapter, or GGUF."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.export.folder import Exported, export_model

__all__ = ["Exported", "export_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.folder"), name)
