"""Fixtures of the fault tests, and the table of tries and survivals printed at their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faulty
import numpy as np
import pytest
from PIL import Image

OUTCOMES: list[tuple[str, str]] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if "number" in getattr(item, "fixturenames", ()) and (report.when == "call" or report.failed):
        OUTCOMES.append((faulty.title(item.function), report.outcome))  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if OUTCOMES and "not slow" not in terminalreporter.config.option.markexpr:
        terminalreporter.write_line(f"\n{faulty.table(OUTCOMES)}")


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """Class folders of 27 small random JPEGs in three tints."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(seed)
    for label in range(3):
        (folder / f"class{label}").mkdir()
        for number in range(9):
            height, width = rng.integers(33, 60, 2)
            pixels = rng.integers(0, 120, (height, width, 3), np.uint8)
            pixels[..., label] += 120
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number}.jpg")
    return folder


@pytest.fixture
def new_run(tmp_path: Path, images: Path) -> Iterator[Callable[..., faulty.FaultyRun]]:
    """Creates runs in separate folders; at the end, all remaining processes are killed."""
    runs = []

    def make(*options: str, folder: Path | None = None, data: Path = images, **more: Any) -> faulty.FaultyRun:
        runs.append(faulty.FaultyRun(folder or tmp_path / f"run{len(runs)}", data, *options, **more))
        return runs[-1]

    yield make
    for run in runs:
        run.kill()


@pytest.fixture(scope="session")
def unbroken(images: Path, tmp_path_factory: pytest.TempPathFactory) -> faulty.FaultyRun:
    """An undisturbed run, with all its checkpoints."""
    run = faulty.FaultyRun(tmp_path_factory.mktemp("unbroken") / "run", images, "--keep-checkpoints", "99")
    assert run.finish() == 0, run.err
    return run
