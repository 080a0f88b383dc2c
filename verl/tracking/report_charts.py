"""Which metrics of a run share a chart, and which charts share a panel."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from verl.tracking.headline import PHASE_PREFIX

# (title, open at first, patterns). A chart belongs to the first panel with a pattern that its title begins with, and
# stands there in the order of the patterns.
_PANELS: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("Reward and validation", True, (r"val-core/", r"critic/score$", r"critic/rewards$", r"reward/", r"train/loss")),
    (
        "Policy",
        True,
        (r"actor/(ppo_kl|kl_loss|reward_kl_penalty$)", r"actor/entropy$", r"actor/pg_clipfrac$",
         r"(actor|train)/grad_norm", r"actor/pg_loss", r"(actor|train)/lr$", r"actor/(kl_coef|pg_clipfrac_lower)"),
    ),
    ("Value model", True, (r"critic/vf_loss", r"critic/vf_explained_var", r"critic/(vf_|vpred_mean|grad_norm|lr$)")),
    ("Lengths", True, (r"response_length(/|$)", r"response/aborted", r"prompt_length(/|$)", r"num_turns")),
    ("Throughput and memory", True, (r"perf/throughput", r"perf/time_per_step", r"perf/")),
    ("Everything else", False, (r"",)),
)  # fmt: skip
_SPREAD = ("mean", "max", "min")
_NO_CURVE = ("step", "time", "training/global_step")


def chart_panels(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Panels ``{title, open, charts: [{title, lines: [{name, y}], band: [min, max] | None}]}`` for the page.

    ``x/mean``, ``x/max`` and ``x/min`` are one chart with a band. A metric that is missing at a step is null there.
    """
    names = dict.fromkeys(name for record in records for name in record if name not in _NO_CURVE)
    names = dict.fromkeys(name for name in names if not name.startswith(PHASE_PREFIX) or name == "timing_s/step")
    placed: list[list[tuple[int, dict[str, Any]]]] = [[] for _ in _PANELS]
    for title, members in _charts(names).items():
        panel, rank = _place(title)
        placed[panel].append((rank, _chart(title, members, records)))
    panels = []
    for (title, is_open, _), charts in zip(_PANELS, placed, strict=True):
        charts.sort(key=lambda item: item[0])  # stable: charts of one pattern stay as they were logged
        if charts:
            panels.append({"title": title, "open": is_open, "charts": [chart for _, chart in charts]})
    return panels


def _place(title: str) -> tuple[int, int]:
    """Which panel a chart belongs to, and its rank there."""
    return next(
        (panel, rank)
        for panel, (_, _, patterns) in enumerate(_PANELS)
        for rank, pattern in enumerate(patterns)
        if re.match(pattern, title)
    )


def _charts(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """``{chart title: {role: metric}}``; the role is mean, max, min, or a line's own label."""
    names = list(names)
    present = set(names)
    charts: dict[str, dict[str, str]] = {}
    for name in names:
        base, _, last = name.rpartition("/")
        if last in _SPREAD and f"{base}/mean" in present:
            charts.setdefault(base, {})[last] = name
        elif name.startswith("val-core/"):
            source, kind = base.split("/", 1)[-1], base.rsplit("/", 1)[-1]
            title = f"val-core/{source}" if "/" in source else f"val-core/{kind}"
            charts.setdefault(title, {})[last] = name
        else:
            charts.setdefault(name, {})[name] = name
    return charts


def _chart(title: str, members: dict[str, str], records: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {role: [_finite(record.get(name)) for record in records] for role, name in members.items()}
    band = None
    if "mean" in columns and "max" in columns and "min" in columns:
        band = [columns.pop("min"), columns.pop("max")]
        if not any(_varies(edge) for edge in band):  # rewards of 0 and 1: a band as high as the chart says nothing
            band = None
    return {"title": title, "lines": [{"name": role, "y": y} for role, y in columns.items()], "band": band}


def _varies(values: list[float | None]) -> bool:
    return len({value for value in values if value is not None}) > 1


def _finite(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
