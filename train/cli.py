"""Command lines from dataclasses, with tyro; a mistake in one is a TrainError of one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import TypeVar

import docstring_parser  # tyro's own
import tyro

from train.errors import TrainError

T = TypeVar("T")


def parse(options: type[T], arguments: Sequence[str], *, command: str, default: T | None = None) -> T:
    """Fill the dataclass `options` from the command line.

    Args:
        options: a dataclass; each field is an option `--field-name`, its docstring the help text.
        arguments: what follows the command's name on the command line.
        command: 'train', 'predict', ...: whose help `--help` shows.
        default: values of the options that are not given, where not the dataclass's own.

    Raises:
        TrainError: an unknown option, or a value that is not allowed.
        SystemExit: after `--help`.
    """
    _check_names(options, arguments, command)
    if asks_for_help(arguments):
        _join_help_lines(options)
    errors = io.StringIO()
    prog = f"python -m train {command}"
    try:
        with contextlib.redirect_stderr(errors):
            if default is None:
                return tyro.cli(options, args=arguments, prog=prog)
            return tyro.cli(options, args=arguments, prog=prog, default=default)
    except SystemExit as end:
        if not end.code:
            raise  # --help
    raise TrainError(f"{_sentence(errors.getvalue())} (see {prog} --help)")


def to_arguments(config: object, default: object) -> list[str]:
    """The options that make `config` out of `default`, a dataclass of the same kind."""
    arguments = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, option = getattr(config, field.name), option_name(field.name)
        if value == getattr(default, field.name):
            continue
        if isinstance(value, bool):
            arguments.append(option if value else option.replace("--", "--no-", 1))
        else:
            arguments += [option, *map(str, value if isinstance(value, tuple) else (value,))]
    return arguments


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' or a list of what there is, to be put behind the wrong name."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(known)}"


def option_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def asks_for_help(arguments: Sequence[str]) -> bool:
    return "-h" in arguments or "--help" in arguments


def given_value(arguments: Sequence[str], option: str) -> str | None:
    """The value of `option` on a command line that is not parsed yet, the last one if given twice, as tyro takes it;
    None where it is not given."""
    found = None
    for name, value in _options(arguments):
        if name == option:
            found = value
    return found


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of each option; the value is "" where nothing follows. An underscore in a name stands for a hyphen,
    as tyro takes it."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            yield name.replace("_", "-"), value if equals else following


def _check_names(options: type, arguments: Sequence[str], command: str) -> None:
    names = {option_name(field.name) for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    allowed = names | {name.replace("--", "--no-", 1) for name in names} | {"--help"}
    for name, _ in _options(arguments):
        if name not in allowed:
            help_hint = f"(python -m train {command} --help lists all options)"
            close = difflib.get_close_matches(name, sorted(allowed), n=1, cutoff=0.5)
            mean = f"; did you mean {close[0]}?" if close else ""
            raise TrainError(f"there is no option {name}{mean} {help_hint}")
    for i, argument in enumerate(arguments):
        if not argument or (argument.startswith("--") and argument.endswith("=")):  # a shell variable that is not set
            option = argument or (arguments[i - 1] if i else command)
            raise TrainError(f"{option.removesuffix('=')} is followed by an empty value: give one, or leave it out")


def _join_help_lines(options: type) -> None:
    """Make each field's docstring one line of help, which tyro would break wherever the source does."""
    for kind in filter(dataclasses.is_dataclass, options.__mro__):
        fields = {field.name: field for field in dataclasses.fields(kind)}
        for text in docstring_parser.parse_from_object(kind).params:
            if text.arg_name in fields and text.description:
                fields[text.arg_name].metadata = MappingProxyType({"help": " ".join(text.description.split())})


def _sentence(box: str) -> str:
    """The first message of the box that tyro draws around an error, on one line."""
    # The title, a rule where the terminal's encoding has no boxes, the message, a rule, and more.
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    is_text = [bool(line.strip("─╰╯-")) for line in lines]
    start = is_text.index(True)
    text = " ".join(lines[start : is_text.index(False, start)])
    choice = re.search(r"invalid choice '(.*)' for argument '(.*)'. Expected one of \((.*)\)", text)
    if choice:
        wrong, option, expected = choice.groups()
        values = [value.strip(" '") for value in expected.split(",") if value]
        return f"{option} {wrong} is not one of {', '.join(values)}" + (
            f"; did you mean {close[0]}?" if (close := difflib.get_close_matches(wrong, values, n=1)) else ""
        )
    if missing := re.match(r"Missing value for argument '(.*)'. Expected (\d+) values", text):
        option, count = missing.groups()
        return f"{option} needs {'a value' if count == '1' else f'{count} values'}"
    if stray := re.match("Unrecognized options: (.*)", text):
        return f"{stray[1]} belongs to no option"
    text = re.sub(r"invalid literal for int\(\) with base 10:", "needs a whole number, not", text)
    text = text.replace("could not convert string to float:", "needs a number, not")
    return text.removeprefix("Error parsing ").rstrip(".")
