"""``megatron.*`` of a role: how Megatron-Core cuts its model over the processes."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.fields import option


@dataclass(slots=True)
class MegatronConfig:
    """Read where `strategy` is `megatron`."""

    tensor_model_parallel_size: int | None = option(
        None,
        "Neighbouring processes over which every matrix is cut; `null`: 1 for the actor, the actor's for other roles.",
        low=1,
        verl=1,
    )
