"""``ray_kwargs.*``: how Ray is started or joined, where a run has more than one process."""

# ruff: noqa: RUF009  (option() and group() make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.fields import group, option


@dataclass(slots=True)
class RayInit:
    """Arguments of ``ray.init``."""

    num_cpus: int | None = option(
        None, "CPUs of a cluster started here; `null`: its cores, or as many as needed.", low=1
    )
    num_gpus: int | None = option(None, "GPUs of a cluster started here; `null`: those there are.", low=0)
    object_store_memory: int | None = option(
        None, "Bytes for data on their way; `null`: a third of the memory, by Ray.", low=75 << 20
    )
    runtime_env: dict[str, Any] = option({}, "Packages, files and variables for the processes.")


@dataclass(slots=True)
class RayKwargs:
    """Ray."""

    ray_init: RayInit = group(RayInit, "Starting Ray.")
