"""Compares runs: the options in which they differ, accuracies with intervals, time to accuracy, speed and energy.

    comparison = compare([Path("runs/a"), Path("runs/b")])
    comparison.rows, comparison.to_dict(), comparison.blocks("comparison")

Runs that differ in nothing but their seed become one row, with mean and standard deviation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.content import content_of_file
from train.errors import TrainError
from train.options.limits import shown
from train.recording.metrics import METRICS_FILE, TRAINING_IMAGES, VALIDATION
from train.report import comparison_plots, runs
from train.report.compared import MEASURES, SEED, Figure, Member, Row
from train.report.comparison_plots import Curves
from train.report.document import Block, Heading, Plot, Table, Text, duration, html_page, markdown
from train.report.plots import DARK, LIGHT
from train.report.runs import FAILED, FINISHED, RUNNING, Run
from train.report.summary import summarize

MAX_COLUMNS = 4  # configurations; with more of them, the table of options has a line for each instead of a column
# Candidates for the accuracies to which time is measured, ascending.
LADDER = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995)
NUM_ACCURACIES = 4  # most accuracies from the ladder, if none are given

UNITS = {
    "best_top1": "fraction of the validation images, in the epoch whose weights are kept as the best",
    "last_top1": "fraction of the validation images, last validation",
    "interval": "95 % interval of a single run's accuracy (Wilson), from its number of validation images",
    "seconds_to": "s of the run, validation included, to the end of the first validation with this accuracy",
    "images_per_sec": "images/s, all processes together, without warm-up",
    "seconds": "s of the run, all sessions",
    "joules_per_image": "J of the GPUs, in training steps",
    "joules": "J of the GPUs, in the run's training steps",
    "gpu_memory": "GiB, most in use on a GPU",
    "price": "whatever --price-per-hour is in",
    "plugin_metrics": "metrics of plug-ins by name, on the validation images, in the epoch of best_top1",
    "deviation": "standard deviation over the runs of a configuration; null for a single run",
}


# Measure -> heading and form in the table of results, besides the accuracies.
COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "images_per_sec": ("images/sec", "{:,.1f}".format),
    "seconds": ("time", duration),
    "joules_per_image": ("J/image", "{:.3g}".format),
    "joules": ("kJ", lambda joules: f"{joules / 1e3:,.4g}"),
    "gpu_memory": ("GPU GiB", "{:.1f}".format),
    "price": ("price", "{:,.2f}".format),
}
ACCURACIES = {"best_top1": "best top-1", "last_top1": "last top-1"}


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs.

    rows: one for each configuration, in the order in which the runs were given.
    differing: setting (an option such as --learning-rate, or machine, processes, commit) -> its value in each row; only
        settings that differ between rows. Several seeds of a row are joined.
    accuracies: top-1 accuracies (fractions) for the time to accuracy, ascending.
    notes: sentences about runs that are left out, unfinished or not comparable.
    """

    rows: tuple[Row, ...]
    differing: Mapping[str, tuple[str, ...]]
    accuracies: tuple[float, ...]
    notes: tuple[str, ...]

    @property
    def members(self) -> list[Member]:
        return [member for row in self.rows for member in row.members]

    @property
    def title(self) -> str:
        count, rows = len(self.members), len(self.rows)
        number = f"{count} run{'s' * (count > 1)}"
        return f"{number} of {rows} configuration{'s' * (rows > 1)}" if rows < count else f"{number} side by side"

    @property
    def plugin_metrics(self) -> list[str]:
        """The names of the plug-ins' metrics that a run has."""
        return list(dict.fromkeys(name for member in self.members for name in member.plugin_metrics))

    def curves(self) -> list[Curves]:
        """Accuracies and losses of each row, for the plots."""
        return [Curves(row.name, [member.validated for member in row.members],
                       [[(point.epoch, point.loss) for point in member.run.record.loss_curve]
                        for member in row.members]) for row in self.rows]

    @property
    def figures(self) -> dict[str, Callable[[Any], bytes]]:
        """File name -> function that draws the plot in a theme, as SVG."""
        return comparison_plots.figures(self.curves())

    # --- tables ---

    @property
    def options_table(self) -> Table | None:
        """The settings that differ; None if there are none."""
        if not self.differing:
            return None
        names = [row.name for row in self.rows]
        if len(names) <= MAX_COLUMNS or len(self.differing) > len(names):
            return Table(("option", *names), [(name, *values) for name, values in self.differing.items()])
        return Table(("", *self.differing), list(zip(names, *self.differing.values(), strict=True)))

    @property
    def results_table(self) -> Table:
        """Accuracies, speed, time, energy and memory; without columns that no run has."""
        several = len(self.members) > len(self.rows)
        columns = [("", [row.name for row in self.rows])]
        if several:
            columns.append(("runs", [str(len(row.members)) for row in self.rows]))
        columns.append(("epochs", [_epochs(row.members) for row in self.rows]))
        for measure, heading in ACCURACIES.items():
            columns.append((heading, [_accuracy(row, MEASURES[measure]) for row in self.rows]))
        for name in self.plugin_metrics:
            columns.append((name, [_text(row.figure(_plugin_metric(name)), "{:.4g}".format) for row in self.rows]))
        for measure, (heading, form) in COLUMNS.items():
            columns.append((heading, [_text(row.figure(MEASURES[measure]), form) for row in self.rows]))
        return _without_empty(columns)

    @property
    def times_table(self) -> Table | None:
        """The time to each accuracy; None if there are no accuracies."""
        if not self.accuracies:
            return None
        cells = [[_text(row.figure(_seconds_to(accuracy)), duration) or "-" for accuracy in self.accuracies]
                 for row in self.rows]
        return Table(("time to", *(f"{100 * accuracy:.4g}%" for accuracy in self.accuracies)),
                     [(row.name, *line) for row, line in zip(self.rows, cells, strict=True)])

    @property
    def runs_table(self) -> Table | None:
        """The single runs of rows that have several; None if there are no such rows."""
        members = [member for row in self.rows if len(row.members) > 1 for member in row.members]
        if not members:
            return None
        columns = [("run", [member.name for member in members]),
                   (SEED, [shown(member.run.options.get(SEED, "")) for member in members]),
                   ("epochs", [_epochs([member]) for member in members])]
        for measure, heading in ACCURACIES.items():
            columns.append((heading, [_accuracy(Row("", (member,)), MEASURES[measure]) for member in members]))
        columns.append(("images/sec", [f"{member.summary.total.mean:,.1f}" for member in members]))
        return _without_empty(columns)

    @property
    def explanation(self) -> str:
        """An explanation of the accuracies."""
        counts = sorted({member.validation_images or 0 for member in self.members if member.validated})
        if not counts:
            return ""
        known = " or ".join(f"{count:,}" for count in counts if count)
        parts = []
        if known:
            parts.append(f"In brackets: the 95 % interval of a single run's accuracy, from its {known} validation "
                         "images (Wilson).")
        if len(self.members) > len(self.rows):
            parts.append("±: standard deviation over the runs of a configuration, which differ in their seed.")
        return " ".join(parts)

    def blocks(self, plots: str | None = "") -> list[Block]:
        """The comparison as the blocks of a document. `plots`: prefix of the plots' file names in `figures`; None:
        without plots."""
        figures = self.figures if plots is not None else {}
        blocks: list[Block] = [Text(note) for note in self.notes]
        blocks += [Heading("Results"), self.results_table]
        if self.explanation:
            blocks.append(Text(self.explanation))
        if self.times_table:
            blocks += [Heading("Time to accuracy"), self.times_table,
                       Text("Time of the run, validation included, to the end of the first validation that has it.")]
        blocks += [Heading("Options that differ"), self.options_table or Text("None, besides the seed.")]
        if figures:
            blocks += [Heading("Curves"), *(Plot(f"{plots}{name}", comparison_plots.CAPTIONS[name])
                                            for name in figures)]
        if self.runs_table:
            blocks += [Heading("Single runs"), self.runs_table]
        return blocks

    def html(self) -> str:
        """The comparison as one self-contained page, in a light and a dark version."""
        light, dark = ({name: draw(theme) for name, draw in self.figures.items()} for theme in (LIGHT, DARK))
        return html_page(self.title, self.blocks(), light, dark)

    def markdown(self, plots: str | None = None) -> str:
        """The comparison as Markdown; `plots` as in `blocks`."""
        return markdown(self.title, self.blocks(plots))

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        return {
            "units": UNITS,
            "notes": list(self.notes),
            "accuracies": list(self.accuracies),
            "differing": {name: list(values) for name, values in self.differing.items()},
            "rows": [self._row_values(row) for row in self.rows],
        }

    def _row_values(self, row: Row) -> dict[str, Any]:
        figures = {name: _figure_values(row.figure(measure)) for name, measure in MEASURES.items()}
        return {"name": row.name, **figures,
                "plugin_metrics": {name: _figure_values(row.figure(_plugin_metric(name)))
                                   for name in self.plugin_metrics},
                "seconds_to": {f"{accuracy:g}": _figure_values(row.figure(_seconds_to(accuracy)))
                               for accuracy in self.accuracies},
                "runs": [self._member_values(member) for member in row.members]}

    def _member_values(self, member: Member) -> dict[str, Any]:
        run = member.run
        intervals = {name: None if (value := MEASURES[name](member)) is None else member.interval(value)
                     for name in ACCURACIES}
        return {
            "folder": str(run.folder), "state": run.state, "reason": run.reason, "seed": run.options.get(SEED),
            "epochs": run.epochs_done, "validation_images": member.validation_images,
            **{name: measure(member) for name, measure in MEASURES.items()},
            "plugin_metrics": dict(member.plugin_metrics),
            "seconds_to": {f"{accuracy:g}": member.seconds_to(accuracy) for accuracy in self.accuracies},
            "interval": {name: list(found) if found else None for name, found in intervals.items()},
            "options": run.options,
        }


def compare(folders: Sequence[Path | str], accuracies: Sequence[float] = ()) -> Comparison:
    """Compare runs side by side.

    Args:
        folders: run folders, or folders that contain run folders.
        accuracies: top-1 accuracies (fractions) for the time to accuracy; (): chosen from those that the runs reach.

    Raises TrainError for a folder that does not exist, and if no run can be compared.
    """
    found, notes = _readable(folders)
    members = []
    for name, run in found:
        try:
            members.append(_member(name, run))
        except TrainError as error:
            notes.append(f"{name} is left out: {error}")
    if not members:
        raise TrainError("; ".join(["there is no run to compare: give folders of training runs", *notes]))
    for member in members:
        notes += _remarks(member)
    notes += _incomparable(members)
    rows = _rows(members)
    chosen = tuple(sorted(set(accuracies))) or _choose([row.figure(MEASURES["best_top1"]) for row in rows])
    return Comparison(rows, _differing(rows), chosen, tuple(notes))


def _member(name: str, run: Run) -> Member:
    """Raises TrainError for a run that cannot be compared."""
    with content_of_file(lambda reason: f"{run.folder / METRICS_FILE} has values that are none of a run ({reason})"):
        if run.is_language_model:
            raise TrainError("it is a language model, which has no top-1 accuracy")
        if not run.record.step_ms:
            raise TrainError("it has no finished step yet")
        member = Member(name, run, summarize(run.record))
        for figure in (*MEASURES.values(), lambda member: member.configuration, lambda member: member.settings):
            figure(member)
    return member


def _readable(folders: Sequence[Path | str]) -> tuple[list[tuple[str, Run]], list[str]]:
    """The readable runs with their short names, and sentences about the others."""
    places: dict[str, Path] = {}
    for folder in map(Path, folders):
        for place in runs.find(folder) or [folder]:
            places.setdefault(os.path.realpath(place), place)
    found, notes = [], []
    for name, place in zip(runs.names_of(list(places.values())), places.values(), strict=True):
        try:
            found.append((name, Run.read(place)))
        except TrainError as error:
            notes.append(f"{name} is left out: {error}" if (place / METRICS_FILE).exists()
                         else f"{name} is left out: it holds no run, since it has no {METRICS_FILE}")
    return found, notes


def _remarks(member: Member) -> list[str]:
    """Sentences about a run that is not complete or not validated."""
    run, notes = member.run, []
    done = f"{run.epochs_done} of {run.epochs_wanted} epochs" if run.epochs_wanted else f"step {run.record.steps_done}"
    if run.state == RUNNING:
        notes.append(f"{member.name} is still running: its figures are those after {done}")
    elif run.state == FAILED:
        how = "was killed" if run.reason == runs.KILLED else "ended with an error"
        notes.append(f"{member.name} {how}: its figures are those after {done}")
    elif run.state != FINISHED:
        why = {"signal": "by a signal", "max_steps": "by --max-steps"}.get(run.reason, "by --time-limit")
        notes.append(f"{member.name} was stopped {why}: its figures are those after {done}")
    if not member.validated:
        on_training = any(row.evaluation and row.evaluation.images == TRAINING_IMAGES for row in run.record.epochs)
        notes.append(f"{member.name} has no validation, so no accuracy: " + (
            f"it was evaluated on its {TRAINING_IMAGES}" if on_training else "only its speed and loss are shown"))
    return notes


def _incomparable(members: Sequence[Member]) -> list[str]:
    """A sentence if the accuracies were measured on different images."""
    validated = [member for member in members if member.validated]
    data = {str(member.run.options.get("data", "")) for member in validated}
    counts = {member.validation_images for member in validated if member.validation_images}
    splits = {(member.run.options.get("val_split"), member.run.options.get("val_group_by")) for member in validated}
    if len(counts) > 1:
        return [f"the accuracies were measured on different {VALIDATION} images ({_numbers(counts)} of them), so they "
                "say little about each other"]
    if len(data) > 1 or len(splits) > 1:
        return [f"the runs have different --data or --val-split, so their accuracies are comparable only if the "
                f"{VALIDATION} images are the same"]
    return []


def _numbers(counts: set[int]) -> str:
    *others, last = (f"{count:,}" for count in sorted(counts))
    return f"{', '.join(others)} and {last}"


def _rows(members: Sequence[Member]) -> tuple[Row, ...]:
    """The runs by configuration, each with its own name. An unfinished run has a row of its own: its figures would
    change the means of complete runs.
    """
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.configuration if member.run.is_over else member.name, []).append(member)
    names: list[str] = []
    for group in groups.values():
        name = _name(group)
        names.append(name if name not in names else _and_more([member.name for member in group]))
    return tuple(Row(name, tuple(group)) for name, group in zip(names, groups.values(), strict=True))


def _name(members: Sequence[Member]) -> str:
    """The common part of the names of a configuration's runs, without their seeds: learning_rate=0.1 for
    learning_rate=0.1,seed=0 and so on; if nothing is common, the name of their folder."""
    if len(members) == 1:
        return members[0].name
    without = {re.sub(r"(^|[^a-zA-Z])seed\W?\d+", "", member.name) for member in members}
    if len(without) > 1:
        return _and_more([member.name for member in members])
    return without.pop() or Path(os.path.abspath(members[0].run.folder)).parent.name


def _and_more(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _differing(rows: Sequence[Row]) -> dict[str, tuple[str, ...]]:
    """The settings that differ between rows, with their values as on the command line."""
    names = dict.fromkeys(name for row in rows for member in row.members for name in member.settings)
    found = {name: tuple(", ".join(map(_shown, row.setting(name))) for row in rows) for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return shown(tuple(value) if isinstance(value, list) else value) or "-"


def _choose(best: Sequence[Figure | None]) -> tuple[float, ...]:
    """Accuracies for the time to accuracy: the highest of LADDER that a run reaches, and the highest that all runs
    reach.
    """
    tops = [top for figure in best if figure for top in figure.values]
    reached = [step for step in LADDER if tops and step <= max(tops)]
    by_all = [step for step in reached if step <= min(tops)][-1:]
    last = reached[-NUM_ACCURACIES:]
    return tuple(sorted({*by_all, *(last[1:] if by_all and by_all[0] not in last else last)}))


def _seconds_to(accuracy: float) -> Callable[[Member], float | None]:
    return lambda member: member.seconds_to(accuracy)


def _plugin_metric(name: str) -> Callable[[Member], float | None]:
    return lambda member: member.plugin_metrics.get(name)


def _figure_values(figure: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {"mean": figure.mean, "deviation": figure.deviation, "values": list(figure.values)}


def _text(figure: Figure | None, form: Callable[[float], str]) -> str:
    return figure.text(form) if figure else ""


def _accuracy(row: Row, of: Callable[[Member], float | None]) -> str:
    """An accuracy as text: for a single run with its interval, for several runs with mean and deviation."""
    figure = row.figure(of)
    if figure is None:
        return ""
    if len(row.members) == 1 and (found := row.members[0].interval(figure.mean)):
        return f"{figure.mean:.2%} ({100 * found[0]:.1f} to {100 * found[1]:.1f})"
    return figure.text("{:.2%}".format)


def _epochs(members: Sequence[Member]) -> str:
    """The epochs done, with the requested number if it is larger, and the state of unfinished runs."""
    done = sorted({member.run.epochs_done for member in members})
    wanted = max(member.run.epochs_wanted for member in members)
    text = f"{done[0]} to {done[-1]}" if len(done) > 1 else str(done[0])
    states = sorted({member.run.state for member in members} - {FINISHED})
    return text + f" of {wanted}" * (wanted > done[0]) + f" ({', '.join(states)})" * bool(states)


def _without_empty(columns: Sequence[tuple[str, list[str]]]) -> Table:
    """A table of columns with headings, without empty columns; other empty cells get a dash."""
    kept = [(heading, cells) for heading, cells in columns if any(cells)]
    return Table([heading for heading, _ in kept],
                 list(zip(*([cell or "-" for cell in cells] for _, cells in kept), strict=True)))
