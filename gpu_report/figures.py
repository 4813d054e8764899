"""The figures of a GPU report. The file report.json stores the figures, and `--compare` reads it."""

from __future__ import annotations

import dataclasses
import json
import reprlib
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from common import files
from common.errors import UserError

NAME, VERSION = "gpu-report", 1  # name and version of the file format; other versions are refused
FILE = "report.json"
PRICE = "price"  # a unit: the currency of --price-per-hour
# Units in which less is better. In all other units more is better.
LESS_IS_BETTER = frozenset({"ms", "s", PRICE})
SMALLEST, LARGEST = 1e-12, 1e15  # limits in any unit: no measurement is beyond them, and ratios would overflow
KINDS = {str: "words", bool: "true or false", list: "a list", dict: "an object"}  # names of JSON types in messages
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")  # in the order in which tables list them

Value = TypeVar("Value", str, bool, list, dict)


def shown(date: str) -> str:
    """A report's date in readable form, in UTC."""
    return date.replace("T", " ").replace("+00:00", " UTC")


class Key(NamedTuple):
    """The properties in which two figures must agree to be compared."""

    section: str
    what: str
    size: str
    precision: str
    unit: str


@dataclass(frozen=True)
class Figure:
    """One measured or published figure.

    Args:
        what: the kernel or network, such as "GEMM" or "ResNet-50, 224 pixels".
        size: its size, such as "5124 x 9124 x 2560 TN" or "batch 256".
        precision: one of PRECISIONS; "" if it has none.
        value: in `unit`: ms, s, images/sec, GB/s, top-1 %, price.
        error: standard error of the median divided by the median; None if unknown.
        limit: the reason, in words, why the timing ended before its error was below 1 %; "" if the error is below 1 %.
        more: further values by name, such as tflops, of_datasheet, memory_gib, joules_per_image.
        source: the address of a published figure.
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
    """The figures of one section, and the seconds that it took. `notes`: one sentence for each figure that is left out,
    with the reason. `complete`: False if figures are missing for lack of time; another start would then add figures.
    """

    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    complete: bool = True


@dataclass(frozen=True)
class Report:
    """The figures of one device. `about`: hardware, versions, commit, command, date, and `beside`, with a sentence for
    each start during which other programs ran. For published figures `about` has a note.
    """

    device: str
    sections: Mapping[str, Section]
    about: Mapping[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[Key, Figure]:
        return {Key(name, figure.what, figure.size, figure.precision, figure.unit): figure
                for name, section in self.sections.items() for figure in section.figures}

    @property
    def beside(self) -> list[str]:
        return list(self.about.get("beside", ()))

    def with_section(self, name: str, section: Section) -> Report:
        return dataclasses.replace(self, sections={**self.sections, name: section})

    def to_dict(self) -> dict[str, Any]:
        return {"name": NAME, "version": VERSION, **dataclasses.asdict(self)}

    def write(self, path: Path) -> None:
        """Write the report as JSON. Raises UserError if that fails."""
        files.write(path, json.dumps(self.to_dict(), indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def read(cls, path: Path, way_out: str = "") -> Report:
        """Read a report from its file or its folder. Raises UserError if the file is not a report, or is a report of
        another version. `way_out`, if given, is the message's advice.
        """
        def wrong(what: str, advice: str) -> UserError:
            return UserError(f"{what}: {way_out or advice}")

        if path.is_dir():
            path = path / FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise wrong(f"cannot read the report {path} ({error.strerror})", f"give the {FILE} of a report") from None
        except (ValueError, RecursionError):
            raise wrong(f"{path} is not JSON", f"give the {FILE} of a report") from None
        if not isinstance(values, dict) or values.get("name") != NAME:
            raise wrong(f"{path} is not a GPU report", f"give the {FILE} that python -m train gpu-report writes")
        if type(values.get("version")) is not int or values["version"] != VERSION:
            raise wrong(f"{path} is a report of version {values.get('version')!r}, but this program reads version "
                        f"{VERSION}", "make it anew, or compare with the program that wrote it")
        try:
            about, sections = (_checked(dict, name, values.get(name, {})) for name in ("about", "sections"))
            _checked(str, "about.note", about.get("note", ""))
            for i, sentence in enumerate(_checked(list, "about.beside", about.get("beside", []))):
                _checked(str, f"about.beside[{i}]", sentence)
            return cls(_name("device", values.get("device")),
                       {name: _section(f"sections.{name}", section) for name, section in sections.items()}, about)
        except ValueError as error:
            raise wrong(f"{path} is damaged, or was edited by hand ({error})", "make it anew") from None


def _section(place: str, values: Any) -> Section:
    """A section from its JSON values; `place` is its path in the file. Raises ValueError if a value is wrong, like the
    functions below.
    """
    _checked(dict, place, values)
    figures = _checked(list, f"{place}.figures", values.get("figures"))
    notes = _checked(list, f"{place}.notes", values.get("notes", []))
    return Section(tuple(_figure(f"{place}.figures[{i}]", figure) for i, figure in enumerate(figures)),
                   tuple(_checked(str, f"{place}.notes[{i}]", note) for i, note in enumerate(notes)),
                   _number(f"{place}.seconds", values.get("seconds", 0.0)),
                   _checked(bool, f"{place}.complete", values.get("complete", True)))


def _figure(place: str, values: Any) -> Figure:
    """A figure from its JSON values, checked so that it can be compared."""
    _checked(dict, place, values)
    if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(Figure)}):
        raise ValueError(f"{place} has {reprlib.repr(unknown[0])}, which is not a field of a figure")
    for name in ("what", "size", "precision", "unit"):
        _name(f"{place}.{name}", values.get(name), may_be_empty=name in ("size", "precision"))
    if values["precision"] not in ("", *PRECISIONS):
        raise ValueError(f"{place}.precision is {reprlib.repr(values['precision'])}, and not one of "
                         f"{', '.join(PRECISIONS)}")
    for name in ("limit", "source"):
        _checked(str, f"{place}.{name}", values.get(name, ""))
    for name, value in _checked(dict, f"{place}.more", values.get("more", {})).items():
        _number(f"{place}.more.{name}", value)
    if values.get("error") is not None:
        _number(f"{place}.error", values["error"])
    if _number(f"{place}.value", values.get("value")) == 0 and values["unit"] != "top-1 %":
        raise ValueError(f"{place}.value is 0 {values['unit']}")
    return Figure(**values)


def _number(place: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{place} must be a number, not {reprlib.repr(value)}")
    if not (value == 0 or SMALLEST <= value <= LARGEST):
        raise ValueError(f"{place} is {reprlib.repr(value)}, which no measurement can give")
    return value


def _name(place: str, value: Any, may_be_empty: bool = False) -> str:
    """A name, checked so that pages and plots can show it."""
    if not _checked(str, place, value) and not may_be_empty:
        raise ValueError(f"{place} is empty")
    # control characters and unpaired surrogates
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in value):
        raise ValueError(f"{place} is {reprlib.repr(value)}, which has characters that cannot be shown")
    return value


def _checked(kind: type[Value], place: str, value: Any) -> Value:
    if type(value) is not kind:
        raise ValueError(f"{place} is {reprlib.repr(value)}, where {KINDS[kind]} belong{'s' * (kind is not str)}")
    return value


def precisions_of(figures: Iterable[Figure]) -> list[str]:
    """The precisions of the figures, in the order of PRECISIONS."""
    found = {figure.precision for figure in figures}
    return [precision for precision in PRECISIONS if precision in found]
