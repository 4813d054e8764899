"""The seed that a failed random test prints, and with which it repeats."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
def test_fails(rng):
    assert int(rng.integers(2**40)) == 0

def test_fails_too(rng):
    assert int(rng.integers(2**40)) == 0

def test_without_random_numbers():
    assert 0
"""


def run_tests(folder: Path, *options: str, **environment: str) -> str:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    (folder / "test_it.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", folder, folder,
               *options]
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "RESNET_TEST_SEED"))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder,
                          env={**given, "PYTHONPATH": path, **environment})
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return done.stdout


def test_a_failed_test_says_the_seed_that_repeats_it(tmp_path: Path) -> None:
    out = run_tests(tmp_path)
    header, *seeds, last = re.findall(r"RESNET_TEST_SEED=(\d+)", out)
    assert seeds == [header] * 2, "of those with random numbers"
    assert last == header, "at the end"
    numbers = re.findall(r"assert (\d+) == 0", out)
    again = run_tests(tmp_path, RESNET_TEST_SEED=header)
    assert re.findall(r"assert (\d+) == 0", again) == numbers and numbers[0] != numbers[1]
    assert re.findall(r"assert (\d+) == 0", run_tests(tmp_path)) != numbers


@pytest.mark.long(but=["options1"])
@pytest.mark.parametrize("options", [("-q",), ("-q", "-n", "1"), ("-v",)])
def test_the_seed_is_said_before_the_first_test(tmp_path: Path, options: tuple[str, ...]) -> None:
    out = run_tests(tmp_path, *options, RESNET_TEST_SEED="7")
    assert "RESNET_TEST_SEED=7" in out[:out.index("test_it.py")]


@pytest.mark.long
def test_the_seed_repeats_the_order(tmp_path: Path) -> None:
    def order(seed: int) -> list[str]:
        return re.findall(r"test_it.py::(\w+) FAILED", run_tests(tmp_path, "-v", RESNET_TEST_SEED=str(seed)))

    orders = [order(seed) for seed in range(4)]
    assert orders[0] == order(0) and len(set(map(tuple, orders))) > 1
