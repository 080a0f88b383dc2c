"""``verl report RUN [RUN ...]``: the page of a run, or one page that compares several."""

from __future__ import annotations

from pathlib import Path

from verl.cli.arguments import Arguments
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
    from verl.tracking.report import write_comparison, write_report

    if len(arguments.runs) == 1:
        if arguments.output is not None:
            raise ConfigError("verl report: --output is for a comparison; the report of one run stays in its folder")
        print(write_report(arguments.runs[0]))
    else:
        print(write_comparison(arguments.runs, arguments.output or COMPARISON))
    return 0


def check_run(folder: Path) -> None:
    """Raise DataError where ``folder`` is not that of a run."""
    if not folder.is_dir():
        raise DataError(f"there is no run folder at {folder}")
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{folder} is not a run folder: it has no metrics.jsonl")
