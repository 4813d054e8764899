"""Fixtures of runs in several processes."""

from __future__ import annotations

import pytest
from several_processes import Run

from common.nvidia_gpus import find_gpus


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.alone])])
def on_gpu(request):
    if request.param == "gpu" and len(find_gpus()) < 2:
        pytest.skip(f"2 GPUs are needed, {len(find_gpus())} are there")
    return request.param == "gpu"


@pytest.fixture
def processes(on_gpu):
    """The number of processes of a run: two; on GPUs one for each, up to four."""
    return min(4, len(find_gpus())) if on_gpu else 2


@pytest.fixture
def start(tmp_path, on_gpu):
    """Starts a run of this many processes, with further options of the launcher."""
    runs = []

    def build(processes: int, *options: str) -> Run:
        runs.append(Run(tmp_path / "run", "gpu" if on_gpu else "cpu", processes, *options))
        return runs[-1]

    yield build
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            try:
                run.process.wait(20)
            finally:
                run.process.kill()
