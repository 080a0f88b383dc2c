"""What the record of a run says about the model that came out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.checkpoint.models import ModelSource
from verl.tracking import headline
from verl.tracking.jsonl import number, read_jsonl
from verl.tracking.plain import config_value
from verl.tracking.stored import read_mapping


@dataclass(frozen=True)
class RunRecord:
    """The parts of a run's record that an export needs; everything may be empty.

    Attributes:
        metrics: the records up to the exported step.
    """

    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def value(self, *keys: str) -> Any:
        return config_value(self.config, *keys)

    @property
    def base_model(self) -> str | None:
        return self.value("actor_rollout_ref.model.path")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that ended a response in training, besides the model's own eos ids."""
        return tuple(self.value("actor_rollout_ref.rollout.stop_token_ids") or ())

    def validation(self) -> dict[str, tuple[float, float, float]]:
        """First, last and best value of each main validation number."""
        curves: dict[str, list[float]] = {}
        for record in self.metrics:
            for name, value in headline.validation(record).items():
                curves.setdefault(name, []).append(value)
        return {name: (values[0], values[-1], max(values)) for name, values in curves.items()}


def read_record(source: ModelSource) -> RunRecord:
    """The record in the run's folder. A checkpoint folder that is no run folder has none."""
    if source.run is None:
        return RunRecord()
    metrics = []
    for row in read_jsonl(source.run / "metrics.jsonl"):
        if isinstance(row.get("step"), int) and (source.step is None or row["step"] <= source.step):
            values = {key: number(value) for key, value in row.items()}
            metrics.append({key: value for key, value in values.items() if value is not None})
    return RunRecord(
        config=read_mapping(source.run / "config.yaml"),
        environment=read_mapping(source.run / "environment.json"),
        metrics=metrics,
    )
