"""Triton kernels that ask for more shared memory (or registers) than a GPU has.

Triton raises ``OutOfResources`` when such a kernel is first launched, before anything has run. What the kernel would
have done is then done without it, from there on, on that device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from verl.notices import notice

T = TypeVar("T")

_refused: set[tuple[str, Any]] = set()


def launches(kernels: str, device: Any) -> bool:
    """Nothing is known against these kernels on this torch device."""
    return (kernels, device) not in _refused


def or_without(
    kernels: str, device: Any, work: Callable[[], T], *, instead: str, switch: Callable[[], None] | None = None
) -> T:
    """``work()``; if the GPU cannot launch one of its kernels, a notice, ``switch()`` and ``work()`` once more.

    Args:
        kernels: what they are for. From the failure on :func:`launches` is False for them on ``device``, and ``work``
            must then do without.
        instead: what does it then, for the notice.
    """
    try:
        return work()
    except Exception as problem:
        # by its name: Triton may be of another version, or not be installed at all
        if not any(kind.__name__ == "OutOfResources" for kind in type(problem).__mro__):
            raise
        if not launches(kernels, device):
            raise
        _refused.add((kernels, device))
        reason = str(problem).strip().split(". ")[0]
        notice(f"This GPU cannot run the Triton kernels of {kernels} ({reason}): {instead} from here on.")
    if switch is not None:
        switch()
    return work()
