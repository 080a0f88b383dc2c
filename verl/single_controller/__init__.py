"""One controller, many ranks: mark worker methods with ``@register`` and call them on a worker group.

- ``base/decorator.py``      ``@register``, Dispatch, Execute
- ``base/dispatch.py``       the split and collect functions of every mode
- ``base/worker.py``         Worker, one rank
- ``base/worker_group.py``   WorkerGroup, the controller's handle
- ``base/resource_pool.py``  where groups live
- ``calls.py``               order, futures and streams of calls, the same for every group
- ``local.py``, ``ranks.py`` the group inside this process, with one real or k simulated ranks
- ``ray/``                   the group on a Ray cluster, a process for each rank
"""

from verl.single_controller.base import (
    ClassWithInitArgs,
    Dispatch,
    DispatchMode,
    Execute,
    NotRegisteredError,
    ResourcePool,
    Split,
    SplittablePlan,
    Worker,
    WorkerGroup,
    get_predefined_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.local import LocalWorkerGroup

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "LocalWorkerGroup",
    "NotRegisteredError",
    "ResourcePool",
    "Split",
    "SplittablePlan",
    "Worker",
    "WorkerGroup",
    "get_predefined_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]
