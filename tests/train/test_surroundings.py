"""The surroundings of a program: variables, home folder, terminal, input. None of it may end a program or change its
output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIGHT = (ROOT / "tests" / "light").resolve(strict=True)
NOTHING = {"PATH": os.environ["PATH"]}
ODD = {
    **NOTHING, "LANG": "xx_YY.nothing", "LC_ALL": "xx_YY.nothing", "TERM": "no terminal", "COLUMNS": "0", "LINES": "x",
    "TZ": "Nowhere/Nothing", "HOME": "/proc/home", "XDG_CACHE_HOME": "caches", "XDG_CONFIG_HOME": "/proc/config",
    "XDG_RUNTIME_DIR": "/proc/runtime", "MPLCONFIGDIR": "/proc/matplotlib", "MPLBACKEND": "TkAgg", "DISPLAY": ":99",
    "OMP_NUM_THREADS": "1", "MXNET_SUBGRAPH_BACKEND": "nothing", "MXNET_ENGINE_TYPE": "NaiveEngine",
    "MXNET_HOME": "/proc/mxnet", "MXNET_CPU_WORKER_NTHREADS": "", "CUDA_VISIBLE_DEVICES": "",
}
SURROUNDINGS = {"nothing": (NOTHING, ""), "odd": (ODD, "umask 077; exec <&-")}
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=SURROUNDINGS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs Python without a terminal; it must succeed."""
    variables, prepare = SURROUNDINGS[request.param]

    def run(*arguments: object, light: bool = False) -> subprocess.CompletedProcess[str]:
        paths = [str(ROOT), *[str(LIGHT)] * light]
        done = subprocess.run(
            ["sh", "-c", f'{prepare}\nexec "$@"', "sh", sys.executable, *map(str, arguments)], cwd=tmp_path, text=True,
            env={**variables, "PYTHONPATH": os.pathsep.join(paths), "REPORT": "1"}, stdin=subprocess.DEVNULL,
            capture_output=True, start_new_session=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.mark.parametrize("value", ["0", "00", "-5", "wide", ""])
def test_a_width_that_is_none(value):
    program = ("import rich.console, common.command_line as c\n"
               "c.exit_code_of(lambda: rich.console.Console().print('text'))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env={**NOTHING, "PYTHONPATH": str(ROOT), "COLUMNS": value})
    assert (done.stdout, done.stderr) == ("text\n", "")


def test_help_is_the_same(run):
    expected = subprocess.run([sys.executable, "-m", "train", "predict", "--help"], cwd=ROOT, text=True,
                              env={**NOTHING, "COLUMNS": "80"}, stdout=subprocess.PIPE).stdout
    done = run("-m", "train", "predict", "--help")
    assert done.stdout == expected and "--checkpoint" in expected and done.stderr == ""


@pytest.mark.long
def test_images_are_verified(run, tiny_data):
    done = run("-m", "pipelines", "verify", tiny_data)
    assert done.stdout == f"{tiny_data}: 27 images, 0 unusable\n" and "Traceback" not in done.stderr


@pytest.mark.long
def test_a_network_is_shown(run):
    done = run("-m", "graph_passes", "show", "--model", "resnet18_v1")
    assert "bn_add_relu" in done.stdout and len(done.stdout.splitlines()) > 20


@pytest.mark.long
def test_a_network_is_trained_and_predicts(run, tiny_options, tiny_data, tmp_path):
    trained = run("-m", "train", *tiny_options, "--max-steps", 2, "--output", "run", light=True)
    assert "stopped after step 2" in trained.stdout and (tmp_path / "run" / "report" / "report.md").is_file()
    predicted = run("-m", "train", "predict", "--checkpoint", "run", tiny_data / "class1" / "3.jpg", "--device", "cpu",
                    light=True)
    image, *guesses = predicted.stdout.splitlines()
    assert image == str(tiny_data / "class1" / "3.jpg") and len(guesses) == 3
    said = (trained.stderr + predicted.stderr).splitlines()
    assert not [line for line in said if "MXNet start using engine" not in line]
