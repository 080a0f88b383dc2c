"""Which kind of host a reward function gets, and the pool of them."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from verl.notices import notice
from verl.rewards.contract import RewardFunction, normalise_result
from verl.rewards.hosts import ProcessHost, ThreadHost
from verl.rewards.pool import CallPool
from verl.rewards.source import UnsendableError, pack

if TYPE_CHECKING:
    from verl.rewards.batch_view import BatchView

ASYNC_CALLS_PER_WORKER = 64


def default_num_workers() -> int:
    """One worker per usable core, at most 8."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(8, cores)


def row_pool(function: RewardFunction, slots: int, timeout_s: float | None, *, take_first: bool) -> CallPool:
    """A pool for single rows: ``slots`` processes, or threads with a notice when the function cannot be sent.

    Outcomes hold a :class:`verl.rewards.RewardResult`. ``take_first``: see :func:`verl.rewards.normalise_result`.
    """
    calls = ASYNC_CALLS_PER_WORKER if function.is_async else 1
    try:
        packed = pack(function)
    except UnsendableError as error:
        notice(
            f"reward function '{function.name}' cannot be sent to worker processes ({error}); it runs in threads of "
            "this process, where a row that takes too long is reported as failed but cannot be ended"
        )
        fn = functools.partial(function.fn, **function.kwargs)

        def thread() -> ThreadHost:
            return ThreadHost(fn, function.is_async, normalise_result, timeout_s)

        return CallPool(thread, slots=slots, timeout_s=timeout_s, calls_per_host=calls)

    def process() -> ProcessHost:
        return ProcessHost(packed, function.is_async, take_first, timeout_s)

    return CallPool(process, slots=slots, timeout_s=timeout_s, calls_per_host=calls)


def batch_pool(function: RewardFunction, timeout_s: float | None) -> CallPool:
    """One thread of the driver: calls never overlap and see the user's globals. Outcomes hold what it returned."""
    notice(
        f"batch reward function '{function.name}' runs in this process: a call that takes too long is reported as "
        "failed but cannot be ended"
    )

    def call(view: BatchView | None = None, **columns: Any) -> Any:
        first = () if view is None else (view,)
        return function.fn(*first, **columns, **function.kwargs)

    return CallPool(lambda: ThreadHost(call, False, _unchanged, timeout_s), slots=1, timeout_s=timeout_s)


def _unchanged(value: Any) -> Any:
    return value
