"""The command compare: compares runs, on the terminal and in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import files
from common.command_line import part_of
from train.commands.tables import print_table
from train.errors import TrainError
from train.options.runs import CompareRunsOptions
from train.report.comparison import Comparison, compare
from train.report.document import Table
from train.report.plots import LIGHT

TEXT, MARKDOWN, HTML, JSON = "text", "markdown", "html", "json"
ENDINGS = {".html": HTML, ".md": MARKDOWN, ".json": JSON}


def main(values: Mapping[str, Any]) -> None:
    """Compare runs. Raises UserError."""
    own = part_of(CompareRunsOptions, values)
    form = _form(own)
    if own.output:
        files.check_place(Path(own.output), "give another --output")
    comparison = compare(own.runs, own.accuracies)
    if not own.output and form != TEXT:
        print(content(comparison, form), end="")
        return
    show(comparison)
    if own.output:
        save(comparison, Path(own.output), form)
        print(f"comparison: {own.output}")


def _form(own: CompareRunsOptions) -> str:
    """The format of the file or of the printed comparison. Raises TrainError for an unknown format."""
    if own.format != "auto":
        if own.output and own.format == TEXT:
            raise TrainError(f"--format text is for the terminal: give markdown, html or json for {own.output}")
        return own.format
    if not own.output:
        return TEXT
    ending = Path(own.output).suffix.lower()
    if ending not in ENDINGS:
        raise TrainError(f"--output {own.output} ends in none of {', '.join(ENDINGS)}, which determine the format: "
                         "rename it, or give --format")
    return ENDINGS[ending]


def content(comparison: Comparison, form: str, plots: str | None = None) -> str:
    """The comparison in a format: MARKDOWN (`plots` as in `Comparison.blocks`), HTML or JSON."""
    if form == MARKDOWN:
        return comparison.markdown(plots)
    return comparison.html() if form == HTML else json.dumps(comparison.to_dict(), indent=1) + "\n"


def save(comparison: Comparison, path: Path, form: str) -> None:
    """Write the comparison to a file. A Markdown file gets its plots as files beside it. Raises UserError."""
    plots = f"{path.stem}_"
    if form == MARKDOWN:
        for name, draw in comparison.figures.items():
            files.write(path.with_name(f"{plots}{name}"), draw(LIGHT))
    files.write(path, content(comparison, form, plots).encode(errors="replace"))


def show(comparison: Comparison) -> None:
    """Print the tables of a comparison, and its remarks on stderr."""
    for note in comparison.notes:
        print(note, file=sys.stderr, flush=True)
    tables = (comparison.results_table, comparison.times_table, comparison.options_table, comparison.runs_table)
    for table in filter(None, tables):
        _print(table)
    if comparison.explanation:
        print(comparison.explanation)


def _print(table: Table) -> None:
    print_table(table.header, table.rows)
    print()
