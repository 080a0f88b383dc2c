"""What worker groups of every kind share."""

from verl.single_controller.base.decorator import Dispatch, DispatchMode, Execute, Registration, register
from verl.single_controller.base.dispatch import (
    Split,
    SplittablePlan,
    get_predefined_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.base.resource_pool import ResourcePool
from verl.single_controller.base.worker import ClassWithInitArgs, Worker
from verl.single_controller.base.worker_group import NotRegisteredError, WorkerGroup

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "NotRegisteredError",
    "Registration",
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
