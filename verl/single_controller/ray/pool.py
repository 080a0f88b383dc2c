"""RayResourcePool: places for ranks on a cluster, held by placement groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from verl.errors import ConfigError
from verl.single_controller.base.resource_pool import ResourcePool
from verl.single_controller.ray.cluster import Cluster, ClusterSettings, import_ray
from verl.single_controller.ray.host import HostSettings
from verl.single_controller.ray.hosts import HostSet

PLACED_S = 60.0
VIEW_S = 10.0
"""How long a cluster may take to tell what is free."""


class RayResourcePool(ResourcePool):
    """``process_on_nodes[i]`` GPUs (or CPUs) held together on one node each, as one placement group.

    Args:
        use_gpu: a place is a GPU; else a CPU.
        cluster: the connection to Ray; by default the one that is there, or a new cluster on this machine.
        processes: processes that share each place (roles that do not live in one process).
        settings: for the processes.
        stall_after_s: seconds without progress after which stalled ranks are named; 0: never.
        when_closed: called with this pool when its places have been given back.
        when_lost: called with the reason when a process died.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] = (1,),
        name: str = "default",
        *,
        use_gpu: bool = False,
        cluster: Cluster | None = None,
        processes: int = 1,
        settings: HostSettings | None = None,
        stall_after_s: float = 0,
        when_closed: Callable[[RayResourcePool], None] | None = None,
        when_lost: Callable[[str], None] | None = None,
    ):
        super().__init__(process_on_nodes, name)
        self.use_gpu, self.processes, self.stall_after_s = use_gpu, processes, stall_after_s
        self.cluster = cluster or Cluster(ClusterSettings(processes=self.world_size))
        self.settings = settings or HostSettings(device="cuda" if use_gpu else "cpu")
        self._when_closed, self._when_lost = when_closed, when_lost
        self._groups: list[Any] = []
        self._sets: dict[int, HostSet] = {}

    @property
    def unit(self) -> str:
        """The resource that a place is."""
        return "GPU" if self.use_gpu else "CPU"

    def places(self) -> list[tuple[Any, int]]:
        """(placement group, bundle) of each rank."""
        self._place()
        return [
            (group, bundle) for group, count in zip(self._groups, self.store, strict=True) for bundle in range(count)
        ]

    def _place(self) -> None:
        if self._groups:
            return
        check_room([self])
        ray = import_ray()
        self._groups = [
            ray.util.placement_group([{self.unit: 1}] * count, strategy="STRICT_PACK") for count in self.store
        ]
        ready = [group.ready() for group in self._groups]
        if len(ray.wait(ready, num_returns=len(ready), timeout=PLACED_S)[0]) < len(ready):
            self.close()
            raise ConfigError(
                f"The resource pool '{self.name}' asks for {self.store} {self.unit}s by node, which "
                f"{self.cluster.described} did not give within {PLACED_S:g} s, though it has them: others hold them."
            )

    def host_set(self, number: int = 0) -> HostSet:
        """The processes with this number on the places; made when first asked for."""
        if number not in self._sets:
            name = self.name if self.processes == 1 else f"{self.name}-{number}"
            try:
                self._sets[number] = HostSet(
                    self, name, self.settings, share=1 / self.processes, stall_after_s=self.stall_after_s
                )
            except BaseException:
                if not self._sets:  # others may want the places
                    self.close()
                raise
        return self._sets[number]

    def host_set_ended(self, hosts: HostSet) -> None:
        """Forget processes that have ended, and give the places back when there are no more."""
        self._sets = {number: found for number, found in self._sets.items() if found is not hosts}
        if not self._sets:
            self.close()

    def lost(self, why: str) -> None:
        """A process died: end those that share its places, and let the run know."""
        self.end(why)
        if self._when_lost is not None:
            self._when_lost(why)

    def end(self, why: str) -> None:
        """End all processes; the places stay until :meth:`close`."""
        for hosts in self._sets.values():
            hosts.end(why)

    def close(self) -> None:
        """End all processes and give the places back. A second call does nothing."""
        sets, self._sets = self._sets, {}
        for hosts in sets.values():
            hosts.end("their resource pool was closed")
        groups, self._groups = self._groups, []
        ray = import_ray()
        if ray.is_initialized():
            for group in groups:
                ray.util.remove_placement_group(group)
        if groups and self._when_closed is not None:
            self._when_closed(self)

    def is_open(self) -> bool:
        """Whether places are held."""
        return bool(self._groups)

    def in_use(self) -> bool:
        """Whether a role lives here."""
        return any(hosts.roles for hosts in self._sets.values())

    def __repr__(self) -> str:
        return f"RayResourcePool({self.store} {self.unit}s, name={self.name!r})"


def check_room(pools: Sequence[RayResourcePool]) -> None:
    """See that the cluster has, and has free, what these pools of it ask for.

    Raises:
        ConfigError: it has not; with both numbers.
    """
    ray, cluster, unit = import_ray(), pools[0].cluster, pools[0].unit
    nodes = [node["Resources"].get(unit, 0) for node in ray.nodes() if node["Alive"]]
    asked, there = sum(pool.world_size for pool in pools), sum(nodes)
    parts = " + ".join(f"{pool.store} for '{pool.name}'" for pool in pools)
    if asked > there:
        raise ConfigError(
            f"{asked} {unit}s are asked for ({parts}, by node) and {cluster.described} has {there:g}: lower "
            "trainer.n_gpus_per_node or trainer.nnodes, or add machines."
        )
    rest = sorted(nodes, reverse=True)
    for count in sorted((count for pool in pools for count in pool.store), reverse=True):
        rest.sort(reverse=True)
        if rest[0] < count:
            raise ConfigError(
                f"{count} {unit}s on one node are asked for ({parts}, by node), and the nodes of {cluster.described} "
                f"have {', '.join(f'{n:g}' for n in sorted(nodes, reverse=True))}: change trainer.n_gpus_per_node and "
                "trainer.nnodes to what the nodes have."
            )
        rest[0] -= count
    until = time.monotonic() + VIEW_S
    while (free := ray.available_resources().get(unit, 0)) < asked:
        if time.monotonic() > until:
            raise ConfigError(
                f"{asked} {unit}s are asked for ({parts}, by node); {cluster.described} has {there:g}, of which "
                f"{free:g} are free: wait for the other jobs, or lower trainer.n_gpus_per_node or trainer.nnodes."
            )
        time.sleep(0.2)
