"""Command lines from declarations, error messages for mistakes, and exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from common.command_line import (
    POSITIONAL,
    REPEATABLE,
    Positive,
    as_arguments,
    choose_command,
    describe_commands,
    did_you_mean,
    exit_code_of,
    given,
    given_and_rest,
    given_value,
    part_of,
    to_arguments,
)
from common.errors import ProgramError, UserError, error_of


@dataclass(frozen=True)
class Copy:
    """Copy 100 % of it.

    And more.
    """

    source: Path
    """Where
    from."""
    more: tuple[str, ...]
    number: int = 3
    """How many, at most 50 %."""
    share: float | None = None
    size: tuple[int, int] = (4, 5)
    colors: tuple[Literal["red", "green"], ...] = ()
    side: Literal[1, 2] = 1
    target: Annotated[Path | None, "FILE", "-t"] = None
    """Where to."""
    pages: Annotated[Positive | None, "-p"] = None
    range_: tuple[Positive, Positive] | None = None
    json_: bool = False
    sound: bool = True


@dataclass(frozen=True)
class Sound:
    """What is heard."""

    volume: float = 0.5
    """Loudness."""
    loud: bool = False
    """Louder."""


@dataclass(frozen=True)
class Image:
    """What is seen."""

    width: int = 100
    """In
    pixels."""


@dataclass(frozen=True)
class Film(Sound, Image):
    """Make a film."""

    title: str = ""
    """Its name."""


def given_to_copy(line):
    return given(Copy, line.split(), prog="copy")


@pytest.mark.parametrize("line, values", [
    ("a b", {}),
    ("a b c --number 7", {"more": ("b", "c"), "number": 7}),
    ("--number=7 a --json b --share 1e-3 c", {"more": ("b", "c"), "number": 7, "json_": True, "share": 0.001}),
    ("a b --number 1 --number 2", {"number": 2}),
    ("a b --number -2", {"number": -2}),
    ("a b --size 1 2 --side 2", {"size": (1, 2), "side": 2}),
    ("a b --colors red green red", {"colors": ("red", "green", "red")}),
    ("a b --no-sound --target=x=y", {"sound": False, "target": Path("x=y")}),
    ("-t x a -p 3 b --range 1 2", {"target": Path("x"), "pages": 3, "range_": (1, 2)}),
    ("a -- --b --number", {"more": ("./--b", "./--number")}),
    ("-p 3 -- -a_b - --", {"source": Path("-a_b"), "more": ("-", "./--"), "pages": 3}),
    ("--colors red -- a --b=", {"more": ("./--b=",), "colors": ("red",)}),
])
def test_values(line, values):
    assert given_to_copy(line) == {"source": Path("a"), "more": ("b",), **values}


@pytest.mark.parametrize("line, sentence", [
    ("", "SOURCE, MORE must be given"),
    ("a", "MORE must be given"),
    ("a b --numbr 7", "there is no option --numbr; did you mean --number?"),
    ("a b --numbr=7", "there is no option --numbr; did you mean --number?"),
    ("a b --shrae 1", "there is no option --shrae; did you mean --share?"),
    ("a b --nonsense", "there is no option --nonsense"),
    ("a b --num 7", "there is no option --num; did you mean --number?"),
    ("a b -n", "there is no option -n"),
    ("a b --number 1.5", "--number needs a whole number, not '1.5'"),
    ("a b -p 0", "-p/--pages needs a whole number above 0, not '0'"),
    ("a b --range 1 -1", "--range needs a whole number above 0, not '-1'"),
    ("a b --share much", "--share needs a number, not 'much'"),
    ("a b --number", "--number needs a value"),
    ("a b --number --json", "--number needs a value"),
    ("a b --size 1", "--size needs 2 values"),
    ("a b --colors", "--colors needs a value"),
    ("a b --colors red gren", "--colors gren is not one of red, green"),
    ("a b --side 3", "--side 3 is not one of 1, 2"),
    ("a b --json=yes", "--json takes no value, but was given yes"),
    ("a b --sound=off", "--sound takes no value, but was given off"),
])
def test_mistakes(line, sentence):
    with pytest.raises(UserError) as error:
        given_to_copy(line)
    assert str(error.value) == f"{sentence} (see copy --help)"


def test_the_option_of_another_command_is_a_file_behind_dashes():
    words = ["copy", "--", "--loud"]
    assert choose_command({"copy": Copy, "film": Film}, words, prog="p") == ("copy", words[1:])


@pytest.mark.parametrize("words, before", [
    (["a", ""], "a"), (["--target", "", "a"], "--target"), (["a", "--target="], "--target"), ([""], "copy"),
])
def test_a_shell_variable_that_is_not_set(words, before):
    with pytest.raises(UserError, match=f"^{before} is followed by an empty value: give one, or leave it out$"):
        given(Copy, words, prog="copy")


def test_words_are_checked_by_every_version_of_python(monkeypatch):
    """Since 3.12.8, argparse parses intermixed arguments without `parse_known_args`, which `Parser` overrides."""
    base = argparse.ArgumentParser
    monkeypatch.setattr(base, "parse_known_intermixed_args", base.parse_known_args)
    assert given_to_copy("a b --no_sound") == {"source": Path("a"), "more": ("b",), "sound": False}
    with pytest.raises(UserError, match="^--target is followed by an empty value"):
        given_to_copy("a b --target=")


def test_a_flag_that_a_preset_has_set_can_be_taken_back():
    preset = Film(loud=True, volume=2)
    assert given(Film, ["--no-loud"], prog="film", default=preset) == {"loud": False}
    other = Film(title="M", loud=False, volume=2)
    arguments = to_arguments(other, preset)
    assert given(Film, arguments, prog="film", default=preset) == {"title": "M", "loud": False}
    assert to_arguments(preset, preset) == []


@dataclass(frozen=True)
class Baskets:
    """Fill baskets."""

    more: tuple[Path, ...]
    """What goes into them."""
    basket: Annotated[tuple[str, ...], "NAME", REPEATABLE] = ()
    """A basket."""


def test_an_option_that_may_be_repeated(capsys):
    """A repeatable option takes one word each time, so that the files after the option stay files."""
    found = given(Baskets, ["--basket", "red", "apple", "--basket=blue", "pear"], prog="fill")
    assert found == {"basket": ("red", "blue"), "more": (Path("apple"), Path("pear"))}
    filled = Baskets((), ("red", "blue"))
    assert to_arguments(filled, Baskets(())) == ["--basket", "red", "--basket", "blue"]
    with pytest.raises(SystemExit):
        given(Baskets, ["--help"], prog="fill")
    assert "--basket NAME  " in capsys.readouterr().out


def help_of(capsys, monkeypatch, *arguments, reader=given, **settings):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        reader(*arguments, **settings)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help(capsys, monkeypatch):
    lines = help_of(capsys, monkeypatch, Copy, ["--wrong", "--help"], prog="copy").splitlines()  # --help comes first
    assert lines[:4] == ["usage: copy [--option value ...] SOURCE MORE ...", "", "Copy 100 % of it.", ""]
    for words in ("SOURCE Where from.", "--number N How many, at most 50 %. (default: 3)", "--size N N (default: 4 5)",
                  "-t, --target FILE Where to.", "--json", "--sound, --no-sound (default: on)"):
        assert words in [" ".join(line.split()) for line in lines]


def test_help_has_a_group_for_each_base(capsys, monkeypatch):
    text = help_of(capsys, monkeypatch, Film, ["-h"], prog="film", default=Film(width=7))
    own, seen, heard = text.index("--title"), text.index("What is seen:"), text.index("What is heard:")
    assert own < seen < text.index("In pixels. (default: 7)") < heard < text.index("Loudness. (default: 0.5)")


def test_commands(monkeypatch):
    commands = {"copy": Copy, "film": Film}
    assert choose_command(commands, ["film", "--title", "M"], prog="p") == ("film", ["--title", "M"])
    assert choose_command(commands, ["--number", "3"], prog="p", default="copy") == ("copy", ["--number", "3"])
    for words, sentence in (
        ([], "give a command first: copy, film"),
        (["flim"], "there is no command 'flim'; did you mean film?"),
        (["zzz"], "there is no command 'zzz'; there are: copy, film"),
        (["film", "--no-sound"], "--no-sound is an option of copy, not of film"),
        (["copy", "--volume=3"], "--volume is an option of film, not of copy"),
    ):
        with pytest.raises(UserError) as error:
            choose_command(commands, words, prog="p")
        assert str(error.value).startswith(sentence)
    with pytest.raises(UserError, match="^the command film comes before the options: p film ...$"):
        choose_command(commands, ["--number", "3", "film"], prog="p", default="copy")
    assert choose_command(commands, ["--target", "film"], prog="p", default="copy")[0] == "copy"
    monkeypatch.setenv("COLUMNS", "22")
    text = describe_commands(commands, prog="p", note="Longer than a line is.")
    assert "  copy  Copy 100 % of\n        it\n  film  Make a film\n" in text
    assert text.endswith("\nLonger than a line is.")


def test_a_program_that_hands_on_what_it_does_not_know(capsys, monkeypatch):
    words = ["x", "--loud", "-n", "3", "--title=M", "--width", "7", "a b"]
    assert given_and_rest(Film, words, prog="film", rest="more") == (
        {"loud": True, "title": "M", "width": 7}, ["x", "-n", "3", "a b"]
    )
    with pytest.raises(UserError, match="^--width needs a whole number, not 'x'"):
        given_and_rest(Film, ["--width", "x"], prog="film", rest="more")
    text = help_of(capsys, monkeypatch, Film, ["-n", "--help"], prog="film", rest="more", reader=given_and_rest)
    assert text.startswith("usage: film [--option value ...] [more]\n")


def test_a_part_of_what_is_given():
    assert part_of(Sound, {"loud": True, "width": 7}) == Sound(loud=True)


def test_initials_of_an_option():
    assert did_you_mean("--lr", ["--left", "--learning-rate"]) == "; did you mean --learning-rate?"
    assert did_you_mean("--lr", ["--left", "--ear"]) == ""


def test_a_value_before_the_command_line_is_parsed():
    words = ["--a_b=3", "--c", "--d", "4", "--c", "5"]
    assert [given_value(words, option) for option in ("--a-b", "--c", "--d", "--e")] == ["3", "5", "4", None]
    assert given_value(words[:3], "--c") == ""


@pytest.mark.parametrize("end, code, said", [
    (None, 0, ""),
    (5, 5, ""),
    (UserError("wrong"), 2, "error: wrong\n"),
    (ProgramError("broken"), 1, "error: broken\n"),
    (error_of(2)("theirs"), 2, "error: theirs\n"),
    (error_of(137)("killed"), 1, "error: killed\n"),
    (OSError(28, "No space left on device", "a"), 2, "error: a: No space left on device; check path, "),
    (OSError("libx.so: cannot open shared object file"), None, ""),
    (KeyboardInterrupt(), 130, ""),
])
def test_exit_codes(end, code, said, capsys):
    def main():
        if isinstance(end, BaseException):
            raise end
        return end

    if code is None:
        with pytest.raises(OSError, match=r"libx\.so"):
            exit_code_of(main)
        return
    assert exit_code_of(main) == code
    err = capsys.readouterr().err
    assert err.startswith(said) and bool(err) == bool(said)


def test_a_closed_pipe_ends_a_program_silently():
    program = "import sys, common.command_line as c\nsys.exit(c.exit_code_of(lambda: print('x' * 10**6)))"
    done = subprocess.run(["bash", "-c", f'set -o pipefail; "{sys.executable}" -c "{program}" | head -c 1'],
                          capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGPIPE, "x", "")


def run_program(program: str, redirection: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `program` as the body of `exit_code_of`'s function, in a shell."""
    script = f"import sys, common.command_line as c; sys.exit(c.exit_code_of(lambda: {program}))"
    command = ["bash", "-c", f'"{sys.executable}" -c "{script}" {redirection}']
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_closed_output_is_no_error():
    done = run_program("print('x')", ">&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert run_program("c._make_parser(c.Command, 'p').error('x')", "2>&-").returncode == 2


def test_a_letter_that_the_locale_lacks():
    done = run_program("print(chr(0x2501) + 'x')", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "?x\n", "")


@dataclass(frozen=True)
class Tidy:
    """Tidy up."""

    rooms: Annotated[tuple[Path, ...], POSITIONAL] = (Path("kitchen"),)
    """Where."""
    list_: Annotated[Path | None, POSITIONAL] = None
    broom: int = 1


@pytest.mark.parametrize(("words", "values"), [
    ([], {}),
    (["--broom", "3"], {"broom": 3}),
    (["hall"], {"rooms": (Path("hall"),)}),
    (["hall", "--broom", "2", "cellar"], {"rooms": (Path("hall"), Path("cellar")), "broom": 2}),
])
def test_a_positional_argument_may_be_left_out(words, values):
    assert given(Tidy, words, prog="tidy") == values


def test_the_help_puts_what_may_be_left_out_in_brackets(capsys):
    with pytest.raises(SystemExit):
        given(Tidy, ["--help"], prog="tidy")
    assert "usage: tidy [--option value ...] [ROOMS] [LIST_]" in capsys.readouterr().out


@pytest.mark.parametrize(("field", "value", "words"), [
    ("number", 4, ["--number", "4"]), ("sound", False, ["--no-sound"]), ("sound", True, ["--sound"]),
    ("json_", True, ["--json"]), ("size", (1, 2), ["--size", "1", "2"]), ("share", -0.5, ["--share", "-0.5"]),
])
def test_words_that_give_a_value(field, value, words):
    assert as_arguments(field, value) == words
    assert given(Copy, [*words, "a", "b"], prog="copy")[field] == value
