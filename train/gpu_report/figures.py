"""The figures of a report on a GPU, and report.json, which keeps them and which `--compare` reads."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common import files
from common.errors import UserError

NAME, VERSION = "gpu-report", 1  # of the file; another version is not read
FILE = "report.json"
# Of which less is better; of all others more.
LESS_IS_BETTER = frozenset({"ms", "s", "price"})
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")  # in the order of tables


class Key(NamedTuple):
    """What two reports must have measured alike to be compared."""

    section: str
    what: str
    size: str
    precision: str
    unit: str


@dataclass(frozen=True)
class Figure:
    """One measured figure, or a published one.

    Args:
        what: is measured, such as "GEMM" or "ResNet-50, 224 pixels".
        size: of it, such as "5124 x 9124 x 2560 TN" or "batch 256".
        precision: one of PRECISIONS; "" where it has none.
        value: in `unit`: ms, s, images/sec, GB/s, top-1 %, price.
        error: standard error of the median over the median; None where it is not known.
        limit: what ended the timing before that was under 1 %, in words; "" where nothing did.
        more: further values by name, such as tflops, of_datasheet, memory_gib, joules_per_image.
        source: URL, of a published figure.
    """

    what: str
    size: str
    precision: str
    value: float
    unit: str
    error: float | None = None
    limit: str = ""
    more: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Section:
    """What one section has found, and in how many seconds. `notes`: what is left out and why, a sentence each.
    `complete`: not for want of time, so that another start would find no more."""

    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    complete: bool = True


@dataclass(frozen=True)
class Report:
    """The figures of one device. `about`: its hardware, versions, commit, command, date; of published ones, a note."""

    device: str
    sections: Mapping[str, Section]
    about: Mapping[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[Key, Figure]:
        return {Key(name, figure.what, figure.size, figure.precision, figure.unit): figure
                for name, section in self.sections.items() for figure in section.figures}

    def with_section(self, name: str, section: Section) -> Report:
        return dataclasses.replace(self, sections={**self.sections, name: section})

    def to_dict(self) -> dict[str, Any]:
        return {"name": NAME, "version": VERSION, **dataclasses.asdict(self)}

    def write(self, path: Path) -> None:
        """Raises UserError where that fails."""
        files.write(path, json.dumps(self.to_dict(), indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        """The inverse of `write`, of the file or of the folder that it lies in. Raises UserError for what is no report,
        or one of another version."""
        if path.is_dir():
            path = path / FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read the report {path} ({error.strerror}): give the {FILE} of a report") from None
        except (ValueError, RecursionError):
            raise UserError(f"{path} is not JSON: give the {FILE} of a report") from None
        if not isinstance(values, dict) or values.get("name") != NAME:
            raise UserError(f"{path} is no report on a GPU: give the {FILE} that python -m train gpu-report writes")
        if values.get("version") != VERSION:
            raise UserError(f"{path} is a report of version {values.get('version')!r}, and this program reads version "
                            f"{VERSION}: make it anew, or compare with the program that wrote it")
        try:
            sections = {name: Section(tuple(map(_checked, section["figures"])),
                                      tuple(section.get("notes", ())), section.get("seconds", 0.0),
                                      section.get("complete", True))
                        for name, section in values["sections"].items()}
            if not isinstance(values["device"], str):
                raise TypeError(f"{values['device']!r} is no name of a device")
            return cls(values["device"], sections, {**values.get("about", {})})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{path} is damaged, or was written by hand wrongly ({error}): make it anew") from None


def _checked(values: Mapping[str, Any]) -> Figure:
    """A figure as it is in a file. Raises TypeError or ValueError where it is none, or cannot be compared."""
    figure = Figure(**values)
    for words in (figure.what, figure.size, figure.precision, figure.unit, figure.limit, figure.source):
        if not isinstance(words, str):
            raise TypeError(f"{words!r} stands where words belong")
    if not isinstance(figure.more, Mapping):
        raise TypeError(f"{figure.more!r} stands where more figures belong")
    for number in (figure.value, figure.error or 0.0, *figure.more.values()):
        if not isinstance(number, (int, float)):
            raise TypeError(f"{number!r} stands where a number belongs")
        if not 0 <= number < math.inf:
            raise ValueError(f"{figure.what} {figure.size} has a figure of {number}")
    if figure.value == 0 and figure.unit != "top-1 %":
        raise ValueError(f"{figure.what} {figure.size} is 0 {figure.unit}")
    return figure


def precisions_of(figures: Iterable[Figure]) -> list[str]:
    """Those that occur, in the order of tables."""
    found = {figure.precision for figure in figures}
    return [precision for precision in PRECISIONS if precision in found]
