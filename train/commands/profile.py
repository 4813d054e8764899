"""The profile of a training step: the time of each operator."""

from __future__ import annotations

from pathlib import Path

from common import files
from graph_passes.executors import Executor
from graph_passes.executors.cuda.executor import CudaExecutor


def write_profile(path: Path, executor: Executor, step_ms: float) -> str:
    """Measure each launch of forward and backward on the latest batch. Write the table and the planner's choices to
    `path`. Returns the sums as text.

    Args: executor: a cuda executor that has trained. step_ms: the time of a whole step, which includes the optimizer,
        in milliseconds, for comparison with the sum.
    """
    assert isinstance(executor, CudaExecutor)
    measured = executor.profile()
    note = (f"copy on this GPU {measured.ceiling:.0f} GB/s; a whole step took {step_ms:.2f} ms with the optimizer; "
            "the sum includes a timing event of about 1 us per launch")
    files.write(path, measured.text(note).encode())
    return f"{measured.summary()}\n{note}\nall operators: {path}"
