"""Shared by all tests: the fp32 reference settings, random numbers, the real data and the `gpu` marker."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before anything imports MXNet: with oneDNN its arrays may lie in blocked layouts and its sums round differently, so
# the fp32 reference is MXNet's native kernels.
os.environ["MXNET_MKLDNN_ENABLED"] = "0"
# Threads that wait by spinning, as OpenMP's do otherwise, take the cores from others, those of the tests' own processes
# among them: of a short training run's 2.7 s of CPU time 0.45 s were left.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Threads that multiply matrices at once would wait for each other in OpenBLAS, where each wants all cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # the other cores are taken by the files that run beside this one
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import side_by_side

from common.nvidia_gpus import find_gpus

REPOSITORY = Path(__file__).resolve().parents[1]

# Under nohup it is ignored, and would be in all processes that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if sys.dont_write_bytecode:  # PYTHONDONTWRITEBYTECODE, as in many containers
    # Each of the hundreds of processes that tests start would compile all of MXNet's Python: of the 4.3 s of CPU time
    # that its import took, 2.5 s were left. Not beside the sources, where nobody wants it then.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(REPOSITORY / ".pytest_cache" / "bytecode"))


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if "PYTEST_XDIST_WORKER" not in os.environ and session.config.option.verbose < 0:  # -v brings pytest's own lines
        plugins.register(side_by_side.Progress(plugins.get_plugin("terminalreporter"), SEED))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return side_by_side.make_scheduler(config, log)


@pytest.hookimpl(tryfirst=True)  # pytest then brings together what shares a fixture's parameter
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    side_by_side.shorten(items)
    side_by_side.shuffle(items, SEED)
    if "PYTEST_XDIST_WORKER" in os.environ:
        side_by_side.sort_files(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not find_gpus():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; this machine has none"))


# Decides the random numbers of all tests and their order; RESNET_TEST_SEED repeats it. In the environment, so that
# processes that run tests side by side share it.
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
    """Of this run's random numbers; a test that fails says it."""
    return SEED


@pytest.fixture
def rng(seed: int, request: pytest.FixtureRequest) -> np.random.Generator:
    """A freshly seeded generator, another one for each test and each of its parameters."""
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of benchmarks/ by its name, as if that program had been started."""

    def load(name: str) -> Any:
        monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        monkeypatch.setattr("sys.argv", [str(REPOSITORY / "benchmarks" / f"{name}.py")])
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with `imagenet_sample/` and `cifar10/`; tests that use it skip where it is absent."""
    folder = Path(os.environ.get("RESNET_REAL_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set RESNET_REAL_DATA to a folder with imagenet_sample/ and cifar10/")
    return folder
