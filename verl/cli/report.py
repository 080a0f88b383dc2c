"""``verl report RUN_DIR``."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl.errors import DataError


def main(argv: list[str]) -> int:
    """Write ``report.html`` of a run folder again, and say where it is."""
    parser = argparse.ArgumentParser(prog="verl report", description="Write a run's self-contained report.html again.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder that holds metrics.jsonl")
    run_dir = parser.parse_args(argv).run_dir
    if not run_dir.is_dir():
        raise DataError(f"there is no run folder at {run_dir}")
    if not (run_dir / "metrics.jsonl").is_file():
        raise DataError(f"{run_dir} is not a run folder: it has no metrics.jsonl")
    from verl.tracking.report import write_report

    print(write_report(run_dir))
    return 0
