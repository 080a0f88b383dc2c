"""``verl convert-config FILE``: another system's configuration as ours."""

from __future__ import annotations

import sys
from pathlib import Path

from verl.cli.arguments import Arguments, count, output_file


def main(argv: list[str]) -> int:
    """Write the configuration, and tell on standard error what was not carried; the exit code."""
    parser = Arguments(
        prog="verl convert-config",
        description="Rewrite a TRL config (YAML, JSON, or the call in a Python script) or a verl script (bash with "
        "overrides, or YAML) as a configuration for `verl train --config`.",
    )
    parser.add_argument("file", metavar="FILE", help="the file to convert; it is read, never run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write here (default: standard output)")
    parser.add_argument("--kind", metavar="NAME", help="of a TRL YAML that does not tell: grpo, dpo, kto, sft, rm, ...")
    parser.add_argument(
        "--processes",
        type=count,
        default=1,
        metavar="N",
        help="that it ran with; TRL's batch sizes are a process's (1)",
    )
    arguments = parser.parse_args(argv)
    from verl.convert import convert_file

    output = None if arguments.output is None else output_file(arguments.output)
    result = convert_file(arguments.file, kind=arguments.kind, processes=arguments.processes)
    if output is None:
        print(result.yaml(), end="")
    else:
        output.write_text(result.yaml(), encoding="utf-8")
        print(f"{len(result.values)} values in {output}: verl train --config {output}")
    for title, lines in (("not carried", result.dropped), ("look at", result.changed)):
        for line in lines:
            print(f"[{title}] {line}", file=sys.stderr)
    return 0
