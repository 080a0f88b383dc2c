"""WorkerGroup: the controller's handle on all ranks of one program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from verl.errors import ConfigError, DataflowError
from verl.protocol import DataProtoFuture
from verl.single_controller.base.decorator import Dispatch, Execute, Registration, registered_methods
from verl.single_controller.base.dispatch import Split, get_predefined_dispatch_fn, strip_padding


class NotRegisteredError(DataflowError, AttributeError):
    """A method was called on a worker group that its worker class does not offer to the controller."""


class WorkerGroup(ABC):
    """``world_size`` workers of one class. Its registered methods are attributes of the group.

    A subclass says how ranks run (:meth:`_call`); splitting and collecting are the same for all of them.
    """

    def __init__(self, worker_cls: type, world_size: int):
        self.worker_cls = worker_cls
        self.world_size = world_size
        for name, registration in registered_methods(worker_cls).items():
            if hasattr(type(self), name) or name in self.__dict__ or name == "workers":
                raise ConfigError(
                    f"{worker_cls.__name__}.{name} is registered under a name that the worker group uses itself: "
                    "give it another name"
                )
            setattr(self, name, self._bind(name, registration))

    def _bind(self, name: str, registration: Registration) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, registration, args, kwargs)

        call.__name__ = name
        call.__qualname__ = f"{type(self).__name__}.{name}"
        call.__doc__ = getattr(self.worker_cls, name).__doc__
        return call

    @abstractmethod
    def _call(self, name: str, registration: Registration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Split the arguments, run the method on the ranks, collect the results."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the ranks. The group cannot be used afterwards."""

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        worker_cls = self.__dict__.get("worker_cls")
        if name.startswith("_") or worker_cls is None:
            raise AttributeError(name)
        known = ", ".join(sorted(registered_methods(worker_cls))) or "none"
        if callable(getattr(worker_cls, name, None)):
            raise NotRegisteredError(
                f"{worker_cls.__name__}.{name} exists, but is not marked with @register(...), so the group cannot call "
                f"it (a method that overrides a registered one needs the mark again); registered are: {known}"
            )
        raise NotRegisteredError(f"{worker_cls.__name__} has no method {name!r}; registered are: {known}")

    # ---- what every kind of group does in the same way ------------------------------------------------------------

    def _label(self, name: str) -> str:
        return f"{self.worker_cls.__name__}.{name}"

    def _ranks_of(self, registration: Registration) -> list[int]:
        only_first = registration.execute_mode is Execute.RANK_ZERO or registration.dispatch_mode is Dispatch.RANK_ZERO
        return [0] if only_first else list(range(self.world_size))

    def _split(self, name: str, registration: Registration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
        if registration.materialize_futures:
            args = tuple(_materialized(value) for value in args)
            kwargs = {key: _materialized(value) for key, value in kwargs.items()}
        dispatch_fn = get_predefined_dispatch_fn(registration.dispatch_mode)["dispatch_fn"]
        return Split(*dispatch_fn(self, *args, **kwargs)).check(self.world_size, self._label(name))

    def _collect(self, registration: Registration, split: Split, outputs: list[Any]) -> Any:
        if registration.execute_mode is Execute.RANK_ZERO:
            return outputs[0]
        collect_fn = get_predefined_dispatch_fn(registration.dispatch_mode)["collect_fn"]
        return strip_padding(collect_fn(self, outputs), split.padding)


def _materialized(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture) else value
