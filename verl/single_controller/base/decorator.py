"""``@register``: how a worker method is split over ranks, run, and collected."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from verl.errors import ConfigError

_ATTRIBUTE = "_verl_registration"
MODES = ("train", "rollout", None)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class DispatchMode:
    """A named way to split arguments over ranks and collect results."""

    name: str


class Dispatch:
    """The dispatch modes; ``register_dispatch_mode`` adds attributes to this class.

    ================  ==================================================  =========================================
    mode              each rank gets                                      the caller gets
    ================  ==================================================  =========================================
    RANK_ZERO         rank 0 alone gets the arguments                     its result
    ONE_TO_ALL        the same arguments                                  list of results by rank
    ALL_TO_ALL        item r of every argument (lists of world_size)      list of results by rank
    DP_COMPUTE        as ALL_TO_ALL                                       as ALL_TO_ALL
    DP_COMPUTE_PROTO  an equal share of the rows of every DataProto       the rows of all ranks, concatenated
    DP_COMPUTE_METRIC as DP_COMPUTE_PROTO                                 all Metrics merged by their reducers
    DP_PLAN           the rows, and the share of the plan, that           Metrics merged, DataProtos concatenated,
                      ``plan.split(world_size)`` gives it                 or None
    ================  ==================================================  =========================================

    In the DP modes arguments that are not DataProto go to every rank as they are. When rows do not divide, copies are
    added that count for nothing (``response_mask`` 0, ``score_valid`` False) and never come back to the caller.
    A mode may also be a dict ``{"dispatch_fn": fn(group, *args, **kwargs) -> (args, kwargs) of lists by rank,
    "collect_fn": fn(group, results by rank) -> value}``.
    """

    RANK_ZERO = DispatchMode("RANK_ZERO")
    ONE_TO_ALL = DispatchMode("ONE_TO_ALL")
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL")
    DP_COMPUTE = DispatchMode("DP_COMPUTE")
    DP_COMPUTE_PROTO = DispatchMode("DP_COMPUTE_PROTO")
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC")
    DP_PLAN = DispatchMode("DP_PLAN")


class Execute(Enum):
    """Which ranks run the method: all, or rank 0 with its share (the caller then gets its plain result)."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Registration:
    """What ``@register`` stored about a method."""

    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]]
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool
    mode: str | None
    streaming: bool


def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    mode: str | None = None,
    streaming: bool = False,
) -> Callable[[F], F]:
    """Mark a Worker method as callable on a worker group. The method itself stays an ordinary method.

    ``blocking=False``: the group returns a DataProtoFuture at once. ``materialize_futures``: DataProtoFuture arguments
    are awaited before the call (else the method gets the futures). ``mode`` ("train" or "rollout"): every rank calls
    ``Worker.enter_mode(mode)`` first. ``streaming``: the method is a generator of DataProto pieces, and so is the call
    on the group; it is always consumed as it comes, so ``blocking`` has no meaning there.
    """
    if not isinstance(dispatch_mode, DispatchMode) and not (
        isinstance(dispatch_mode, Mapping) and {"dispatch_fn", "collect_fn"} == set(dispatch_mode)
    ):
        raise ConfigError(
            f"@register(dispatch_mode={dispatch_mode!r}): give Dispatch.NAME or a dict with dispatch_fn and collect_fn"
        )
    if not isinstance(execute_mode, Execute):
        raise ConfigError(f"@register(execute_mode={execute_mode!r}): give Execute.ALL or Execute.RANK_ZERO")
    if mode not in MODES:
        raise ConfigError(f"@register(mode={mode!r}): a method runs in mode 'train', in 'rollout', or in either (None)")
    if streaming and not blocking:
        raise ConfigError("@register(streaming=True, blocking=False): a stream is consumed as it comes; drop blocking")
    registration = Registration(dispatch_mode, execute_mode, blocking, materialize_futures, mode, streaming)

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, registration)
        return method

    return mark


def registered_methods(worker_cls: type) -> dict[str, Registration]:
    """Every registered method of a class by name. A method that overrides one must be registered itself."""
    found = {}
    for name in dir(worker_cls):
        registration = getattr(inspect.getattr_static(worker_cls, name), _ATTRIBUTE, None)
        if isinstance(registration, Registration):
            found[name] = registration
    return found
