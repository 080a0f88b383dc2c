"""What the page that compares runs shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from statistics import median
from typing import Any

from verl.tracking import headline
from verl.tracking.plain import flatten
from verl.tracking.report_charts import chart_panels
from verl.tracking.report_data import MAX_SAMPLE_BYTES, finite, run_facts, sample_rows, thinned, value_text
from verl.tracking.run_dir import RunDirectory

_NOT_COMPARED = ("trainer.default_local_dir", "trainer.experiment_name")
_FACTS = ("algorithm", "model", "steps", "training time", "device")


def comparison_data(runs: Sequence[RunDirectory]) -> dict[str, Any]:
    """Plain data for the page's script; every number is finite or null. ``run`` is always a place in ``runs``."""
    records = [run.read_metrics() for run in runs]
    configs = [run.read_config() for run in runs]
    names = run_names(runs)
    shown = [thinned(rows) for rows in records]
    return {
        "title": " · ".join(names) if len(names) < 4 else f"{len(names)} runs",
        "runs": [
            {
                "name": name,
                "path": str(run.path),
                "steps": [row["step"] for row in rows],
                "minutes": _minutes(rows, all_rows),
                "facts": [fact for fact in run_facts(all_rows, config, run.read_environment()) if fact[0] in _FACTS],
            }
            for run, name, rows, all_rows, config in zip(runs, names, shown, records, configs, strict=True)
        ],
        "panels": _panels(shown, names),
        "numbers": _numbers(records),
        "samples": _samples(runs),
        "total_samples": 0,  # of a comparison only what is shown is counted
        "config": _configs(configs),
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
    }


def run_names(runs: Sequence[RunDirectory]) -> list[str]:
    """A short name for each run: the end of its path, as much of it as tells it from the others."""
    paths = [run.path.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{parts[-1]} ({number})" for number, parts in enumerate(paths, 1)]  # one run given twice


def _minutes(shown: list[dict[str, Any]], records: list[dict[str, Any]]) -> list[float]:
    """Training minutes at the end of each step shown: the sum of the step times, so a pause does not count."""
    total, at = 0.0, {}
    for record in records:
        seconds = headline.first(record, headline.STEP_SECONDS)
        total += seconds if seconds is not None and math.isfinite(seconds) else 0.0
        at[record["step"]] = round(total / 60, 4)
    return [at[record["step"]] for record in shown]


def _panels(runs: list[list[dict[str, Any]]], names: list[str]) -> list[dict[str, Any]]:
    """The charts of all runs, a line a run; of a metric's spread only the mean is drawn."""
    panels: dict[str, dict[str, Any]] = {}
    for number, records in enumerate(runs):
        for panel in chart_panels(records):
            place = panels.setdefault(panel["title"], {**panel, "charts": {}})
            for chart in panel["charts"]:
                for line in _means(chart["lines"]):
                    title = chart["title"] if len(_means(chart["lines"])) == 1 else f"{chart['title']}/{line['name']}"
                    drawn = place["charts"].setdefault(title, {"title": title, "lines": [], "band": None})
                    drawn["lines"].append({"name": names[number], "run": number, "y": line["y"]})
    return [{**panel, "charts": list(panel["charts"].values())} for panel in panels.values()]


def _means(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of mean, max and min the mean; of other lines all."""
    mean = [line for line in lines if line["name"] == "mean"]
    return mean if mean and {line["name"] for line in lines} <= {"mean", "max", "min"} else lines


def _numbers(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each run reached: validation (with its best), what a person watches (medians of tenths), and time."""
    validations = dict.fromkeys(name for records in runs for r in records for name in headline.validation(r))
    rows: list[dict[str, Any]] = []
    for name in validations:
        curves = [[(r["step"], v[name]) for r in records if name in (v := headline.validation(r))] for records in runs]
        kind = "percent" if name.endswith(" accuracy") else "number"
        rows.append({"label": name, "kind": kind, "better": 1, "runs": [_exact(curve) for curve in curves]})
    watched = [("reward", headline.REWARD, 1), ("loss", headline.LOSS, -1), ("KL", headline.KL, 0)]
    watched += [("response length", headline.LENGTH, 0), ("tokens/s", headline.THROUGHPUT, 1)]
    for label, names, better in watched:
        if label == "loss" and rows:
            continue  # a policy's loss says nothing beside its reward
        cells = [_typical([headline.first(r, names) for r in records]) for records in runs]
        rows.append({"label": label, "kind": "number", "better": better, "runs": cells})
    rows.append({"label": "training time", "kind": "seconds", "better": 0, "runs": [_spent(r) for r in runs]})
    return [row for row in rows if any(row["runs"])]


def _exact(curve: list[tuple[int, float]]) -> dict[str, Any] | None:
    """First, last and best of a validation number, and the step of the best."""
    curve = [(step, value) for step, value in curve if math.isfinite(value)]
    if not curve:
        return None
    at, best = max(curve, key=lambda item: item[1])
    first = finite(curve[0][1]) if len(curve) > 1 else None
    return {"first": first, "last": finite(curve[-1][1]), "best": finite(best), "at": at}


def _typical(values: list[float | None]) -> dict[str, Any] | None:
    """Medians of the first and the last tenth of a noisy number."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    few = max(1, len(known) // 10)
    first = finite(median(known[:few])) if len(known) > 1 else None
    return {"first": first, "last": finite(median(known[-few:])), "best": None, "at": None}


def _spent(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    values = [headline.first(record, headline.STEP_SECONDS) for record in records]
    total = sum(value for value in values if value is not None and math.isfinite(value))
    return {"first": None, "last": finite(total), "best": None, "at": None} if total else None


def _samples(runs: Sequence[RunDirectory]) -> list[dict[str, Any]]:
    rows = []
    for number, run in enumerate(runs):
        kept, _ = sample_rows(run.read_samples(), MAX_SAMPLE_BYTES // len(runs))
        rows += [{**row, "run": number} for row in kept]
    return rows


def _configs(configs: list[dict[str, Any]]) -> dict[str, list[str | None]]:
    """Every key with its value in each run, None where it is not there."""
    flat = [flatten(config) for config in configs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in _NOT_COMPARED]
    return {key: [value_text(one[key]) if key in one else None for one in flat] for key in keys}
