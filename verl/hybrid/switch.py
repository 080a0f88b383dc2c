"""Entering rollout mode and train mode. On one device the weights are simply shared, so a switch copies nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from transformers import PreTrainedModel

from verl.hybrid.twin import make_twin
from verl.models.loading import building_models
from verl.rollout.base import RolloutEngine


class OneDeviceHybrid:
    """The training model, its rollout twin and the engine over it, on one device.

    Args:
        make_engine: builds the engine over the twin.
        version: tells the weights' version, so that the engine forgets what it computed from older ones.

    Attributes:
        twin: the rollout twin; its parameters are those of ``model``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        make_engine: Callable[[PreTrainedModel], RolloutEngine],
        version: Callable[[], int],
    ):
        with building_models():
            self.twin = make_twin(model)
            self._engine = make_engine(self.twin)
        self._version = version
        self._engine_version = -1
        self.switch_seconds = 0.0

    @property
    def engine_name(self) -> str:
        """Which engine generates: not always the one asked for, see :func:`verl.rollout.registry.make_engine`."""
        return self._engine.name

    @contextlib.contextmanager
    def rollout_mode(self) -> Iterator[RolloutEngine]:
        """The engine, ready to generate from the current weights."""
        started = time.perf_counter()
        if self._version() != self._engine_version:
            self._engine.weights_changed()
            self._engine_version = self._version()
        self.switch_seconds = time.perf_counter() - started
        try:
            yield self._engine
        finally:
            self._engine.release()
