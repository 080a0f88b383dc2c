"""Which SGLang is installed. Nothing of it is imported here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from verl.errors import MissingDependencyError, RolloutError
from verl.hardware.choice import SGLANG_OLDEST
from verl.hardware.device import version_tuple


def installed_sglang(device: str, version: Callable[[str], str] = importlib.metadata.version) -> str:
    """Its version.

    Args:
        device: kind of the device that must be served.
        version: looks a distribution up.

    Raises:
        MissingDependencyError, RolloutError: it is not installed; too old; SGLang does not run on such a device.
    """
    if device not in ("cuda", "cpu"):
        raise RolloutError(f"SGLang does not run on {device} here; use actor_rollout_ref.rollout.name=native.")
    try:
        found = version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError("sglang", "actor_rollout_ref.rollout.name=sglang") from None
    if version_tuple(found, len(SGLANG_OLDEST)) < SGLANG_OLDEST:
        oldest = ".".join(map(str, SGLANG_OLDEST))
        raise RolloutError(
            f"The installed sglang {found} is older than {oldest}, whose weight updates rollouts need: "
            f"pip install 'sglang>={oldest}', or use actor_rollout_ref.rollout.name=native."
        )
    return found
