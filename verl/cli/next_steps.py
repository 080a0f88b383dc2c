"""What one can do next in this folder: the commands for the run that was trained here last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.layout import step_folders

PLACES = ("runs", "checkpoints", "output", ".")
_DEPTH = 3


@dataclass(frozen=True)
class LastRun:
    """The run folder whose record changed last.

    Attributes:
        has_model: it has a checkpoint of a model that writes; a reward model does not.
        base: the model that it began with, where that is on record.
    """

    folder: Path
    has_model: bool
    base: str | None


def last_run(here: Path) -> LastRun | None:
    """The newest run in the usual places below ``here``; None where nothing was trained."""
    records = [record for place in PLACES for record in _records(here / place)]
    if not records:
        return None
    folder = max(records, key=lambda record: record.stat().st_mtime).parent
    return LastRun(folder.relative_to(here), _has_model(folder), _base(folder / "config.yaml"))


def _records(folder: Path) -> list[Path]:
    patterns = ["/".join(["*"] * depth + ["metrics.jsonl"]) for depth in range(_DEPTH if folder.name else 1)]
    return [path for pattern in patterns for path in folder.glob(pattern) if "earlier_runs" not in path.parts]


def _has_model(folder: Path) -> bool:
    steps = step_folders(folder)
    config = steps[max(steps)] / "actor" / "config.json" if steps else None
    if config is None or not config.is_file():
        return bool(steps)
    from verl.tracking.stored import read_mapping

    names = read_mapping(config).get("architectures") or []
    return not any(str(name).endswith("ForSequenceClassification") for name in names)


def _base(config: Path) -> str | None:
    if not config.is_file():
        return None
    from verl.tracking.plain import config_value
    from verl.tracking.stored import read_mapping

    return config_value(read_mapping(config), "actor_rollout_ref.model.path")


def commands(run: LastRun) -> dict[str, str]:
    """Command name → the whole line to type."""
    lines = {"report": f"verl report {run.folder}"}
    if run.has_model:
        lines["chat"] = f"verl chat {run.folder}"
        if run.base is not None:
            lines["compare"] = f'verl compare {run.base} {run.folder} --prompt "..."'
        lines["export"] = f"verl export --model_path {run.folder} --output_dir exported"
    return lines
