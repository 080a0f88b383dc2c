"""Tables on the console: rich ones on a terminal, plain ones into a file or a pipe."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.cli.doctor import Section


def show(sections: Sequence[Section]) -> None:
    """Print the sections, one under the other."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _show_rich(sections)
    else:
        print("\n\n".join(plain(section) for section in sections))


def plain(section: Section) -> str:
    """A section as aligned text without colours or frames; the last column is not padded."""
    widths = [max(len(row[i]) for row in section.rows) for i in range(len(section.rows[0]) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in section.rows
    ]
    return "\n".join([section.title, *(f"  {line}" for line in lines)])


def _show_rich(sections: Sequence[Section]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for number, section in enumerate(sections):
        console.print(Text(section.title, style="bold"))
        table = Table.grid(padding=(0, 2))
        for index in range(len(section.rows[0])):
            table.add_column(style="cyan" if index == 0 else "", overflow="fold")
        for row in section.rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(Padding(table, (0, 0, int(number < len(sections) - 1), 2)))
