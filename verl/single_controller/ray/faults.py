"""What is said when a rank dies, stalls, or memory for messages runs out."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import TrainingError, WorkerDiedError
from verl.notices import notice

if TYPE_CHECKING:
    from verl.single_controller.ray.host import Place
    from verl.single_controller.ray.hosts import HostSet

LAST_LINES = 20
ANSWER_S = 5.0
"""How long a rank may take to say where it is."""
NODE_S = 15.0
"""How long another node may take to hand over the end of a log: a process must start there first."""


class RemoteTraceback(Exception):
    """Where an error was raised in a rank's process; the cause of the error as the controller raises it."""

    def __init__(self, trace: str):
        super().__init__(trace)

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def tail(path: str, lines: int = LAST_LINES) -> str:
    """The last lines of a file; empty if it is not there."""
    try:
        with Path(path).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            found = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    # Ray marks its own lines so; they are no output of the worker
    return "\n".join([line for line in found if not line.startswith("::") and ":actor_name:" not in line][-lines:])


def on_node(place: Place, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` on the node of a rank; None where that node does not answer."""
    if place.host == socket.gethostname():
        return function(*arguments)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy).remote(*arguments)
    try:
        return ray.get(task, timeout=NODE_S)
    except ray.exceptions.RayError:
        return None


def death(hosts: HostSet, rank: int, label: str, error: Exception) -> WorkerDiedError:
    """The error for a rank whose process is gone."""
    place = hosts.places[rank]
    last = on_node(place, tail, place.log)
    if last is None:
        output = f"Its node does not answer, so its output ({place.log} there) cannot be read."
    elif not last.strip():
        output = f"It had printed nothing ({place.log})."
    else:
        indented = "\n".join(f"    {line}" for line in last.splitlines())
        output = f"Its last lines of output ({place.log}):\n{indented}"
    out_of_memory = "OutOfMemory" in type(error).__name__
    why = "it was killed because its node ran out of memory" if out_of_memory else _reason(error)
    return WorkerDiedError(
        f"Rank {rank} of {hosts.world_size} (processes '{hosts.name}') on host {place.host} ({place.address}), process "
        f"{place.pid}, died in {label}: {why}.\n{output}\nThe same command goes on from the last checkpoint "
        "(trainer.resume_mode=auto); trainer.max_restarts does that by itself.",
        rank=rank,
        host=place.host,
    )


def _reason(error: Exception) -> str:
    text = str(error)
    if "Worker exit detail:" in text:
        return text.split("Worker exit detail:")[1].split(". ")[0].strip().rstrip(".")
    return next(iter(text.strip().splitlines()), type(error).__name__).rstrip(".")


def message_failure(label: str, error: Exception) -> Exception:
    """The error for a message between controller and ranks that Ray could not carry."""
    import ray

    full = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
    if isinstance(error, full) or any(name.__name__ in str(error) for name in full):
        return TrainingError(
            f"Ray's object store and its disk are full: the data of {label} does not fit. Give it more with "
            "ray_kwargs.ray_init.object_store_memory (bytes; /dev/shm must be as large), free disk under Ray's "
            "temporary folder, or lower data.train_batch_size."
        )
    return TrainingError(f"{label}: Ray could not carry the data or the call ({type(error).__name__}: {error})")


class StallWatch:
    """Names the ranks that keep a call from going on.

    Args:
        seconds: without progress, after which it speaks, and again after as long; 0: never.
    """

    def __init__(self, hosts: HostSet, label: str, seconds: float):
        self.hosts, self.label, self.seconds = hosts, label, seconds
        self.begin = self._last = time.monotonic()

    def progress(self) -> None:
        self._last = time.monotonic()

    def look(self, waiting: Collection[int]) -> None:
        """Speak if it is time to. ``waiting``: ranks that have not finished."""
        if self.seconds <= 0 or time.monotonic() - self._last < self.seconds:
            return
        self.progress()
        passed = time.monotonic() - self.begin
        for text in self._stalled(sorted(waiting)):
            notice(f"{text} It has been {passed:.0f} s.", key=f"{text}/{self.begin}/{passed:.0f}")

    def _stalled(self, waiting: list[int]) -> list[str]:
        """A sentence with the stack for every rank that holds up the others."""
        looks = self.hosts.looks(waiting)
        patient = {rank: look.waiting_in for rank, look in looks.items() if look is not None and look.waiting_in}
        culprits = [rank for rank in waiting if rank not in patient] or waiting
        texts = []
        for rank in culprits:
            place, look = self.hosts.places[rank], looks[rank]
            who = f"Rank {rank} of {self.hosts.world_size} on host {place.host}, process {place.pid},"
            others = sorted(set(patient) - {rank})
            held = f"; rank(s) {others} wait for it in {patient[others[0]]}" if others else ""
            if look is None:
                dump = on_node(place, _dump, place.pid, place.log)
                texts.append(f"{who} stalls in {self.label} and does not answer{held}. Its last output:\n{dump}\n")
            else:
                texts.append(f"{who} stalls in {self.label}{held}. Its stack:\n{look.stack}")
        return texts


def _dump(pid: int, log: str) -> str:
    """Let a process write the stacks of all its threads into its log, even from inside native code; the log's end."""
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return "(the process is gone)"
    time.sleep(1)
    return tail(log, 40)
