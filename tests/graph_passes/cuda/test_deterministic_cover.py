"""The covers of deterministic runs, held: their bits may change only with a major version (docs/compatibility.md).

`python tests/graph_passes/cuda/test_deterministic_cover.py` writes the file anew, for such a version."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from test_without_gpu import lower_graph

from graph_passes.executors.cuda.kernel_library import HOPPER
from train import models

HELD = Path(__file__).with_name("deterministic_covers.json")
GPUS = {"Hopper": HOPPER, "sm_80": (8, 0)}
CASES = [f"{network} {dtype} {gpu}" for network in ("resnet18", "resnet50", "resnext50_32x4d")
         for dtype in ("float16", "float32") for gpu in GPUS]


def kernels_of(case: str) -> dict[str, int]:
    """How often each kernel is launched in a training step."""
    network, dtype, gpu = case.split()
    graph = models.create(network, 1000).graph
    lowered, _ = lower_graph(graph, {"data": (4, 224, 224, 3), "softmax_label": (4,)}, True, dtype, deterministic=True,
                             capability=GPUS[gpu])
    return dict(sorted(Counter(launch.operation for launch in lowered.program.launches).items()))


@pytest.mark.parametrize("case", CASES)
def test_the_cover_stays(case: str) -> None:
    assert kernels_of(case) == json.loads(HELD.read_text())[case], "bits change: only a major version may do that"


if __name__ == "__main__":
    HELD.write_text(json.dumps({case: kernels_of(case) for case in CASES}, indent=1) + "\n")
