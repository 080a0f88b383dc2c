"""Rewards: the reward-function contract, rule scorers, and the runner that scores rows in worker processes.

Attributes are loaded on first use, because worker processes import this package and must start without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "BatchView": "batch_view",
    "RewardFunction": "contract",
    "RewardResult": "contract",
    "RewardRunner": "runner",
    "check_all_failed": "failures",
    "combine": "combining",
    "default_compute_score": "router",
    "flatten_extra_info": "rows",
    "inspect_function": "contract",
    "load_reward_function": "loading",
    "normalise_result": "contract",
    "resolve_manager": "managers",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
