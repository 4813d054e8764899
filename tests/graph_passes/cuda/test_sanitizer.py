"""compute-sanitizer over steps of small networks, with every kernel that the lowering and the planner may take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from step_networks import bottlenecks, repeatable_fusions
from test_training_step import fused, random_batch, random_state, small_network

from graph_passes.executors.cuda.choices import Choices
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.training_step import TrainingStep
from train.models.resnet import resnet

pytestmark = pytest.mark.gpu

REPOSITORY = Path(__file__).resolve().parents[3]


def test_a_sanitizer_finds_nothing(tmp_path: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        pytest.skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    path = os.pathsep.join([str(REPOSITORY), *sys.path])  # with the folders of the tests' own modules
    run = subprocess.run([sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-W", "ignore",
                          __file__, str(tmp_path)], capture_output=True, text=True, timeout=300,
                         env={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert run.stdout.count("steps are done") == 3 and "SUMMARY: 0 " in run.stdout


def main(cache: Path) -> None:
    """What the sanitizer looks at. Deterministic, so that no plans are timed, which takes minutes under a sanitizer."""
    Choices.__call__ = lambda self, *question: repeatable_fusions(*question)  # type: ignore[method-assign]
    for name, network, size, dtype in (
        ("all fusions", bottlenecks(), (3, 19, 23, 4), "float16"),
        ("ResNet-18", resnet(18, 10), (3, 36, 38, 3), "float16"),
        ("all operators", small_network(), (3, 29, 23, 3), "float32"),
    ):
        graph, shapes = fused(network), {"data": size, "softmax_label": size[:1]}
        step = TrainingStep(graph, shapes, StepOptions(dtype, deterministic=True), cache_folder=cache)
        step.set_params(*random_state(graph, shapes, seed=1))
        step.load(*random_batch(shapes, seed=2))
        for accumulate in (False, True):
            step.forward_backward(accumulate)
            step.update(0.1)
        step.infer()
        step.set_num_valid(2)
        step.infer(num_images=2)
        assert step.read_metrics()[3] > 0
        print(f"{name}: steps are done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
