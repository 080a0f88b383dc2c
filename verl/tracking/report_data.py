"""What the report shows, taken from a run folder: header, tiles, chart groups, samples, config."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from statistics import median
from typing import Any

from verl.tracking import headline
from verl.tracking.jsonl import encode_line
from verl.tracking.plain import config_value, flatten
from verl.tracking.report_charts import chart_panels
from verl.tracking.run_dir import RunDirectory

MAX_SAMPLE_BYTES = 8 * 1024**2  # of JSON, so that the page stays under 15 MB and opens at once on a phone
MAX_POINTS = 2000  # a curve; more cannot be told apart on a screen


def report_data(run_dir: RunDirectory) -> dict[str, Any]:
    """Plain data for the page's script; every number is finite or null."""
    records = run_dir.read_metrics()
    config, environment = run_dir.read_config(), run_dir.read_environment()
    shown = thinned(records)
    samples, total_samples = sample_rows(run_dir.read_samples())
    return {
        "title": _title(run_dir, config),
        "facts": run_facts(records, config, environment),
        "tiles": _tiles(records),
        "steps": [record["step"] for record in shown],
        "panels": chart_panels(shown),
        "phases": _phase_columns(shown),
        "samples": samples,
        "total_samples": total_samples,
        "config": {key: value_text(value) for key, value in flatten(config).items()},
        "environment": {
            key: value_text(value) for key, value in flatten(environment).items() if value not in (None, [], {})
        },
        "notices": [_notice(line) for line in run_dir.read_notices()],
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
    }


def value_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {value_text(item)}" for key, item in value.items()) or "{}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _notice(line: str) -> dict[str, str]:
    time, _, text = line.partition(" ")
    return {"time": time[:19].replace("T", " "), "text": text}


# -- header -----------------------------------------------------------------------------------------------------------
def _title(run_dir: RunDirectory, config: dict[str, Any]) -> str:
    names = [config_value(config, f"trainer.{key}") for key in ("project_name", "experiment_name")]
    return " / ".join(str(name) for name in names if name) or run_dir.path.resolve().name


def run_facts(records: list[dict[str, Any]], config: dict[str, Any], environment: dict[str, Any]) -> list[list[str]]:
    """Label and text of the line under the title; what is not known is left out."""
    model = config_value(config, "actor_rollout_ref.model.path", "model.path", "model.partial_pretrain")
    gpus = environment.get("gpus") or []
    device = f"{len(gpus)} × {gpus[0]['name']}" if gpus else environment.get("cpu")
    if not gpus and environment.get("threads"):
        device = f"{device} ({environment['threads']} thread{'' if environment['threads'] == 1 else 's'})"
    total = config_value(config, "trainer.total_training_steps")
    last = records[-1]["step"] if records else 0
    facts = [
        ("model", str(model).rstrip("/").rsplit("/", 1)[-1] if model else None),
        ("algorithm", config_value(config, "algorithm.name", "algorithm.adv_estimator")),
        ("device", device),
        ("steps", f"{last} of {total}" if total and last != total else str(last)),
        ("training time", _spent(records)),
        ("started", str(environment.get("started", ""))[:16].replace("T", " ") or None),
    ]
    return [[label, str(text)] for label, text in facts if text]


def _spent(records: list[dict[str, Any]]) -> str | None:
    """The sum of all step times, which also counts right over a run that was stopped and resumed."""
    seconds = [value for record in records if (value := headline.first(record, headline.STEP_SECONDS)) is not None]
    total = sum(value for value in seconds if math.isfinite(value))
    return str(timedelta(seconds=round(total))) if total >= 1 else None


def _tiles(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Before and after: every validation number (at most four), then reward, length and speed."""
    tiles = []
    curves: dict[str, list[float]] = {}
    for record in records:
        for name, value in headline.validation(record).items():
            curves.setdefault(name, []).append(value)
    for name, values in list(curves.items())[:4]:
        kind = "percent" if name.endswith(" accuracy") else "number"
        tiles.append(_tile(name, values[0], values[-1], kind, better=1, runs=len(values)))
    smooth = (
        ("reward", headline.REWARD, 1),
        ("loss", headline.LOSS, -1),
        ("response length", headline.LENGTH, 0),
        ("tokens/s", headline.THROUGHPUT, 0),
    )
    for label, names, better in smooth:
        values = [value for record in records if (value := headline.first(record, names)) is not None]
        values = [value for value in values if math.isfinite(value)]
        if not values or (label == "loss" and tiles):
            continue
        few = max(1, len(values) // 10)  # one step is noisy (and may hold a validation): first and last tenth
        tiles.append(_tile(label, median(values[:few]), median(values[-few:]), "number", better, len(values)))
    return tiles


def _tile(label: str, before: float, after: float, kind: str, better: int, runs: int) -> dict[str, Any]:
    values = {"before": finite(before) if runs > 1 else None, "after": finite(after)}
    return {"label": label, "kind": kind, "better": better, **values}


def finite(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


# -- curves -----------------------------------------------------------------------------------------------------------
def thinned(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most about MAX_POINTS records, evenly spaced; those with validation results are always kept."""
    stride = math.ceil(len(records) / MAX_POINTS)
    if stride <= 1:
        return records
    last = len(records) - 1
    return [r for i, r in enumerate(records) if i % stride == 0 or i == last or headline.validation(r)]


def _phase_columns(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds of each phase at each step, the largest phase first."""
    per_record = [headline.phases(record) for record in records]
    names = list(dict.fromkeys(name for phases in per_record for name in phases))
    columns = [{"name": name, "y": [finite(phases.get(name)) for phases in per_record]} for name in names]
    return sorted(columns, key=lambda column: -sum(value or 0 for value in column["y"]))


# -- samples ----------------------------------------------------------------------------------------------------------
def sample_rows(rows: list[dict[str, Any]], most_bytes: int = MAX_SAMPLE_BYTES) -> tuple[list[dict[str, Any]], int]:
    """The rows for the page and how many there were; beyond ``most_bytes`` every k-th row of the run is left."""
    size = sum(len(encode_line(row)) for row in rows)
    stride = math.ceil(size / most_bytes)
    return (rows[::stride] if stride > 1 else rows), len(rows)
