"""Entering rollout mode and leaving it.

On one device the weights are simply shared, so a switch copies nothing. Where they are spread over ranks, entering
gathers them into an arena that the rollout twin views.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from verl.comm import TorchDistComm
from verl.errors import ConfigError, ModelError, TrainingError
from verl.hybrid.split_twin import split_twin
from verl.hybrid.twin import make_twin
from verl.metrics import Metrics
from verl.models.backbone import hidden_states, probe_batch, probe_tolerance
from verl.models.cuts import Cuts
from verl.models.loading import building_models
from verl.rollout.base import RolloutEngine
from verl.rollout.lockstep import LockstepEngine
from verl.train_engine.base import TrainEngine

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from verl.hybrid.arena import WeightArena
    from verl.train_engine.spread import SpreadModule

SIZE_KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"
MakeEngine = Callable[[PreTrainedModel], RolloutEngine]


class OneDeviceHybrid:
    """The training model, its rollout twin and the engine over it, on one device.

    Args:
        make_engine: builds the engine over the twin.
        version: tells the weights' version, so that the engine forgets what it computed from older ones.

    Attributes:
        twin: the rollout twin; its parameters are those of ``model``.
        switch_seconds: how long the last switch to rollout took, and the switch back before it.
    """

    def __init__(self, model: PreTrainedModel, make_engine: MakeEngine, version: Callable[[], int]):
        with building_models():
            self.twin = self._make_twin(model)
            self._engine = make_engine(self.twin)
        self._version = version
        self._engine_version = -1
        self.switch_seconds = 0.0

    def _make_twin(self, model: PreTrainedModel) -> PreTrainedModel:
        return make_twin(model)

    @property
    def engine_name(self) -> str:
        """Which engine generates: not always the one asked for, see :func:`verl.rollout.registry.make_engine`."""
        return self._engine.name

    @contextlib.contextmanager
    def rollout_mode(self) -> Iterator[RolloutEngine]:
        """The engine, ready to generate from the current weights."""
        started = time.perf_counter()
        self._enter()
        if self._version() != self._engine_version:
            self._engine.weights_changed()
            self._engine_version = self._version()
        self.switch_seconds += time.perf_counter() - started
        try:
            yield self._engine
        finally:
            self._engine.release()
            started = time.perf_counter()
            self._leave()
            self.switch_seconds = time.perf_counter() - started

    def take_metrics(self) -> Metrics:
        """``timing_s/reshard``, once: seconds of the slowest rank to switch to rollout, and back from the one before.

        On one device that is what the engine does about new weights (vLLM takes them over, a cache is forgotten); over
        several ranks it is the gathering too.
        """
        metrics = Metrics()
        if self.switch_seconds:
            metrics.add("timing_s/reshard", self.switch_seconds, reduce="max")
            self.switch_seconds = 0.0
        return metrics

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def _enter(self) -> None:
        """Let the twin's weights be the current ones."""

    def _leave(self) -> None:
        """Give back what only the rollout needs."""


class ShardedHybrid(OneDeviceHybrid):
    """A training model that is spread over ranks, and on every rank a whole rollout twin: replicas that generate their
    own rows. All ranks enter rollout mode together; leaving needs no other rank.

    Attributes:
        arena: where the twin's weights lie.
    """

    def __init__(
        self, model: PreTrainedModel, sharded: SpreadModule, make_engine: MakeEngine, version: Callable[[], int]
    ):
        self.sharded = sharded
        self.arena = self._make_arena(model)
        self.arena.fill()  # the engine tries the twin out
        self._filled_version = -1
        super().__init__(model, make_engine, version)
        self.arena.give_back()

    def _make_arena(self, model: PreTrainedModel) -> WeightArena:
        from verl.hybrid.arena import WeightArena

        return WeightArena(self.sharded)

    def _make_twin(self, model: PreTrainedModel) -> PreTrainedModel:
        return make_twin(model, dtype=self.sharded.live_dtype, parameters=self.arena.parameters)

    def _enter(self) -> None:
        if self.arena.held and self._filled_version == self._version():
            return
        self.arena.fill()
        if self.sharded.device.type == "cuda":
            torch.cuda.current_stream(self.sharded.device).synchronize()  # so that the time is that of the gathering
        self._filled_version = self._version()

    def _leave(self) -> None:
        self.arena.give_back()


class SplitHybrid(ShardedHybrid):
    """A training model that is spread over ranks, and rollout twins of which each ``size`` neighbouring ranks hold one
    together (tensor parallelism). They generate the rows of all of them, and each gives back its own.

    Leaving waits for the other ranks of the group to be done.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sharded: SpreadModule,
        make_engine: MakeEngine,
        version: Callable[[], int],
        size: int,
    ):
        self.size = size
        self.group = _neighbours(sharded, size)

        def together(twin: PreTrainedModel) -> RolloutEngine:
            return LockstepEngine(make_engine(twin), TorchDistComm(self.group))

        super().__init__(model, sharded, together, version)

    def _make_arena(self, model: PreTrainedModel) -> WeightArena:
        from verl.hybrid.arena import WeightArena

        try:
            self.cuts = Cuts(model, self.size)
        except ModelError as error:
            raise ConfigError(f"{SIZE_KEY}={self.size} is not possible: {error}") from error
        return WeightArena(self.sharded, self.cuts)

    def _make_twin(self, model: PreTrainedModel) -> PreTrainedModel:
        twin = super()._make_twin(model)
        split_twin(twin, self.cuts, self.group)
        self._compare(model, twin)
        return twin

    @torch.no_grad()
    def _compare(self, model: PreTrainedModel, twin: PreTrainedModel) -> None:
        """The parts must compute what the whole model computes."""
        device, vocabulary = self.sharded.device, model.config.get_text_config().vocab_size
        probe = probe_batch(device, vocabulary)
        [whole] = self.sharded.settle([self.sharded.infer(lambda: {"probe": hidden_states(model, probe)})])
        ids = probe.input_ids[:, -8:]  # the sequence of its own
        found = twin.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        if whole is None:
            raise TrainingError(f"Out of memory on {device} in the first pass: take a smaller model, or more devices.")
        expected = whole["probe"].to(device)
        error = float((found - expected[-8:]).abs().max() / expected[-8:].abs().max().clamp_min(1e-6))
        if not error < probe_tolerance(expected.dtype):
            raise ConfigError(
                f"{SIZE_KEY}={self.size} is not possible: the parts of {type(model).__name__} compute other hidden "
                f"states than the whole (relative difference {error:.1e}); use 1."
            )


def _neighbours(sharded: SpreadModule, size: int) -> ProcessGroup:
    """The group of this rank among groups of ``size`` neighbouring ranks. All ranks call this together.

    Raises:
        ConfigError: the ranks do not divide into such groups.
    """
    from torch.distributed.device_mesh import DeviceMesh

    world = sharded.comm.world_size
    if world % size:
        raise ConfigError(f"{SIZE_KEY}={size} does not divide the {world} processes of the policy: use a divisor.")
    ranks = torch.tensor(dist.get_process_group_ranks(sharded.comm.group)).view(world // size, size)
    return DeviceMesh(sharded.device.type, ranks, mesh_dim_names=("replica", "part")).get_group("part")


def make_hybrid(
    model: PreTrainedModel, engine: TrainEngine, make_engine: MakeEngine, tensor_size: int = 1
) -> OneDeviceHybrid:
    """The switch for the weights that ``engine`` trains. With sharded weights all ranks call this together.

    Args:
        tensor_size: neighbouring ranks that generate together, each with its part of the weights.

    Raises:
        ConfigError: the weights are not spread over the ranks, or the model cannot be cut so.
    """
    spread = engine.lockstep
    if tensor_size > 1:
        if spread is None:
            raise ConfigError(
                f"{SIZE_KEY}={tensor_size} needs weights that are spread over processes "
                "(actor_rollout_ref.actor.strategy=fsdp with trainer.n_gpus_per_node above 1); use 1."
            )
        return SplitHybrid(model, spread, make_engine, lambda: engine.version, tensor_size)
    if spread is None:
        return OneDeviceHybrid(model, make_engine, lambda: engine.version)
    return ShardedHybrid(model, spread, make_engine, lambda: engine.version)
