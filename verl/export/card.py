"""The model card of an exported folder: where the weights come from, and the run's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from verl._version import __version__
from verl.checkpoint.models import ModelSource
from verl.export.record import RunRecord
from verl.tracking import headline
from verl.tracking.headline import duration

_SETTINGS = (
    ("data", "data.train_files"),
    ("prompts a step", "data.train_batch_size"),
    ("responses a prompt", "actor_rollout_ref.rollout.n"),
    ("response tokens, at most", "data.max_response_length"),
    ("temperature", "actor_rollout_ref.rollout.temperature"),
    ("learning rate", "actor_rollout_ref.actor.optim.lr"),
    ("LoRA rank", "actor_rollout_ref.model.lora_rank"),
    ("seed", "trainer.seed"),
)


def model_card(source: ModelSource, record: RunRecord, *, name: str, adapter: bool, dtype: str) -> str:
    """README.md in Markdown, with the front matter that model hubs read."""
    base = record.base_model
    algorithm = record.value("algorithm.name", "algorithm.adv_estimator")
    front: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["verl", "reinforcement-learning", *([str(algorithm)] if algorithm else [])],
    }
    if base and not Path(base).is_absolute():
        front["base_model"] = base
    parts = ["---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", f"# {name}", ""]
    what = f"trained with {str(algorithm).upper()}" if algorithm else "exported"
    parts += [f"{'A LoRA adapter' if adapter else 'A language model'} {what} by verl {__version__}.", ""]
    facts = _facts(source, record, algorithm, dtype)
    parts += ["| | |", "|---|---|", *(f"| {label} | {_cell(value)} |" for label, value in facts), ""]
    parts += _numbers(record)
    if command := record.environment.get("command"):
        parts += ["## Command", "", "```", command, "```", ""]
    return "\n".join(parts)


def _facts(source: ModelSource, record: RunRecord, algorithm: Any, dtype: str) -> list[tuple[str, Any]]:
    total = record.value("trainer.total_training_steps")
    seconds = sum(value for row in record.metrics if (value := headline.first(row, headline.STEP_SECONDS)) is not None)
    versions = record.environment.get("packages") or {}
    shown = ", ".join(f"{package} {versions[package]}" for package in ("torch", "transformers") if package in versions)
    facts = [
        ("base model", record.base_model),
        ("algorithm", algorithm),
        ("steps", f"{source.step} of {total}" if total and source.step is not None else source.step),
        ("validation score of this step", None if source.score is None else f"{source.score:.4g}"),
        ("weights", dtype),
        *((label, record.value(key)) for label, key in _SETTINGS),
        ("training time", duration(seconds) if seconds else None),
        ("made with", shown),
        ("commit", record.environment.get("git_commit")),
    ]
    return [(label, value) for label, value in facts if value not in (None, "", 0, [])]


def _numbers(record: RunRecord) -> list[str]:
    """A table of what was measured: first, last and best."""
    rows = [(name, *values) for name, values in record.validation().items()]
    for label, names in (("reward", headline.REWARD), ("response length", headline.LENGTH)):
        values = [value for row in record.metrics if (value := headline.first(row, names)) is not None]
        if values:
            rows.append((label, values[0], values[-1], max(values)))
    if not rows:
        return []
    lines = [f"| {_cell(name)} | {a:.4g} | {b:.4g} | {c:.4g} |" for name, a, b, c in rows]
    return ["## Numbers", "", "| | first | last | highest |", "|---|---|---|---|", *lines, ""]


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return " ".join(text.replace("|", "\\|").split())
