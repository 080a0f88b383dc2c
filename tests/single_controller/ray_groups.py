"""Groups of both kinds for tests. Processes take seconds to start, so those of one size serve many tests."""

from __future__ import annotations

import itertools

from verl.single_controller import LocalWorkerGroup, Worker, WorkerGroup
from verl.single_controller.ray import Cluster, ClusterSettings, HostSettings, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.hosts import HostSet

STORE_BYTES = 100_000_000
_cluster: list[Cluster] = []
_hosts: dict[int, HostSet] = {}
_numbers = itertools.count()


class Idle(Worker):
    """Keeps the processes alive while no test uses them."""


def cluster() -> Cluster:
    """A small Ray cluster on this machine."""
    if not _cluster:
        init = {"num_cpus": 8, "object_store_memory": STORE_BYTES}
        _cluster.append(Cluster(ClusterSettings(init=init)))
    return _cluster[0]


def one_thread(rank: int, local_size: int) -> None:
    import torch

    torch.set_num_threads(1)


def pool(world_size: int, **options) -> RayResourcePool:
    settings = HostSettings(setup=one_thread, timeout_s=60)
    return RayResourcePool([world_size], f"test{next(_numbers)}", cluster=cluster(), settings=settings, **options)


def make_group(kind: str, worker_cls: type[Worker], world_size: int, **kwargs) -> WorkerGroup:
    if kind == "local":
        return LocalWorkerGroup(worker_cls, world_size=world_size, **kwargs)
    if world_size not in _hosts or _hosts[world_size].failure is not None:
        _hosts[world_size] = pool(world_size).host_set()
        RayWorkerGroup(Idle, hosts=_hosts[world_size])
    role = f"{worker_cls.__name__}{next(_numbers)}"
    return RayWorkerGroup(worker_cls, role=role, hosts=_hosts[world_size], **kwargs)


def close() -> None:
    """End the processes and the cluster."""
    for hosts in _hosts.values():
        hosts.pool.close()
    _hosts.clear()
    while _cluster:
        _cluster.pop().close()
