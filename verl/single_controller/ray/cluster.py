"""Starting Ray on this machine, or joining a cluster; only where more than one process is asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.dependencies import missing_dependency
from verl.errors import ConfigError

STARTING = ("num_cpus", "num_gpus", "object_store_memory", "include_dashboard", "_temp_dir")
"""Arguments of ``ray.init`` that a running cluster does not take: it has them already."""
KNOCK_S = 10.0


@dataclass(frozen=True)
class ClusterSettings:
    """Attributes:
    address: of a cluster to join ("auto": one that runs on this machine); None: RAY_ADDRESS, else a new one here.
    processes: CPU processes that a new one must have room for.
    init: more arguments of ``ray.init``.
    """

    address: str | None = None
    processes: int = 1
    init: Mapping[str, Any] = field(default_factory=dict)


class Cluster:
    """This process's connection to Ray. Closing it ends the cluster, if it was started here."""

    def __init__(self, settings: ClusterSettings):
        ray = import_ray()
        self.address = settings.address or os.environ.get("RAY_ADDRESS") or None
        self._ours = not ray.is_initialized()
        if self._ours:
            with _own_signals():
                self._start(ray, settings)

    def _start(self, ray: Any, settings: ClusterSettings) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": True, "logging_level": "ERROR"}
        options.update({key: value for key, value in settings.init.items() if value is not None})
        if self.address is None:
            options["address"] = "local"  # without it Ray would join a cluster that happens to run on this machine
            options.setdefault("include_dashboard", False)
            options.setdefault("num_cpus", max(os.cpu_count() or 1, settings.processes + 1))
        else:
            options["address"] = self.address
            options = {key: value for key, value in options.items() if key not in STARTING}
            _knock(self.address)
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if self.address is None:
                raise ConfigError(f"Ray could not be started on this machine: {reason}") from error
            raise _no_cluster(self.address, reason) from error

    @property
    def described(self) -> str:
        return "this machine" if self.address is None else f"the Ray cluster at {self.address}"

    def close(self) -> None:
        """Leave the cluster. A second call does nothing."""
        if self._ours:
            self._ours = False
            import_ray().shutdown()


def import_ray() -> Any:
    """The ``ray`` module.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise (missing_dependency(error) or error) from error
    return ray


def _knock(address: str) -> None:
    """See that somebody listens there: Ray itself tries for minutes.

    Raises:
        ConfigError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        if address != "auto":
            raise ConfigError(f"trainer.ray_address={address}: give HOST:PORT of the cluster's head, or auto")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from error


def _no_cluster(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"There is no Ray cluster at {address} ({reason}): start it with 'ray start --head', or take RAY_ADDRESS and "
        "trainer.ray_address away to start one on this machine."
    )


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM when it starts; ours, which lets a run end in order, is put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
