"""Output that fails, of programs that it must not end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from common.output import make_lasting, make_safe

make_safe()
make_lasting()
make_lasting()  # once is enough
print("begun", flush=True)
sys.stdin.readline()
for _ in range(3):
    print("more", flush=True)
print("an error", file=sys.stderr)
"""
SENTENCE = "standard output cannot be written any more ({}): what follows is on standard error\n"


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_goes_away(options):
    process = subprocess.Popen([sys.executable, *options, "-c", PROGRAM], stdin=subprocess.PIPE, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "begun\n"
    process.stdout.close()
    process.stdout = None
    assert process.communicate("go\n", timeout=300)[1] == SENTENCE.format("Broken pipe") + 3 * "more\n" + "an error\n"
    assert process.returncode == 0


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_full_disk(options):
    with Path("/dev/full").open("w") as full:
        shown = subprocess.run([sys.executable, *options, "-c", PROGRAM], stdin=subprocess.DEVNULL, stdout=full,
                               stderr=subprocess.PIPE, text=True)
        assert shown.stderr == SENTENCE.format("No space left on device") + "begun\n" + 3 * "more\n" + "an error\n"
        nowhere = subprocess.run([sys.executable, *options, "-c", PROGRAM], stdin=subprocess.DEVNULL, stdout=full,
                                 stderr=full)
    assert (shown.returncode, nowhere.returncode) == (0, 0)


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_an_error_is_a_line_in_one_piece(options):
    """A pipe of packets gives what one call has written."""
    reading, writing = os.pipe2(os.O_DIRECT)
    program = "from common.output import make_safe, print_error; make_safe(); print_error('what, and where')"
    subprocess.run([sys.executable, *options, "-c", program], stderr=writing, check=True)
    assert os.read(reading, 1000) == b"error: what, and where\n"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_what_is_closed_at_the_start_is_no_file_of_the_program(closed, tmp_path):
    """The first file to be opened would become standard output else. Input that is closed holds nothing."""
    script = (
        "from common.command_line import exit_code_of\n"
        "from common.errors import UserError\n"
        "import os, sys\n"
        "def main():\n"
        "    file = open('file', 'w')\n"
        "    print('text', flush=True)\n"
        "    os.write(1, b'text'), os.write(2, b'text')\n"
        "    assert sys.stdin.buffer.read() == b''\n"
        "    raise UserError('bad')\n"
        "sys.exit(exit_code_of(main))\n"
    )
    shell = " ".join(f"{number}>&-" for number in closed.split())
    found = subprocess.run(["sh", "-c", f"exec \"$@\" {shell}", "sh", sys.executable, "-c", script], cwd=tmp_path,
                           env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}, capture_output=True,
                           stdin=subprocess.DEVNULL, text=True)
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr
    assert (tmp_path / "file").read_text() == ""


COMMAND = """
import sys
from common.command_line import exit_code_of
from train import __main__ as program
from train.processes import launch

def command(values, *_):
    print("begun", flush=True)
    return 0

name, *arguments = sys.argv[1:]
program.COMMANDS[name] = program.COMMANDS[name]._replace(function="__main__:command")
launch.launch = command
main = launch.main if "-n" in arguments else program.main
sys.exit(exit_code_of(lambda: main([name, *arguments])))
"""


@pytest.mark.parametrize("arguments, outlasts", [
    ("train", True),
    ("benchmark", True),
    ("language-model", True),
    ("train -n 2 --device cpu", True),
    ("predict --checkpoint run image.jpg", False),
    ("predict --checkpoint run image.jpg -n 2 --device cpu", False),
])
def test_a_full_disk_at_the_start(arguments, outlasts):
    """A run loses its first line, not itself; what has its output for its product ends."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", COMMAND, *arguments.split()], stdout=full, stderr=subprocess.PIPE,
                              text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    if outlasts:
        assert done.stderr.startswith(SENTENCE.format("No space left on device"))
        assert done.stderr.endswith("begun\n") and done.returncode == 0
    else:
        assert done.stderr == "error: standard output: No space left on device; check path, permissions and disk\n"
        assert done.returncode == 2
