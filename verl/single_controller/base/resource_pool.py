"""ResourcePool: a named set of places for ranks."""

from __future__ import annotations

from collections.abc import Sequence

from verl.errors import ConfigError


class ResourcePool:
    """``process_on_nodes[i]`` ranks on node i. Groups on one pool take turns; groups on different pools overlap."""

    def __init__(self, process_on_nodes: Sequence[int] = (1,), name: str = "default"):
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ConfigError(f"resource pool {name!r}: every node needs at least one process, got {process_on_nodes}")
        self.store = list(process_on_nodes)
        self.name = name

    @property
    def world_size(self) -> int:
        return sum(self.store)

    def local_world_size_list(self) -> list[int]:
        """For every rank, the number of ranks on its node."""
        return [count for count in self.store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For every rank, its number on its node."""
        return [local_rank for count in self.store for local_rank in range(count)]

    def __repr__(self) -> str:
        return f"ResourcePool({self.store}, name={self.name!r})"
