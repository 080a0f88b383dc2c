"""Making the worker groups of a run: the one place that knows whether ranks are here or on a cluster."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.algorithms.registry import PolicyLoss, get_policy_loss_fn, load_custom, register_policy_loss
from verl.config import Config, processes
from verl.errors import ConfigError
from verl.hardware import Choice, decide
from verl.single_controller import LocalWorkerGroup, Worker, WorkerGroup
from verl.trainer.placement import Placement, placement_of

if TYPE_CHECKING:
    from verl.single_controller.ray import RayResourcePool

LOGS = "workers"
"""Folder in the run's, with a file for the output of each process."""
LOOK_S = 60.0


def make_group(config: Config, role: str, worker_cls: type[Worker], settings: Any) -> WorkerGroup:
    """The ranks of one role; the group's ``shutdown()`` ends them.

    One process in all: the role lives in this one. More: ranks are processes of a Ray cluster, which is started or
    joined with the first group of a run and left with its last.

    Args:
        config: of the run, resolved; groups made with the same object share processes and devices.
        role: "actor", "reference", "critic", ...: where it lives is up to the configuration.
        worker_cls, settings: what runs on each rank, ``worker_cls(settings)``.

    Raises:
        ConfigError: the cluster has fewer devices than are asked for.
        MissingDependencyError: several processes need Ray, which is not installed.
    """
    if processes(config) == 1:
        return LocalWorkerGroup(worker_cls, settings)
    from verl.single_controller.ray import RayWorkerGroup

    device = settings.model.device
    run = _RUNS.get(id(config)) or _Run(config, device)
    try:
        hosts = run.pool(role).host_set(run.placement.process_of(role))
        return RayWorkerGroup(worker_cls, settings, role=role, hosts=hosts)
    except BaseException:
        run.close_unused()
        raise


def workers_choice(config: Config) -> Choice | None:
    """What the machines of a joined cluster will use, if they have GPUs and this one has none; else None.

    Raises:
        MissingDependencyError: several processes need Ray, which is not installed.
    """
    if processes(config) == 1:
        return None
    from verl.single_controller.ray import Cluster, ClusterSettings, import_ray

    ray, address = import_ray(), cluster_address(config)
    if address is None or torch.cuda.is_available() or config.trainer.device not in ("auto", "cuda"):
        return None
    cluster = Cluster(ClusterSettings(address, init={"runtime_env": config.ray_kwargs.ray_init.runtime_env or None}))
    try:
        if not ray.cluster_resources().get("GPU"):
            return None
        return ray.get(ray.remote(decide).options(num_gpus=1, num_cpus=0).remote("cuda"), timeout=LOOK_S)
    except ray.exceptions.GetTimeoutError as error:
        raise ConfigError(
            f"No GPU of {cluster.described} became free within {LOOK_S:g} s to look at: others hold them."
        ) from error
    finally:
        cluster.close()


def cluster_address(config: Config) -> str | None:
    """The Ray cluster that a run joins; None: it starts one on this machine."""
    return config.trainer.ray_address or os.environ.get("RAY_ADDRESS") or None


class _Run:
    """The cluster and the pools of one run; it is in _RUNS while one of its pools is open."""

    def __init__(self, config: Config, device: str):
        from verl.single_controller.ray import Cluster, ClusterSettings, RayResourcePool, check_room

        self.config = config  # keeps its id
        self.placement: Placement = placement_of(config)
        init = config.ray_kwargs.ray_init
        arguments = {
            "num_cpus": init.num_cpus,
            "num_gpus": init.num_gpus,
            "object_store_memory": init.object_store_memory,
            "runtime_env": init.runtime_env or None,
        }
        self.cluster = Cluster(ClusterSettings(config.trainer.ray_address, processes(config), arguments))
        self.pools: dict[str, RayResourcePool] = {}
        try:
            settings = _host_settings(config, device)
            for plan in self.placement.pools.values():
                self.pools[plan.name] = RayResourcePool(
                    plan.nodes,
                    plan.name,
                    use_gpu=device == "cuda",
                    cluster=self.cluster,
                    processes=len(plan.processes),
                    settings=settings,
                    stall_after_s=config.trainer.stall_timeout_s,
                    when_closed=self._pool_closed,
                    when_lost=self._process_lost,
                )
            check_room(list(self.pools.values()))
        except BaseException:
            self.cluster.close()
            raise
        _RUNS[id(config)] = self

    def pool(self, role: str) -> RayResourcePool:
        return self.pools[self.placement.pool_of(role)]

    def close_unused(self) -> None:
        """After a failure: end the pools in which no role lives."""
        for pool in list(self.pools.values()):
            if not pool.in_use():
                pool.close()

    def _process_lost(self, why: str) -> None:
        """Nothing that still runs elsewhere can be used: it need not be waited for."""
        for pool in self.pools.values():
            pool.end(why)

    def _pool_closed(self, pool: RayResourcePool) -> None:
        if not any(other.is_open() for other in self.pools.values()):
            _RUNS.pop(id(self.config), None)
            self.cluster.close()


_RUNS: dict[int, _Run] = {}


def _host_settings(config: Config, device: str) -> Any:
    from verl.single_controller.ray import HostSettings

    folder, given = config.trainer.default_local_dir, os.environ.get("OMP_NUM_THREADS", "")
    return HostSettings(
        device=device,
        timeout_s=config.actor_rollout_ref.nccl_timeout,
        log_folder=None if folder is None else str(Path(folder).absolute() / LOGS),
        setup=partial(
            prepare_process,
            seed=config.trainer.seed,
            device=device,
            threads=int(given) if given.isdecimal() else None,
            deterministic=config.trainer.full_determinism,
            custom_path=config.algorithm.custom_path,
            loss=_own_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode),
            libraries=external_libraries(config),
        ),
    )


def prepare_process(
    rank: int,
    local_size: int,
    *,
    seed: int,
    device: str,
    threads: int | None,
    deterministic: bool,
    custom_path: str | None,
    loss: PolicyLoss | None,
    libraries: list[str],
) -> None:
    """What the controller's process was given too, done in a rank's process before a model is loaded."""
    if device == "cpu":
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // local_size))
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    if custom_path is not None:
        load_custom(custom_path)
    if loss is not None:
        register_policy_loss(loss.name, loss.prepare)(loss.fn)
    import_libraries(libraries)


def _own_loss(name: str) -> PolicyLoss | None:
    """The policy loss if it is registered in the user's program: no file tells the other processes of it."""
    loss = get_policy_loss_fn(name)
    module = loss.fn.__module__
    return None if module.startswith(("verl.", "verl_custom_")) else loss


def external_libraries(config: Config) -> list[str]:
    """``model.external_lib``: modules that register architectures before anything is loaded."""
    models = (config.actor_rollout_ref.model, config.critic.model)
    return [name.strip() for model in models for name in (model.external_lib or "").split(",") if name.strip()]


def import_libraries(names: list[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"model.external_lib={name} cannot be imported: {error}") from error
