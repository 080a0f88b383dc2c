"""HostSet: one process for each rank of a pool, and waiting for what they do."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Collection, Generator, Mapping
from typing import TYPE_CHECKING, Any

from verl.comm import CommError
from verl.errors import ConfigError, DataflowError, WorkerDiedError
from verl.notices import notice
from verl.single_controller.calls import Turns
from verl.single_controller.ranks import add_note
from verl.single_controller.ray.cluster import import_ray
from verl.single_controller.ray.faults import ANSWER_S, RemoteTraceback, StallWatch, death, message_failure
from verl.single_controller.ray.host import HostSettings, Look, Place, RankHost, Reply
from verl.single_controller.ray.wire import Packed, pack, unpack

if TYPE_CHECKING:
    from verl.single_controller.ray.pool import RayResourcePool

START_S = 300.0
"""How long processes may take to start."""
GRACE_S = 10.0
"""How long the other ranks may go on when one has failed; then all are ended."""
LOOK_S = 0.5
DESERTED_S = 2.0
"""How often it is looked whether ranks wait for others that will not come."""


class HostSet:
    """The processes of one pool, which share a process group. Several roles may live in them.

    Args:
        share: of a place (GPU or CPU) for each process.
        stall_after_s: see :class:`verl.single_controller.ray.faults.StallWatch`.

    Attributes:
        failure: why the processes were ended, if they were.
    """

    def __init__(
        self, pool: RayResourcePool, name: str, settings: HostSettings, *, share: float = 1.0, stall_after_s: float = 0
    ):
        self.pool, self.name, self.settings = pool, name, settings
        self.world_size = pool.world_size
        self.stall_after_s = stall_after_s
        self.turns = Turns()
        self.roles: list[str] = []
        self.failure: str | None = None
        self.places: list[Place] = []
        self._numbers = itertools.count()
        self._ray = import_ray()
        self._actors = self._spawn(share)
        try:
            self._start()
        except BaseException:
            self.end("the processes did not start")
            raise

    # ---- starting and ending ---------------------------------------------------------------------------------------

    def _spawn(self, share: float) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cls = self._ray.remote(concurrency_groups={"control": 2})(RankHost)
        locals_, sizes = self.pool.local_rank_list(), self.pool.local_world_size_list()
        actors = []
        for rank, (group, bundle) in enumerate(self.pool.places()):
            options = {"num_gpus": share, "num_cpus": 0} if self.pool.use_gpu else {"num_gpus": 0, "num_cpus": share}
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            actor = cls.options(scheduling_strategy=strategy, max_restarts=0, **options)
            arguments = (self.name, self.settings.log_folder, rank, locals_[rank], (self.world_size, sizes[rank]))
            actors.append(actor.remote(*arguments))
        return actors

    def _start(self) -> None:
        refs = [actor.place.remote() for actor in self._actors]
        _, late = self._ray.wait(refs, num_returns=len(refs), timeout=START_S)
        if late:
            ranks = [rank for rank, ref in enumerate(refs) if ref in late]
            raise ConfigError(f"the processes of rank(s) {ranks} did not start within {START_S:g} s; see Ray's logs")
        try:
            self.places = self._ray.get(refs)
            meeting = self._ray.get(self._actors[0].meeting_place.remote()) if self.world_size > 1 else ("", 0)
        except self._ray.exceptions.RayError as error:
            raise WorkerDiedError(f"A process of '{self.name}' ended while it was started: {error}") from error
        paths = tuple(path for path in sys.path if path)
        settings = self._ray.put(pack(self.settings))
        self.gather("start", {r: a.start.remote(*meeting, paths, settings) for r, a in enumerate(self._actors)})

    def end(self, why: str) -> None:
        """Kill every process, at once. A second call does nothing."""
        if self.failure is not None:
            return
        self.failure = why
        if self._ray.is_initialized():
            for actor in self._actors:
                self._ray.kill(actor, no_restart=True)

    def lost(self, why: str) -> None:
        """A process died: end the others, and tell the pool."""
        if self.failure is None:
            self.end(why)
            self.pool.lost(why)

    def join(self, role: str, packed: Packed, label: str) -> None:
        """Make the worker of a role in every process."""
        self._check()
        if role in self.roles:
            raise ConfigError(f"there is a role '{role}' in the processes '{self.name}' already")
        ref = self._ray.put(packed)
        self.gather(f"{label}.__init__", {r: a.create.remote(role, ref) for r, a in enumerate(self._actors)})
        self.roles.append(role)

    def leave(self, role: str) -> None:
        """Take a role out; without roles the processes end."""
        if role in self.roles:
            self.roles.remove(role)
            if self.roles and self.failure is None:
                for actor in self._actors:
                    actor.drop.remote(role)
        if not self.roles:
            self.end("their last role was shut down")
            self.pool.host_set_ended(self)

    def _check(self) -> None:
        if self.failure is not None:
            raise DataflowError(f"the processes '{self.name}' are no more: {self.failure}")

    # ---- calling ---------------------------------------------------------------------------------------------------

    def call(self, role: str, label: str, name: str, mode: str | None, packed: Mapping[int, Packed]) -> list[Any]:
        """Run a method on these ranks; the values in rank order."""
        self._check()
        refs = {}
        for rank, message in self._sent(label, packed).items():
            refs[rank] = self._actors[rank].call.remote(role, name, mode, message)
        return self.gather(label, refs)

    def _sent(self, label: str, packed: Mapping[int, Packed]) -> dict[int, Any]:
        """What each rank gets: large messages as objects of the store, those for several ranks once."""
        refs: dict[int, Any] = {}
        try:
            for message in {id(message): message for message in packed.values()}.values():
                refs[id(message)] = self._ray.put(message) if message.buffers else message
        except (self._ray.exceptions.RayError, MemoryError) as error:
            raise message_failure(label, error) from error
        return {rank: refs[id(message)] for rank, message in packed.items()}

    def gather(self, label: str, refs: Mapping[int, Any]) -> list[Any]:
        """Wait for a call's replies. If a rank fails the others get GRACE_S; then the most telling error is raised."""
        waiting = {ref: rank for rank, ref in refs.items()}
        values: dict[int, Any] = {}
        failures = _Failures(self, label)
        watch = StallWatch(self, label, self.stall_after_s)
        while waiting and not failures.overdue():
            done, _ = self._ray.wait(list(waiting), num_returns=1, timeout=LOOK_S)
            for ref in done:
                rank = waiting.pop(ref)
                reply = failures.reply(rank, ref)
                if reply is not None:
                    values[rank] = unpack(reply.value)
            if not failures.errors:
                failures.add_desertion(set(waiting.values()))
            watch.look(waiting.values())
        failures.conclude(waiting.values())
        return [values[rank] for rank in sorted(values)]

    def stream(
        self, role: str, label: str, name: str, mode: str | None, packed: Mapping[int, Packed]
    ) -> Generator[Any, None, None]:
        """Pieces of all ranks as they come."""
        self._check()
        number = next(self._numbers)
        sources = {}
        for rank, message in self._sent(label, packed).items():
            method = self._actors[rank].stream.options(num_returns="streaming")
            sources[rank] = method.remote(number, role, name, mode, message)
        failures, closed = _Failures(self, label), True
        try:
            watch = StallWatch(self, label, self.stall_after_s)
            while sources and not failures.errors:
                for piece in self._next_pieces(sources, failures):
                    watch.progress()
                    yield piece
                watch.look(sources)
            closed = False
        finally:
            for rank in sources:
                self._control(rank, "stop_stream", number)
            failures.start_clock(bool(sources))
            while sources and not failures.overdue():
                for _ in self._next_pieces(sources, failures):
                    pass
            failures.conclude(sources, closed=closed)

    def _next_pieces(self, sources: dict[int, Any], failures: _Failures) -> list[Any]:
        """The pieces that are there, after waiting a moment for one; streams that have ended leave ``sources``."""
        ready, _ = self._ray.wait(list(sources.values()), num_returns=1, timeout=LOOK_S)
        pieces = []
        for rank in [rank for rank, source in sources.items() if any(source is found for found in ready)]:
            try:
                ref = next(sources[rank])
            except StopIteration:
                del sources[rank]
                continue
            reply = failures.reply(rank, ref)
            if reply is None:
                if rank in failures.dead:
                    del sources[rank]
            else:
                pieces.append(unpack(reply.value))
        return pieces

    def _control(self, rank: int, name: str, *arguments: Any) -> Any:
        return getattr(self._actors[rank], name).options(concurrency_group="control").remote(*arguments)

    def looks(self, ranks: Collection[int]) -> dict[int, Look | None]:
        """What each rank does; None for one that does not answer."""
        refs = {rank: self._control(rank, "look") for rank in ranks}
        self._ray.wait(list(refs.values()), num_returns=len(refs), timeout=ANSWER_S)
        found: dict[int, Any] = {}
        for rank, ref in refs.items():
            try:
                found[rank] = self._ray.get(ref, timeout=0.1)
            except self._ray.exceptions.RayError:  # dead, or too late
                found[rank] = None
        return found


class _Failures:
    """The errors of one call, in order of time."""

    def __init__(self, hosts: HostSet, label: str):
        self.hosts, self.label = hosts, label
        self.errors: list[Exception] = []
        self.dead: set[int] = set()
        self._deadline: float | None = None
        self._looked = time.monotonic()
        self._held_up: dict[int, tuple[str, int]] = {}

    def add_desertion(self, waiting: set[int]) -> None:
        """Add an error if all ranks that still work wait in a collective for ranks that do not take part any more."""
        idle = set(range(self.hosts.world_size)) - waiting
        if not idle or not waiting or time.monotonic() - self._looked < DESERTED_S:
            return
        self._looked = time.monotonic()
        looks = self.hosts.looks(waiting)
        held_up = {rank: (look.waiting_in, look.calls) for rank, look in looks.items() if look and look.waiting_in}
        # twice the same: it is no collective that just ends
        if held_up.keys() == waiting and held_up == self._held_up:
            call = held_up[min(waiting)][0]
            patient, gone = sorted(waiting), sorted(idle)
            self._add(CommError(f"in {self.label} rank(s) {patient} wait in {call} for rank(s) {gone}, which are done"))
            self._deadline = 0.0  # they will not come back
        self._held_up = held_up

    def reply(self, rank: int, ref: Any) -> Reply | None:
        """What a rank answered; None if that was an error, which is kept."""
        ray = self.hosts._ray
        try:
            reply = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            self.dead.add(rank)
            self._add(self._death(rank, error))
            return None
        except ray.exceptions.RayError as error:
            self.dead.add(rank)
            self._add(message_failure(f"{self.label} on rank {rank}", error))
            return None
        for text in reply.notices:
            notice(text)
        if reply.kind != "error":
            return reply
        raised, trace = unpack(reply.value)
        raised.__cause__ = RemoteTraceback(trace)
        add_note(raised, f"in {self.label} on rank {rank} of {self.hosts.world_size}")
        self._add(raised)
        return None

    def _death(self, rank: int, error: Exception) -> Exception:
        if self.hosts.failure is not None:
            return DataflowError(f"the processes '{self.hosts.name}' were ended: {self.hosts.failure}")
        return death(self.hosts, rank, self.label, error) if self.hosts.places else error

    def _add(self, error: Exception) -> None:
        self.errors.append(error)
        self.start_clock(True)

    def start_clock(self, needed: bool) -> None:
        """The ranks that still work have GRACE_S from now."""
        if needed and self._deadline is None:
            self._deadline = time.monotonic() + GRACE_S

    def overdue(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def conclude(self, late: Any, closed: bool = False) -> None:
        """End the processes if they cannot be used any more, and raise the first error that is no mere echo."""
        first = min(self.errors, key=_echo, default=None)
        if self.dead:
            self.hosts.lost(str(first).splitlines()[0])
        elif late or any(isinstance(error, CommError) for error in self.errors):
            self.hosts.end(f"rank(s) {sorted(late)} did not come back from {self.label} after another one failed")
        if first is not None and not (closed and isinstance(first, CommError)):
            raise first


def _echo(error: Exception) -> int:
    """0 for a death, 1 for an error of a rank's own, 2 for one that other ranks' failures bring about."""
    return 0 if isinstance(error, WorkerDiedError) else 2 if isinstance(error, CommError) else 1
