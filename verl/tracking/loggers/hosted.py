"""Experiment services through their own packages: wandb, mlflow, swanlab, trackio, clearml.

Each package reads its usual environment variables (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``, ``SWANLAB_MODE``, ...).
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from verl.errors import MissingDependencyError
from verl.tracking.jsonl import jsonable
from verl.tracking.loggers.base import Logger, RunInfo
from verl.tracking.plain import flatten

_TABLE_COLUMNS = ("step", "split", "prompt", "response", "score", "ground_truth", "finish_reason", "uid")


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != name:
            raise  # the package is there, but one that it needs is not: its own message says which
        raise MissingDependencyError(name, f"trainer.logger={name}") from None


def _run_config(info: RunInfo) -> dict[str, Any]:
    config = dict(info.config)
    if info.resume_step:
        config["resumed_after_step"] = info.resume_step
    return config


class WandbLogger(Logger):
    """Weights & Biases. The runs of one experiment, resumed ones too, share a group."""

    name = "wandb"

    def __init__(self, info: RunInfo):
        self._wandb = _package("wandb")
        self._run = self._wandb.init(
            project=info.project,
            name=info.experiment,
            group=info.experiment,
            config=_run_config(info),
            dir=str(info.folder),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        data = [[_cell(column, row.get(column)) for column in _TABLE_COLUMNS] for row in rows]
        self._run.log({"samples": self._wandb.Table(columns=list(_TABLE_COLUMNS), data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _cell(column: str, value: Any) -> Any:
    """A table column must have one type: two hold numbers, the others text."""
    return value if value is None or column in ("step", "score") else str(value)


class MlflowLogger(Logger):
    """MLflow; ``MLFLOW_TRACKING_URI`` decides where, by default a database in the run folder."""

    name = "mlflow"
    _MAX_VALUE = 500  # characters of one parameter that every server version accepts
    _BATCH = 100  # parameters of one request

    def __init__(self, info: RunInfo):
        self._mlflow = _package("mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            folder = info.folder.resolve()
            self._mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
            if self._mlflow.get_experiment_by_name(info.project) is None:
                self._mlflow.create_experiment(info.project, artifact_location=(folder / "mlartifacts").as_uri())
        self._mlflow.set_experiment(info.project)
        self._mlflow.start_run(run_name=info.experiment)
        flat = flatten(_run_config(info))
        parameters = [(self._allowed(key), str(value)[: self._MAX_VALUE]) for key, value in flat.items()]
        for start in range(0, len(parameters), self._BATCH):
            self._mlflow.log_params(dict(parameters[start : start + self._BATCH]))

    @staticmethod
    def _allowed(name: str) -> str:
        """MLflow allows letters, digits, ``_ - . / :`` and spaces: ``mean@8`` becomes ``mean_at_8``."""
        return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"), flags=re.ASCII)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics({self._allowed(name): value for name, value in metrics.items()}, step=step)

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._mlflow.log_dict({"samples": jsonable(list(rows))}, f"samples/step_{step}.json")

    def close(self) -> None:
        self._mlflow.end_run()


class SwanlabLogger(Logger):
    """SwanLab; ``SWANLAB_MODE`` is ``cloud`` (its default), ``local``, ``offline`` or ``disabled``."""

    name = "swanlab"

    def __init__(self, info: RunInfo):
        self._swanlab = _package("swanlab")
        self._swanlab.init(
            project=info.project,
            experiment_name=info.experiment,
            config=_run_config(info),
            logdir=os.environ.get("SWANLAB_LOG_DIR") or str(info.folder / "swanlab"),
            mode=os.environ.get("SWANLAB_MODE") or "cloud",
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class TrackioLogger(Logger):
    """Trackio, the local-first tracker of Hugging Face; look with ``trackio show``."""

    name = "trackio"

    def __init__(self, info: RunInfo):
        self._trackio = _package("trackio")
        self._trackio.init(project=info.project, name=info.experiment, config=_run_config(info))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


class ClearmlLogger(Logger):
    """ClearML: ``critic/score/mean`` is the series ``score/mean`` of the plot ``critic``."""

    name = "clearml"

    def __init__(self, info: RunInfo):
        clearml = _package("clearml")
        self._task = clearml.Task.init(
            project_name=info.project,
            task_name=info.experiment,
            continue_last_task=bool(info.resume_step),
            output_uri=False,
        )
        self._task.connect_configuration(_run_config(info), name="config")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        logger = self._task.get_logger()
        for name, value in metrics.items():
            if math.isfinite(value):  # ClearML's scalars have no NaN
                title, _, series = name.partition("/")
                logger.report_scalar(title=title, series=series or title, value=value, iteration=step)

    def close(self) -> None:
        self._task.close()
