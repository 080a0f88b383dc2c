"""Joining a Ray cluster of two nodes, which are two sets of Ray processes on this machine."""

import time

import psutil
import pytest
import ray
import ray_groups
import torch
from ray.cluster_utils import Cluster as TwoNodes
from ray_players import Player

from verl.errors import ConfigError, TrainingError
from verl.single_controller.ray import Cluster, ClusterSettings, HostSettings, RayResourcePool, RayWorkerGroup, faults


def test_ranks_by_node_on_a_cluster_that_is_joined_and_left_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(faults, "NODE_S", 60.0)
    node = {"num_cpus": 2, "object_store_memory": 80_000_000}
    nodes = TwoNodes(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        nodes.add_node(**node)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        cluster = Cluster(ClusterSettings())
        with pytest.raises(ConfigError, match=r"3 CPUs on one node are asked for .* cluster at .* have 2, 2: change"):
            RayResourcePool([3], "wide", cluster=cluster).host_set()
        settings = HostSettings(setup=ray_groups.one_thread, log_folder=str(tmp_path))
        pool = RayResourcePool([2, 1], "two", cluster=cluster, settings=settings)
        with RayWorkerGroup(Player, resource_pool=pool) as workers:
            first, second, third = workers.hosts.places
            assert first.node_id == second.node_id != third.node_id
            found = workers.environment()
            assert [e["LOCAL_RANK"] for e in found] == ["0", "1", "0"]
            assert [e["LOCAL_WORLD_SIZE"] for e in found] == ["2", "2", "1"]
            assert workers.meet() == [3, 3, 3]
            (tmp_path / "elsewhere.log").write_text("one\ntwo\n")
            far = third._replace(host="another machine")
            assert faults.on_node(far, faults.tail, str(tmp_path / "elsewhere.log"), 1) == "two", (
                "read by a task on the rank's node"
            )
            assert faults.on_node(far._replace(node_id="0" * 56), faults.tail, "x") is None, "a node that is gone"
        cluster.close()
        again = Cluster(ClusterSettings(nodes.address))
        assert again.described == f"the Ray cluster at {nodes.address}"
        again.close()
    finally:
        ray.shutdown()
        nodes.shutdown()


def test_an_address_where_nobody_is_fails_at_once():
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"There is no Ray cluster at 127.0.0.1:1 .*ray start --head"):
        Cluster(ClusterSettings("127.0.0.1:1"))
    with pytest.raises(ConfigError, match=r"trainer\.ray_address=somewhere: give HOST:PORT"):
        Cluster(ClusterSettings("somewhere"))
    # other tests may have a cluster on this machine, which "auto" would find
    if not any(process.info["name"] in ("raylet", "gcs_server") for process in psutil.process_iter(["name"])):
        with pytest.raises(ConfigError, match="There is no Ray cluster at auto"):
            Cluster(ClusterSettings("auto"))
    assert time.monotonic() - began < 30


def test_a_full_object_store_is_an_error_not_a_hang():
    # a disk that may never be used: nothing can be moved out of the store
    init = {"num_cpus": 4, "object_store_memory": 80_000_000, "_system_config": {"local_fs_capacity_threshold": 0.0}}
    cluster = Cluster(ClusterSettings(init=init))
    try:
        pool = RayResourcePool([2], "full", cluster=cluster, settings=HostSettings(setup=ray_groups.one_thread))
        with RayWorkerGroup(Player, resource_pool=pool) as workers:
            began = time.monotonic()
            big = torch.zeros(200_000_000, dtype=torch.uint8)
            with pytest.raises(TrainingError, match=r"store and its disk are full.*ray_kwargs\.ray_init\.object_store"):
                workers.keep({"nested": [big]})
            with pytest.raises(TrainingError, match="store and its disk are full"):
                workers.large(200_000_000)
            assert time.monotonic() - began < 60
    finally:
        cluster.close()
