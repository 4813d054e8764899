"""The profile of a training step: where its time goes, operator by operator."""

from __future__ import annotations

from pathlib import Path

from common import files
from graph_passes.executors import Executor
from graph_passes.executors.cuda.executor import CudaExecutor
from graph_passes.executors.cuda.profile import format_decisions, format_summary, format_table


def write_profile(path: Path, executor: Executor, step_ms: float) -> str:
    """Measure each launch of forward and backward on the latest batch, write the table and what the planner chose, and
    return the sums as text.

    Args:
        executor: a cuda executor that has trained.
        step_ms: what a whole step took, milliseconds, to be seen beside the sum; it holds the optimizer too.
    """
    assert isinstance(executor, CudaExecutor)
    rows, ceiling = executor.profile(), executor.copy_gigabytes_per_second()
    summary = (
        f"{format_summary(rows, ceiling)}\n"
        f"copy on this GPU {ceiling:.0f} GB/s; a whole step took {step_ms:.2f} ms: it holds the optimizer too, the sum "
        "a timing event of about 1 us per launch"
    )
    decisions = f"chosen, of the ways that were timed:\n{format_decisions(executor.decisions)}"
    files.write(path, f"{format_table(rows, ceiling)}\n\n{summary}\n\n{decisions}\n".encode())
    return f"{summary}\nall operators: {path}"
