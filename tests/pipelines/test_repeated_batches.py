"""No batch has a wrong image, also beside other processes: a wrong image in training is a loader's worst fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from repeat_batches import EPOCHS, MOST_LEVELS, compare

PROGRAM = Path(__file__).with_name("repeat_batches.py")
REPOSITORY = PROGRAM.parents[2]
PROCESSES = 12
# Epochs of all processes together; RESNET_GPU_REPETITIONS=2000 takes about three minutes on an H200 with 16 cores.
REPETITIONS = int(os.environ.get("RESNET_GPU_REPETITIONS", "240"))


def run(data: Path, device: str, processes: int, loaders: int, seed: int) -> list[dict]:
    """Run the processes, and return the findings of each; the first two also press on memory."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    started = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(data), device, str(seed + number), str(loaders),
                          *(["press"] if number < 2 else [])], env=env, stdout=subprocess.PIPE, text=True)
        for number in range(processes)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in started]
    assert not any(process.returncode for process in started)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.gpu
@pytest.mark.alone
def test_no_wrong_image_beside_other_processes(numbered, rng):
    """Twelve processes share one GPU; two of them allocate and free memory all the time."""
    seed = int(rng.integers(1 << 30))
    found = run(numbered, "gpu", PROCESSES, -(-REPETITIONS // (PROCESSES * EPOCHS)), seed)
    epochs, images = (sum(each[what] for each in found) for what in ("epochs", "images"))
    print(f"{epochs} epochs, {images} images, seed {seed}")
    assert not [wrong for each in found for wrong in each["wrong"]]


@pytest.mark.long
def test_the_program_on_the_cpu(numbered):
    (found,) = run(numbered, "cpu", 1, 2, seed=3)
    assert found["epochs"] == 2 * EPOCHS and found["images"] >= 2 * EPOCHS * 36 and found["wrong"] == []


def test_a_wrong_image_is_found():
    rng = np.random.default_rng(5)
    right = [(rng.normal(0, 1, (4, 8, 8, 3)).astype(np.float32), np.arange(4.0)) for _ in range(3)]
    swapped = [(pixels.copy(), labels.copy()) for pixels, labels in right]
    swapped[1][0][2] = right[0][0][1]
    swapped[2][1][3] = 0
    (image, label) = compare("case", 7, right, swapped)
    assert (image.loader, image.batch, image.place) == (7, 1, 2) and image.levels > MOST_LEVELS
    assert (label.batch, label.place, label.levels) == (2, 3, 0)
