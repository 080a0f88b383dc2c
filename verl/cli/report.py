"""``verl report RUN [RUN ...]``: the page of a run, or one page that compares several."""

from __future__ import annotations

from pathlib import Path

from verl.cli.arguments import Arguments, output_file
from verl.errors import ConfigError, DataError

COMPARISON = "comparison.html"


def main(argv: list[str]) -> int:
    """Write the page, and say where it is."""
    parser = Arguments(
        prog="verl report",
        description="Write a run's report.html again, or compare runs in one page. Pages need no network.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that holds metrics.jsonl")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"the page that compares runs (default: {COMPARISON})"
    )
    arguments = parser.parse_args(argv)
    for run in arguments.runs:
        check_run(run)
    output = output_file(arguments.output or COMPARISON)
    from verl.tracking.report import write_comparison, write_report

    if len(arguments.runs) == 1:
        if arguments.output is not None:
            raise ConfigError("verl report: --output is for a comparison; the report of one run stays in its folder")
        print(write_report(arguments.runs[0]))
    else:
        print(write_comparison(arguments.runs, output))
    return 0


def check_run(folder: Path) -> None:
    """Raise DataError where ``folder`` is not that of a run."""
    if not folder.is_dir():
        raise DataError(f"there is no run folder at {folder}")
    record = folder / "metrics.jsonl"
    if not record.is_file():
        raise DataError(f"{folder} is not a run folder: it has no metrics.jsonl")
    if record.stat().st_size == 0 and not (folder / "config.yaml").is_file():
        raise DataError(f"{folder} holds nothing to show: its metrics.jsonl is empty, and there is no config.yaml")
    with open(record, "rb") as file:
        start = file.read(1).strip()
    if start not in (b"", b"{"):
        raise DataError(f"{record} is not the record of a run: its lines are not JSON objects")
