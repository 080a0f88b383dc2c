"""Reading one setting from a configuration that may be a dataclass, a mapping or absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def setting(config: Any, key: str, default: Any) -> Any:
    """``config.a.b`` or ``config["a"]["b"]`` for the dotted ``key``; ``default`` where a part is absent or None."""
    node = config
    for name in key.split("."):
        if node is None:
            return default
        node = node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
    return default if node is None else node
