"""The profile of a training step: where its time goes, operator by operator."""

from __future__ import annotations

from pathlib import Path

from common import files
from graph_passes.executors import Executor
from graph_passes.executors.cuda.executor import CudaExecutor


def write_profile(path: Path, executor: Executor, step_ms: float) -> str:
    """Measure each launch of forward and backward on the latest batch, write the table and what the planner chose, and
    return the sums as text.

    Args:
        executor: a cuda executor that has trained.
        step_ms: what a whole step took, milliseconds, to be seen beside the sum; it holds the optimizer too.
    """
    assert isinstance(executor, CudaExecutor)
    measured = executor.profile()
    note = (f"copy on this GPU {measured.ceiling:.0f} GB/s; a whole step took {step_ms:.2f} ms: it holds the optimizer "
            "too, the sum a timing event of about 1 us per launch")
    files.write(path, measured.text(note).encode())
    return f"{measured.summary()}\n{note}\nall operators: {path}"
