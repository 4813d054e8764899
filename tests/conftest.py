"""Shared by all tests: the fp32 reference settings, random numbers, the real data and the marker `gpu`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Must be set before MXNet is imported. With oneDNN, MXNet's arrays may have blocked layouts, and its sums round
# differently; so the fp32 reference uses MXNet's native kernels.
os.environ["MXNET_MKLDNN_ENABLED"] = "0"
# By default OpenMP's threads spin while they wait, which takes cores from other processes, also from the tests' own.
# With "passive" a short training run takes 0.45 s of CPU time, down from 2.7 s.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# In OpenBLAS each thread that multiplies matrices wants all cores, so several such threads would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # other test files use the other cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import side_by_side

from common import plugins, quiet
from common.nvidia_gpus import find_gpus

REPOSITORY = Path(__file__).resolve().parents[1]

# Under nohup this process and all that tests start would ignore SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if sys.dont_write_bytecode:  # PYTHONDONTWRITEBYTECODE, as in many containers
    # Without bytecode, each of the hundreds of processes that tests start compiles all of MXNet's Python: with it, the
    # import takes 2.5 s of CPU time, down from 4.3 s. The bytecode goes to a folder of its own, not beside the sources.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(REPOSITORY / ".pytest_cache" / "bytecode"))


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if "PYTEST_XDIST_WORKER" not in os.environ and session.config.option.verbose < 0:  # -v: pytest's own lines
        plugins.register(side_by_side.Progress(plugins.get_plugin("terminalreporter"), SEED))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return side_by_side.make_scheduler(config, log)


@pytest.hookimpl(tryfirst=True)  # runs before pytest groups tests by their fixtures' parameters
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    side_by_side.shorten(items)
    side_by_side.shuffle(items, SEED)
    if "PYTEST_XDIST_WORKER" in os.environ:
        side_by_side.sort_files(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not find_gpus():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; this machine has none"))


# The seed of all tests' random numbers and of their order; RESNET_TEST_SEED repeats it. It is in the environment, so
# that all processes that run tests side by side share it.
SEED = int(os.environ.setdefault("RESNET_TEST_SEED", str(np.random.SeedSequence().entropy % 2**32)))  # type: ignore


def pytest_report_header() -> str:
    return f"RESNET_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        terminalreporter.write_line(f"RESNET_TEST_SEED={SEED} repeats the order and the random numbers of this run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed and {"rng", "seed"} & set(getattr(item, "fixturenames", ())):
        report.sections.append(("Random numbers", f"RESNET_TEST_SEED={SEED} repeats them"))
    return report


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of this run's random numbers; a failing test prints it."""
    return SEED


@pytest.fixture
def rng(seed: int, request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator with its own seed for each test and each of its parameters."""
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(autouse=True)
def own_plugins() -> Iterator[None]:
    """A test's plug-ins are forgotten at its end, so that other tests do not see their names."""
    with plugins.forgotten():
        yield
    plugins._told.clear()


@pytest.fixture(autouse=True)
def own_lines() -> Iterator[None]:
    """Keep text that C++ libraries write to stderr in the test that caused it, out of the next test."""
    yield
    for pass_on in quiet.on_their_way:
        pass_on()


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of benchmarks/ by its name, as when that program is started."""

    def load(name: str) -> Any:
        monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        monkeypatch.setattr("sys.argv", [str(REPOSITORY / "benchmarks" / f"{name}.py")])
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with `imagenet_sample/` and `cifar10/`; tests that use it are skipped if it is absent."""
    folder = Path(os.environ.get("RESNET_REAL_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set RESNET_REAL_DATA to a folder with imagenet_sample/ and cifar10/")
    return folder


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a plug-in's file: plugin(source, name="my.py") returns its path."""
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "cache"))  # the cache lists the plug-ins that the user has named

    def write(source: str, name: str = "my.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source).lstrip("\n"))
        return path

    return write
