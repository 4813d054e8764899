"""Parses the command lines of all programs: typed declarations of options, one-sentence errors, exit codes.

A dataclass declares what a command takes: its fields are the options, with their types and defaults, and its docstrings
are the help texts. `given` parses a command line by this dataclass. A `Command` names a function, which is imported
and run after parsing. `exit_code_of` runs a whole program.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from common.errors import EXIT_CTRL_C, EXIT_PIPE_CLOSED, EXIT_USER_ERROR, ProgramError, UserError
from common.output import failed_output, make_safe, print_error
from common.packages import how_to_install
from common.program import as_typed

HELP = ("-h", "--help")
VERSION = "--version"
MAX_WIDTH = 110  # columns of the help text; longer lines are hard to read
T = TypeVar("T")

# marks an option with a tuple type: each use of the option takes one value, and it may be given several times
REPEATABLE = object()
POSITIONAL = object()  # marks a field with a default, in Annotated, as a positional argument that may be left out

_METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH"}


def exit_code_of(main: Callable[[], int | None]) -> int:
    """Run a program and return its exit code. If an error ends the program, print the error on stderr as one sentence.
    """
    make_safe()
    try:
        return _code_at_end(main)
    except ProgramError as error:
        print_error(error)
        return error.exit_code
    except ModuleNotFoundError as error:
        if (sentence := how_to_install(error)) is None:
            raise
        print_error(sentence)
        return EXIT_USER_ERROR
    except OSError as error:
        if error.errno is None:  # ctypes raises an OSError without a number for a library that cannot be loaded
            raise
        # the program that reads the pipe has closed it, as `| head` does
        if error is failed_output() and isinstance(error, BrokenPipeError):
            return EXIT_PIPE_CLOSED
        where, what = error.filename or "input or output", error.strerror or error
        print_error(f"{where}: {what}; check path, permissions and disk")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_CTRL_C
    finally:
        failed_output()  # without this call Python prints a traceback at exit for output that it cannot flush


def _code_at_end(main: Callable[[], int | None]) -> int:
    """The program's exit code. Raises the first failed write to standard output, even if a library has swallowed it."""
    try:
        code = main() or 0
        if code:
            return code
    except SystemExit:  # argparse raises SystemExit after --help and --version
        if not failed_output():
            raise
    if failure := failed_output():
        raise failure
    return 0


# --- parsing a command line by its declaration ---


def given(options: type, arguments: Sequence[str], *, prog: str, default: object | None = None,
          description: str = "") -> dict[str, Any]:
    """Parse a command line. Returns the values that the command line gives for fields of `options`, without defaults.

    Args:
        options: a dataclass. A field with a default is the option `--field-name`; a field without one is a positional
            argument. Types: bool, int, float, str, Path, a Literal, a tuple of one of these, or one of these or None.
            `Annotated[type, ...]` can add "FILE", the placeholder of the value in the help; "-f", a second name; a
            function that converts the text, or raises an error that says what the option needs; REPEATABLE; POSITIONAL
            for a positional argument that may be left out.
        arguments: the command line after the command's name.
        prog: the name of the command in help and errors.
        default: an object whose attributes are shown as the defaults in the help; None: the defaults of `options`.
        description: the first paragraph of the help; "": the docstring of `options`.

    Raises:
        UserError: an unknown option, or a value that is not allowed.
        SystemExit: after `--help` and `--version`.
    """
    if not set(HELP).isdisjoint(arguments):
        _make_parser(options, prog, default, with_help=True, description=description).parse_args(["--help"])
    if VERSION in arguments:
        _show_versions()
    return _plain_values(_make_parser(options, prog, default).parse_args(arguments))


def given_and_rest(options: type, arguments: Sequence[str], *, prog: str,
                   rest: str) -> tuple[dict[str, Any], list[str]]:
    """Parse as `given` does, for a program that passes unknown arguments on to another program. `rest` describes those
    arguments in the usage line.

    Returns the values, and the arguments to pass on. Raises the exceptions of `given`.
    """
    if not set(HELP).isdisjoint(arguments):
        _make_parser(options, prog, with_help=True, rest=rest).parse_args(["--help"])
    if VERSION in arguments:
        _show_versions()
    values, unknown = _make_parser(options, prog).parse_known_args(arguments)
    return _plain_values(values), unknown


def read_options(options: type[T]) -> T:
    """Parse the command line of a single-file program, whose module docstring is its help. Raises the exceptions of
    `given`.
    """
    return options(**given(options, sys.argv[1:], prog=Path(sys.argv[0]).name,
                           description=inspect.getdoc(sys.modules[options.__module__]) or ""))


def part_of(options: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass `options`, made from `values`. Values that are not fields of `options` are ignored.
    """
    known = {field.name for field in dataclasses.fields(options)}  # type: ignore[arg-type]  # a dataclass
    return options(**{name: value for name, value in values.items() if name in known})


class Command(NamedTuple):
    """A command of a program: its options, and the function that it calls.

    The function's module is imported only after the command line has been parsed, so help and error messages are fast.
    """

    options: type  # a dataclass, in a module that imports nothing slow
    function: str  # as "module:function"
    # keeps running when standard output cannot be written, because the command's result is a file
    outlasts_output: bool = False

    def load(self) -> Callable[..., int | None]:
        """Import the module and return its function."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


VERSIONS = Command(type(None), "common.environment:show_versions")  # run by --version


def _show_versions() -> typing.NoReturn:
    VERSIONS.load()()
    raise SystemExit(0)


def run_command(commands: Mapping[str, Command], arguments: Sequence[str], *, prog: str) -> int | None:
    """Run the command that the command line names, with its options, in a program of several commands."""
    options = {name: command.options for name, command in commands.items()}
    if arguments and arguments[0] in HELP:
        print(describe_commands(options, prog=prog))
        return 0
    if arguments and arguments[0] == VERSION:
        return VERSIONS.load()()
    name, arguments = choose_command(options, arguments, prog=prog)
    chosen = options[name](**given(options[name], arguments, prog=f"{prog} {name}"))
    return commands[name].load()(chosen)


def choose_command(commands: Mapping[str, type], arguments: Sequence[str], *, prog: str,
                   default: str | None = None, others: Iterable[str] = ()) -> tuple[str, Sequence[str]]:
    """The command at the beginning of a command line (or `default`), and the arguments after it.

    `others`: further valid names, for 'did you mean' only. Raises UserError for a missing or unknown command, and for
    an option that belongs to other commands only.
    """
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
    elif default:
        name = default
        for before, word in itertools.pairwise(arguments):
            if word in commands and not before.startswith("--"):
                raise UserError(f"the command {word} comes before the options: {prog} {word} ...")
    else:
        raise UserError(f"give a command first: {', '.join(commands)} (see {prog} --help)")
    if name not in commands:
        raise UserError(f"there is no command {name!r}{nearest(name, [*commands, *others])} (see {prog} --help)")
    names = {other: _option_names(command) for other, command in commands.items()}
    for option in (word.partition("=")[0].replace("_", "-") for word in _before_dashes(arguments)
                   if word.startswith("--")):
        having = [other for other in commands if option in names[other]]
        if having and name not in having:
            *others, last = having
            owners = f"{', '.join(others)} and {last}" if others else last
            raise UserError(f"{option} is an option of {owners}, not of {name} (see {prog} {name} --help)")
    return name, arguments


def describe_commands(commands: Mapping[str, type | str], *, prog: str, default: str | None = None,
                      note: str = "") -> str:
    """The help text of a program with several commands; `note` is its last paragraph. The summary of a command is its
    string, or the first line of its docstring.
    """
    prog = as_typed(prog)
    lines = [f"usage: {prog} {'[COMMAND]' if default else 'COMMAND'} [--option value ...]", "", "commands:"]
    indent = max(map(len, commands)) + 4
    for name, command in commands.items():
        summary = command if isinstance(command, str) else (inspect.getdoc(command) or "").splitlines()[0]
        summary = summary.removesuffix(".")
        lines.append(textwrap.fill(f"  {name:{indent - 4}}  {summary}", _help_width(), subsequent_indent=" " * indent))
    return "\n".join([*lines, "", f"{prog} COMMAND --help lists the options of a command.",
                      f"{prog} --version names the version of this project and of what it runs on.",
                      *textwrap.wrap(note, _help_width())])


def to_arguments(config: object, default: object) -> list[str]:
    """The command-line options that turn `default` into `config`. Both are instances of one dataclass."""
    return [word for field in dataclasses.fields(config)  # type: ignore[arg-type]
            if (value := getattr(config, field.name)) != getattr(default, field.name)
            for word in as_arguments(field.name, value, is_repeatable(type(config), field.name))]


def as_arguments(field: str, value: Any, repeats: bool = False) -> list[str]:
    """The command-line words that give the field `field` the value `value`; the inverse of `given`. `repeats`: the
    option is REPEATABLE.
    """
    option = option_name(field)
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [word for each in values for word in (option, str(each))] if repeats else [option, *map(str, values)]


def is_repeatable(options: type, field: str) -> bool:
    """Whether the field's option may be given several times, with one value each time."""
    return REPEATABLE in typing.get_args(typing.get_type_hints(options, include_extras=True).get(field))


def option_name(field: str) -> str:
    """The option's name for a field. `json_` becomes --json: the final underscore only avoids the name of a module."""
    return "--" + field.rstrip("_").replace("_", "-")


def given_value(arguments: Sequence[str], option: str) -> str | None:
    """The value of `option` on a command line whose other options are unknown. Returns "" if the option is the last
    word, and None if the option is not given.
    """
    parser = _Parser(add_help=False)
    parser.add_argument(option, nargs="?", const="", dest="value")
    # parsing removes empty words here; the real parser refuses them later
    return parser.parse_known_args([word for word in arguments if word])[0].value


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Returns '; did you mean X?', to append to a message about a wrong name, or "" if no known name is close."""
    bare = {name.lstrip("-"): name for name in sorted(known)}
    # initials are known names too, so that --lr finds --learning-rate
    initials = {"".join(part[:1] for part in name.split("-")): name for name in bare if "-" in name}
    wrong = wrong.lstrip("-")
    close = [initials[wrong]] if wrong in initials else difflib.get_close_matches(wrong, bare, n=1)
    return f"; did you mean {bare[close[0]]}?" if close else ""


def nearest(wrong: str, known: Iterable[str]) -> str:
    """Returns '; did you mean X?', or the list of known names if none of them is close."""
    return did_you_mean(wrong, known) or f"; there are: {', '.join(sorted(known))}"


def positive_int(text: str) -> int:
    """Convert an option's text to a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number above 0, not {text!r}")
    return int(text)


Positive = Annotated[int, positive_int]  # type of an option whose value is a whole number above 0


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises UserError for a mistake, and accepts underscores for hyphens in option names."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **settings)
        # Python 3.14 would colour argparse's part of the help text, but not the part that this project writes
        self.color = False

    def parse_known_args(  # type: ignore[override]  # the overloads differ only in the type of the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        return super().parse_known_args(self._checked(args), namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        parsed, unknown = self.parse_known_intermixed_args(self._checked(args), namespace)
        if unknown:
            name = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            if name.strip("-") and name.startswith("-"):
                # Every single-letter option is close to every other one, so single-letter options get no suggestion.
                known = [*self._option_string_actions, *HELP, VERSION] if name.startswith("--") else ()
                self.error(f"there is no option {name}{did_you_mean(name, known)}")
            self.error(f"{name} belongs to no option")
        return parsed

    def _checked(self, args: Sequence[str] | None) -> list[str]:
        words = list(sys.argv[1:] if args is None else args)
        num_before = len(_before_dashes(words))
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            is_option = word.startswith("--") and i < num_before
            # the word is empty if it came from an unset shell variable
            if not word or (is_option and equals and not value):
                option = name or (words[i - 1] if i else self.prog)
                raise UserError(f"{option} is followed by an empty value: give one, or leave it out")
            if is_option:
                words[i] = name.replace("_", "-") + equals + value
            elif i > num_before:
                words[i] = re.sub("^-(?=.)", "./-", word)  # argparse takes ./-name for a file, not for an option
        return words

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{_plain_words(message)} (see {self.prog} --help)")


# --- helpers ---


def _before_dashes(words: Sequence[str]) -> list[str]:
    """The words before "--". All words after "--" are file names, even if they begin with a hyphen."""
    return list(itertools.takewhile(lambda word: word != "--", words))


def _help_width() -> int:
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=_help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap a description. Paragraphs with indented lines keep their line breaks."""
        return "\n\n".join(part if re.search("^ ", part, re.MULTILINE) else textwrap.fill(part, width)
                           for part in text.strip().split("\n\n"))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Name an option's value once, as Python 3.13 does: `-t, --target FILE`."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # option names have hyphens


def _plain_words(message: str) -> str:
    """Reword an error message of argparse in this project's style."""
    message = message.removeprefix("argument ")
    if "invalid choice" in message:
        message = message.replace("'", "")  # some versions of Python quote the choices
    for pattern, words in {
        r"the following arguments are required: (.*)": r"\1 must be given",
        r"(\S+): invalid choice: (.*) \(choose from (.*)\)": r"\1 \2 is not one of \3",
        r"(\S+): invalid int value: (.*)": r"\1 needs a whole number, not \2",
        r"(\S+): invalid float value: (.*)": r"\1 needs a number, not \2",
        r"(\S+): (needs .*)": r"\1 \2",
        r"(\S+): expected (one|at least one) argument": r"\1 needs a value",
        r"(\S+): expected (\d+) arguments": r"\1 needs \2 values",
        r"(\S+?)(/\S+)?: ignored explicit argument '(.*)'": r"\1 takes no value, but was given \3",
    }.items():
        message = re.sub(f"^{pattern}$", words, message)
    return message


def _plain_values(parsed: argparse.Namespace) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(parsed).items()
            if str(value) != argparse.SUPPRESS}  # argparse's placeholder for a positional argument that was left out


def _option_names(options: type) -> list[str]:
    return [*_make_parser(options, "")._option_string_actions]


def _make_parser(options: type, prog: str, default: object | None = None, with_help: bool = False,
                 rest: str = "", description: str = "") -> _Parser:
    defaults = {name: parameter.default for name, parameter in inspect.signature(options).parameters.items()}
    hints = typing.get_type_hints(options, include_extras=True)
    optional = {name for name, hint in hints.items() if POSITIONAL in typing.get_args(hint)[1:]}
    unnamed = [name for name, value in defaults.items() if name in optional or value is inspect.Parameter.empty]
    texts = {name: as_typed(text) for name, text in _help_texts(options).items()} if with_help else {}
    usage = [f"[{name.upper()}]" if name in optional else
             name.upper() + " ..." * (typing.get_origin(hints[name]) is tuple) for name in unnamed]
    named = ["[--option value ...]"] if len(unnamed) < len(defaults) else []
    parser = _Parser(prog=prog, usage=as_typed(" ".join([prog, *named, *usage, *[f"[{rest}]"] * bool(rest)])),
                    description=as_typed(description or inspect.getdoc(options) or ""),
                    argument_default=argparse.SUPPRESS)
    for name in unnamed:
        takes = _takes(hints[name], name.upper())
        if name in optional:
            takes["nargs"] = "*" if "nargs" in takes else "?"
        parser.add_argument(name, help=texts.get(name), **takes)
    for title, names in _groups(options).items():
        group = parser.add_argument_group(title) if title else parser
        for name in names:
            if name in unnamed:
                continue
            value = getattr(default, name, defaults[name])
            text, takes = texts.get(name, "") + _default_text(value), _takes(hints[name])
            if default is None and value is False:  # no preset can have turned the option on, so it has no --no- form
                text, takes = texts.get(name, ""), {"action": "store_true"}
            names_of_it = [*_other_names(hints[name]), option_name(name)]
            group.add_argument(*names_of_it, dest=name, help=text.replace("%", "%%"), **takes)
    return parser


def _takes(hint: Any, metavar: str | None = None) -> dict[str, Any]:
    """The keyword arguments of `add_argument` for an option of the type `hint`."""
    convert, repeats = None, False
    while (origin := typing.get_origin(hint)) in (Annotated, types.UnionType, typing.Union):
        if origin is Annotated:
            hint, *notes = typing.get_args(hint)
            convert = next(filter(callable, notes), convert)
            repeats = REPEATABLE in notes
            metavar = next((note for note in notes if isinstance(note, str) and note[0] != "-"), metavar)
        else:
            (hint,) = set(typing.get_args(hint)) - {types.NoneType}
    members = typing.get_args(hint)
    if repeats:
        return {**_takes(members[0], metavar), "action": "append"}
    if origin is tuple:
        return {**_takes(members[0], metavar), "nargs": "+" if members[-1] is Ellipsis else len(members)}
    if origin is Literal:
        return {"type": type(members[0]), "choices": members, "metavar": "{" + ",".join(map(str, members)) + "}"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": convert or hint, "metavar": metavar or _METAVARS[hint]}


def _other_names(hint: Any) -> list[str]:
    notes = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return [note for note in notes if isinstance(note, str) and note[0] == "-"]


def _groups(options: type) -> dict[str, list[str]]:
    """Field names, grouped by the title of their section in the help text. Inherited fields form a group whose title is
    the first line of the base class's docstring; the class's own fields have the title "".
    """
    groups: dict[str, list[str]] = {"": []}
    for name in inspect.signature(options).parameters:
        # the owner is the most basic class with this option; a derived class only gives the option another default
        owner = next(base for base in reversed(options.__mro__) if name in inspect.get_annotations(base))
        title = "" if owner is options else (owner.__doc__ or "").splitlines()[0].removesuffix(".")
        groups.setdefault(title, []).append(name)
    return groups


def _help_texts(options: type) -> dict[str, str]:
    """The docstring of each field as one line."""
    texts: dict[str, str] = {}
    for kind in reversed(options.__mro__[:-1]):
        texts |= _field_docstrings(inspect.getfile(kind)).get(kind.__name__, {})
    return texts


@functools.cache
def _field_docstrings(file: str) -> dict[str, dict[str, str]]:
    """Field docstrings by class and field, parsed from a source file: Python does not keep field docstrings at run
    time.
    """
    found: dict[str, dict[str, str]] = {}
    for statement in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef):
            found[statement.name] = {
                field.target.id: " ".join(text.value.value.split())
                for field, text in itertools.pairwise(statement.body)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
    return found


def _default_text(value: object) -> str:
    if value is None or value == "" or value == ():
        return ""
    if isinstance(value, bool):
        return f" (default: {'on' if value else 'off'})"
    values = value if isinstance(value, tuple) else (value,)
    return f" (default: {' '.join(f'{each:g}' if isinstance(each, float) else str(each) for each in values)})"
