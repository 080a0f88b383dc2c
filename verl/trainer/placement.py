"""Which role lives where: pools of devices, and processes on them."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import Config, needs_critic, needs_reference, own_pools, processes
from verl.errors import ConfigError
from verl.hardware import Choice
from verl.notices import notice

MAIN = "actor"
"""The pool of the policy, and of every role that has none of its own."""
TERMS = {
    MAIN: ("trainer.n_gpus_per_node", "trainer.nnodes"),
    "reference": ("actor_rollout_ref.ref.n_gpus_per_node", "actor_rollout_ref.ref.nnodes"),
    "critic": ("critic.n_gpus_per_node", "critic.nnodes"),
    "rollout": ("actor_rollout_ref.rollout.n_gpus_per_node", "actor_rollout_ref.rollout.nnodes"),
}


@dataclass(frozen=True)
class PoolPlan:
    """One pool.

    Attributes:
        nodes: ranks on each node.
        processes: for each process of a rank, the roles that live in it. A role that is not named lives in the first.
    """

    name: str
    nodes: tuple[int, ...]
    processes: tuple[tuple[str, ...], ...]

    @property
    def world_size(self) -> int:
        return sum(self.nodes)


@dataclass(frozen=True)
class Placement:
    """The pools of a run by name."""

    pools: dict[str, PoolPlan]

    def pool_of(self, role: str) -> str:
        """The pool in which a role lives; dataflow nodes on one pool take turns, those on several run together."""
        return role if role in self.pools else MAIN

    def process_of(self, role: str) -> int:
        """The number of the role's process among those that share the places of its pool."""
        found = [i for i, roles in enumerate(self.pools[self.pool_of(role)].processes) if role in roles]
        return found[0] if found else 0

    def describe(self) -> str:
        """For people: ``actor: 4 ranks (actor+reference) · critic: 2 ranks (critic)``."""
        parts = []
        for pool in self.pools.values():
            roles = " | ".join("+".join(roles) for roles in pool.processes)
            parts.append(f"{pool.name}: {pool.world_size} rank{'s' * (pool.world_size > 1)} ({roles})")
        return " · ".join(parts)


def placement_of(config: Config) -> Placement:
    """Where the roles of a run live. ``config`` must be resolved."""
    own = own_pools(config)
    here = ["actor"]
    here += ["reference"] if needs_reference(config) and "reference" not in own else []
    here += ["critic"] if needs_critic(config) and "critic" not in own else []
    most = config.trainer.max_colocate_count
    shared = tuple(tuple(here[i : i + most]) for i in range(0, len(here), most))
    pools = {MAIN: PoolPlan(MAIN, (config.trainer.n_gpus_per_node,) * config.trainer.nnodes, shared)}
    for role, (each, nodes) in own.items():
        pools[role] = PoolPlan(role, (each,) * nodes, ((role,),))
    return Placement(pools)


def devices_described(config: Config, choice: Choice) -> str:
    """For people: what the run works on."""
    count = processes(config)
    if count == 1:
        return choice.device.described
    return f"{count} x {choice.device.described} ({placement_of(config).describe()})"


def check_devices(config: Config, choice: Choice, address: str | None) -> None:
    """Before anything is loaded: a run on this machine's GPUs must not ask for more than there are, and a rollout that
    runs beside the update must have some of its own.

    Args:
        address: of a Ray cluster that is joined; it is asked when it is there.

    Raises:
        ConfigError: with both numbers.
    """
    _check_rollout(config, choice)
    if choice.device.kind != "cuda" or address is not None or processes(config) == 1:
        return
    import torch

    asked, there = processes(config), torch.cuda.device_count()
    if asked <= there:
        return
    placement = placement_of(config)
    terms = " + ".join(
        f"{TERMS[name][0]}={p.nodes[0]} x {TERMS[name][1]}={len(p.nodes)}" for name, p in placement.pools.items()
    )
    raise ConfigError(
        f"{asked} GPUs are asked for ({terms}) and this machine has {there}: lower them, join a Ray cluster with "
        "trainer.ray_address, or set trainer.device=cpu for CPU processes."
    )


def _check_rollout(config: Config, choice: Choice) -> None:
    """The schedule one_step_off keeps a second copy of the policy, which needs a place."""
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.schedule != "one_step_off" or rollout.nnodes > 0:
        return
    key = "trainer.schedule=one_step_off"
    if choice.device.kind != "cpu" and choice.rollout_engine != "vllm_server":
        raise ConfigError(
            f"{key}: on one device rollout and update would wait for each other, and the weights would be there twice. "
            "Give the rollout devices of its own (actor_rollout_ref.rollout.nnodes=1 and .n_gpus_per_node), a server "
            "(actor_rollout_ref.rollout.name=vllm_server), or leave the schedule at sync."
        )
    notice(f"{key}: the rollout has a copy of the weights in this process, and works beside the update in its threads.")
