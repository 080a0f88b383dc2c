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
from transformers import PreTrainedModel

from verl.hybrid.twin import make_twin
from verl.metrics import Metrics
from verl.models.loading import building_models
from verl.rollout.base import RolloutEngine
from verl.train_engine.base import TrainEngine

if TYPE_CHECKING:
    from verl.train_engine.spread import SpreadModule

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
        """What the last switch took, once; nothing where nothing is moved."""
        return Metrics()

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
        from verl.hybrid.arena import WeightArena

        self.sharded = sharded
        self.arena = WeightArena(sharded)
        self.arena.fill()  # the engine tries the twin out
        self._filled_version = -1
        super().__init__(model, make_engine, version)
        self.arena.give_back()

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

    def take_metrics(self) -> Metrics:
        """``timing_s/reshard``: seconds of the slowest rank to gather the weights, and before that to free them."""
        metrics = Metrics()
        if self.switch_seconds:
            metrics.add("timing_s/reshard", self.switch_seconds, reduce="max")
            self.switch_seconds = 0.0
        return metrics


def make_hybrid(model: PreTrainedModel, engine: TrainEngine, make_engine: MakeEngine) -> OneDeviceHybrid:
    """The switch for the weights that ``engine`` trains. With sharded weights all ranks call this together."""
    if engine.lockstep is None:
        return OneDeviceHybrid(model, make_engine, lambda: engine.version)
    return ShardedHybrid(model, engine.lockstep, make_engine, lambda: engine.version)
