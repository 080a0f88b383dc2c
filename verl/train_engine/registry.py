"""Which training engine a role gets, by strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from verl.comm import Comm, TorchDistComm
from verl.errors import ConfigError
from verl.notices import notice
from verl.train_engine.optimizers import OptimizerSettings
from verl.train_engine.parallel import ParallelSettings
from verl.train_engine.torch_engine import TorchEngine

if TYPE_CHECKING:
    from verl.train_engine.spread import SpreadModule


def shards_weights(parallel: ParallelSettings, comm: Comm) -> bool:
    """Whether the role's weights are spread over its ranks.

    Raises:
        ConfigError: sharding is asked for, and the ranks are not processes.
    """
    if parallel.strategy == "torch":
        return False
    if comm.world_size == 1:
        if parallel.strategy == "fsdp":
            notice(f"{parallel.key}=fsdp: with one rank there is nothing to shard, so it trains with plain PyTorch.")
        return False
    if isinstance(comm, TorchDistComm):
        return True
    if parallel.strategy == "fsdp":
        raise ConfigError(f"{parallel.key}=fsdp needs ranks that are processes; here they are threads of one.")
    return False


def cuts_matrices(parallel: ParallelSettings, comm: Comm) -> bool:
    """Whether Megatron computes the role's model.

    Raises:
        ConfigError: it is asked for, and the ranks are not processes of a group.
    """
    if parallel.strategy == "megatron" and not isinstance(comm, TorchDistComm):
        raise ConfigError(f"{parallel.key}=megatron needs ranks that are processes (trainer.n_gpus_per_node above 1).")
    return parallel.strategy == "megatron"


def reads_rows(parallel: ParallelSettings, comm: Comm, settings: OptimizerSettings | None = None) -> bool:
    """Whether each rank will hold some rows of every weight, and so need not load them all."""
    spread = parallel.strategy in ("auto", "fsdp") and isinstance(comm, TorchDistComm) and comm.world_size > 1
    if not spread or settings is None:
        return spread
    from verl.train_engine.fsdp import ELEMENTWISE

    return settings.kind in ELEMENTWISE


def make_train_engine(
    settings: OptimizerSettings, model: nn.Module, comm: Comm, parallel: ParallelSettings | None = None
) -> TorchEngine:
    """The engine that trains ``model``, which is whole and equal on all ranks, or (where :func:`reads_rows`) still
    without weights; all ranks call this together."""
    parallel = parallel or ParallelSettings()
    if cuts_matrices(parallel, comm):
        from verl.train_engine.megatron import MegatronEngine

        assert isinstance(comm, TorchDistComm)
        return MegatronEngine(model, settings, comm, parallel)
    if shards_weights(parallel, comm):
        from verl.train_engine.fsdp import FSDPEngine, why_not_sharded

        assert isinstance(comm, TorchDistComm)
        reason = why_not_sharded(model, settings)
        if parallel.strategy != "auto" or reason is None:
            return FSDPEngine(model, settings, comm, parallel)
        notice(f"{parallel.key}=auto: every process keeps all weights, for {reason}.")
    return TorchEngine(model, settings, comm)


def shard_frozen(model: nn.Module, comm: Comm, parallel: ParallelSettings) -> SpreadModule | None:
    """Spread a model that is not trained over the ranks, which all call this; None if every rank keeps it whole."""
    if cuts_matrices(parallel, comm):
        from verl.train_engine.megatron_module import MegatronModule

        assert isinstance(comm, TorchDistComm)
        return MegatronModule(model, comm, parallel, frozen=True)
    if not shards_weights(parallel, comm):
        return None
    from verl.train_engine.fsdp_module import ShardedModule

    assert isinstance(comm, TorchDistComm)
    return ShardedModule(model, comm, parallel, frozen=True)
