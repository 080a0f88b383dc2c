"""``fsdp_config.*`` of a role: how its weights are spread over the processes."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.fields import option


@dataclass(slots=True)
class FSDPConfig:
    """Sharding with FSDP2; read where `strategy` shards and there is more than one process."""

    fsdp_size: int = option(
        -1, "Processes that a copy of the weights is spread over; -1: all of them; fewer: several copies.", low=-1
    )
    reshard_after_forward: bool = option(
        True, "Give a layer's gathered weights back after its forward pass and gather them again in the backward pass."
    )
    forward_prefetch: bool = option(False, "Ask for the next layer's weights one layer earlier.")
