"""The labels of CIFAR-100 that a network is trained on: stored in its checkpoints, and never confused with the other
labels."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipelines.sources.cifar100 import COARSE
from train import checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("undrawn", "narrow_network")]


def write_cifar100(folder: Path, rng: np.random.Generator) -> Path:
    """Eight images of each split."""
    folder.mkdir()
    for name in ("train", "test"):
        batch = {b"data": rng.integers(0, 256, (8, 3072), np.uint8), b"fine_labels": list(range(90, 98)),
                 b"coarse_labels": list(range(8))}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


@pytest.fixture
def trained(run_train, tiny_options, tmp_path, rng) -> tuple[Path, Path]:
    """The folder of a run on the coarse labels, and the folder of its data."""
    data, run = write_cifar100(tmp_path / "cifar-100-python", rng), tmp_path / "run"
    code, out, err = run_train("--output", run, *tiny_options, "--data", data, "--labels", "coarse", "--epochs", "1")
    assert code == 0, err
    assert "8 training images of 20 classes, 8 for validation (--labels coarse)" in out
    return run, data


def test_a_network_keeps_its_labels(trained, run_train, tiny_data, tmp_path):
    run, data = trained
    assert json.loads((run / "config.json").read_text())["labels"] == "coarse"
    last = checkpoint.load_checked(checkpoint.find(str(run)))
    assert last.config.labels == "coarse" and last.class_names == list(COARSE)
    moved = shutil.copytree(data, tmp_path / "moved")
    for arguments in ((), ("--labels", "coarse"), ("--data", moved)):
        code, out, err = run_train("validate", "--checkpoint", run, *arguments)
        assert code == 0 and "8 images, loss" in out, err
    refused = ("error: --labels fine contradicts the network, which was trained on the coarse labels: leave it out, or "
               "train a new one\n")
    for command in (("validate", "--checkpoint", run), ("quantize", "--checkpoint", run),
                    ("--resume", run, "--epochs", "2")):
        code, _, err = run_train(*command, "--labels", "fine")
        assert code == 2 and err.endswith(refused), err

    # Data of other classes: the message is about the classes, and not about a --labels that nobody has given.
    code, _, err = run_train("validate", "--checkpoint", run, "--data", tiny_data)
    assert code == 2 and "the class 'class0' of" in err and "--labels" not in err

    code, out, err = run_train("--resume", run, "--epochs", "2")
    assert code == 0 and "of 20 classes" in out and "labels auto" not in out, out + err


def test_fine_labels_are_the_default_and_written_down(run_train, tiny_options, tmp_path, rng):
    data, run = write_cifar100(tmp_path / "data", rng), tmp_path / "run"
    code, out, err = run_train("--output", run, *tiny_options, "--data", data, "--epochs", "1")
    assert code == 0 and "of 100 classes, 8 for validation (--labels fine)" in out, err
    assert json.loads((run / "config.json").read_text())["labels"] == "fine"
    code, _, err = run_train("validate", "--checkpoint", run, "--labels", "coarse")
    assert code == 2 and "--labels coarse contradicts the network, which was trained on the fine labels" in err


def test_labels_are_refused_for_data_that_have_one(run_train, tiny_options, tiny_data, tmp_path):
    code, _, err = run_train("--output", tmp_path / "run", *tiny_options, "--labels", "fine")
    assert code == 2 and err.endswith(f"error: {tiny_data}: has one label for each image, and --labels fine chooses "
                                      "between the two labels in CIFAR-100's own files: leave out --labels\n")
