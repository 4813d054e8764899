"""Failing output: which failures end a program, and with which message."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}  # not PYTHONUNBUFFERED, which hides faults

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
FULL = "error: standard output: No space left on device; check path, permissions and disk\n"


def started(arguments: Sequence[str], failing: Collection[int], how: str, **options: Any) -> subprocess.Popen[str]:
    """Start Python with outputs that fail. `failing`: standard output (1), standard error (2), or both. `how`: "full"
    (a full disk), "closed", or "unread" (a pipe without a reader)."""
    reading, unread = os.pipe()
    os.close(reading)
    shell = "".join(f" {number}>&-" for number in failing if how == "closed")
    with open(unread, "w") as pipe, Path("/dev/full").open("w") as full:
        fails = {"full": full, "closed": subprocess.DEVNULL, "unread": pipe}[how]
        stdout, stderr = (fails if number in failing else subprocess.PIPE for number in (1, 2))
        return subprocess.Popen(["sh", "-c", f'exec "$@"{shell}', "sh", sys.executable, *arguments], text=True,
                                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                                **{"env": ENVIRONMENT, **options})


# Kinds of programs by name: body of the main function, exit code, and text on standard error.
ENDS = {
    "prints a line": ("print('text')", 0, ""),
    "prints half a line": ("print('text', end='')", 0, ""),
    "prints much": ("[print(i) for i in range(5000)]", 0, ""),
    "shows help": ("c.given(VerifyOptions, ['--help'], prog='program')", 0, ""),
    "leaves at a failure": ("leave_at_a_failure()", 0, ""),
    "says nothing of it": ("hide_a_failure()", 0, ""),
    "warns": ("print('warned', file=sys.stderr); print('text')", 0, "warned\n"),
    "is used wrongly": ("c.given(VerifyOptions, ['.', '--bad'], prog='program')", 2,
                        "error: there is no option --bad (see program --help)\n"),
    "has a code of its own": ("hide_a_failure(); return 7", 7, ""),
    "fails elsewhere": ("hide_a_failure(); open('/nowhere')", 2, "error: /nowhere: No such file or directory; check "
                                                                 "path, permissions and disk\n"),
    "writes to a process that has ended": ("raise BrokenPipeError(32, 'Broken pipe')", 2,
                                           "error: input or output: Broken pipe; check path, permissions and disk\n"),
}
# Runs each program in a forked process, which ends like Python itself but need not import anything again.
ALL_ENDS = """
import contextlib, os, sys
import common.command_line as c
from pipelines.options import VerifyOptions

def hide_a_failure():
    with contextlib.suppress(OSError):
        print('text', end='')  # without a buffer it fails here, else at the end

def leave_at_a_failure():
    try:
        print('text', flush=True)
    except OSError:
        sys.exit(1)  # as rich does

for body in {bodies}:
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write({codes}, bytes([code]))
        with contextlib.suppress(OSError):
            os.write(2, bytes(1))
    else:
        exec("def main():\\n    " + body)
        sys.exit(c.exit_code_of(main))
"""
CODE = {"full": 2, "closed": 0, "unread": 141}  # exit code of a program whose standard output fails


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("failing", [{1}, {2}, {1, 2}], ids=["stdout", "stderr", "both"])
@pytest.mark.parametrize("how", CODE)
def test_an_end_where_output_fails(failing, how, unbuffered):
    reading, writing = os.pipe()
    process = started(["-c", ALL_ENDS.format(bodies=[body for body, _, _ in ENDS.values()], codes=writing)], failing,
                      how, env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered}, pass_fds=[writing])
    os.close(writing)
    _, stderr = process.communicate(timeout=300)
    with open(reading, "rb") as codes:
        found = dict(zip(ENDS, codes.read(), strict=True))
    fails = {name for name, (_, code, _) in ENDS.items() if code == 0 and 1 in failing}
    assert found == {name: CODE[how] if name in fails else code for name, (_, code, _) in ENDS.items()}
    if 2 not in failing:
        said = dict(zip(ENDS, stderr.split("\0"), strict=False))
        assert said == {name: text + FULL * (name in fails and how == "full") for name, (_, _, text) in ENDS.items()}


@pytest.mark.parametrize("arguments", [
    "-m train --help", "-m train predict --help", "-m train --config ?", "-m pipelines --version",
    "-m graph_passes show --help", "-m train.processes.launch --help", "-m train.processes.multi_host --help",
    "-m train.report.page --help", "-m resnet_mxnet predict --help", "benchmarks/overview.py --help",
])
def test_programs_on_a_full_disk(arguments):
    process = started(arguments.split(), {1}, "full", cwd=ROOT)
    assert (process.communicate(timeout=300)[1], process.returncode) == (FULL, 2)


def test_all_programs_end_in_the_same_way():
    """Except programs that only our own programs start."""
    programs = [path for package in ("train", "gpu_report", "pipelines", "graph_passes", "benchmarks")
                for path in ROOT.glob(f"{package}/**/*.py") if '__name__ == "__main__"' in path.read_text()]
    others = {path.stem for path in programs if not re.search(r"exit_code_of\(|\brun\(main\)", path.read_text())}
    assert others == {"guard", "parity_peer", "peer_cifar10", "peer_finetune", "peer_lite", "peer_pytorch",
                      "peer_recipe", "peer_rnn", "peer_weights"}


@pytest.mark.parametrize("end", ["", "\n"], ids=["half a line", "a line"])
def test_a_disk_that_becomes_full_within_a_line(end, tmp_path):
    """The system then writes a part of the line; Python without a buffer takes this for the whole line."""
    program = ("import common.command_line as c\n"
               f"raise SystemExit(c.exit_code_of(lambda: print('x' * 100, end={end!r})))")
    with (tmp_path / "file").open("w") as file:
        done = subprocess.run([sys.executable, "-u", "-c", program], env=ENVIRONMENT, stdout=file, text=True,
                              stderr=subprocess.PIPE,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)))
    assert done.stderr == "error: standard output: File too large; check path, permissions and disk\n"
    assert done.returncode == 2 and (tmp_path / "file").read_text() == "x" * 10


def test_a_pipe_that_does_not_wait():
    """Another program that shares the pipe may have made it non-blocking."""
    program = ("import os, common.command_line as c; os.set_blocking(1, False)\n"
               "raise SystemExit(c.exit_code_of(lambda: print('x' * 10**6)))")
    process = subprocess.Popen([sys.executable, "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    time.sleep(0.3)  # the program fills the pipe meanwhile
    out, err = process.communicate(timeout=300)
    assert (len(out), err, process.returncode) == (10**6 + 1, "", 0)


@pytest.mark.parametrize("number", [1, 2])
def test_a_line_is_in_a_file_when_it_is_printed(number, tmp_path):
    program = ("import sys, common.command_line as c\n"
               "def main():\n"
               f"    print('text', file={['', 'sys.stdout', 'sys.stderr'][number]})\n"
               "    sys.stdin.readline()\n"
               "c.exit_code_of(main)")
    with (tmp_path / "file").open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", program], env=ENVIRONMENT, stdin=subprocess.PIPE,
                                   **{["", "stdout", "stderr"][number]: file})
        deadline = time.monotonic() + 60
        while not (found := (tmp_path / "file").read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.communicate(b"end\n", timeout=300)
    assert found == "text\n" and process.returncode == 0


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
    """A pipe in packet mode returns the bytes of one write call."""
    reading, writing = os.pipe2(os.O_DIRECT)
    program = "from common.output import make_safe, print_error; make_safe(); print_error('what, and where')"
    subprocess.run([sys.executable, *options, "-c", program], stderr=writing, check=True)
    assert os.read(reading, 1000) == b"error: what, and where\n"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_what_is_closed_at_the_start_is_no_file_of_the_program(closed, tmp_path):
    """Otherwise the first opened file would become standard output. A closed input is empty."""
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
                           env=ENVIRONMENT, capture_output=True,
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
    """A training run only loses its first line; a program whose result is its output ends."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", COMMAND, *arguments.split()], stdout=full, stderr=subprocess.PIPE,
                              text=True, env=ENVIRONMENT)
    if outlasts:
        assert done.stderr.startswith(SENTENCE.format("No space left on device"))
        assert done.stderr.endswith("begun\n") and done.returncode == 0
    else:
        assert done.stderr == FULL
        assert done.returncode == 2
