"""Tables on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 200  # columns if the output is not a terminal


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is flush left, the others are flush right."""
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(header):
        table.add_column(Text(heading), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False).print(table)
