"""Fixtures for the tests of `train` and `gpu_report`: a tiny data set, and running the program in this process."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from train import checkpoint, models
from train.checkpoint import Checkpoint
from train.config import Config
from train.models import resnet
from train.models.network import init_params
from train.report import plots

NUM_CLASSES = 3
IMAGES_PER_CLASS = 9


@pytest.fixture(scope="module")
def narrow_network() -> Iterator[None]:
    """Makes networks an eighth as wide, which is six times as fast, for test files that do not test the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resnet, "FIRST_WIDTH", 8)
        yield


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """Class folders of small random JPEGs in three tints."""
    folder = tmp_path_factory.mktemp("tiny_data")
    rng = np.random.default_rng(seed)
    for label in range(NUM_CLASSES):
        (folder / f"class{label}").mkdir()
        for i in range(IMAGES_PER_CLASS):
            height, width = rng.integers(33, 60, 2)
            pixels = rng.integers(0, 120, (height, width, 3), np.uint8)
            pixels[..., label] += 120
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{i}.jpg")
    return folder


@pytest.fixture(scope="session")
def tiny_options(tiny_data: Path) -> list[str]:
    """Options of a run that takes seconds: 27 images in batches of 4 give 6 steps per epoch, for 2 epochs."""
    return [
        "--data", str(tiny_data), "--model", "resnet18", "--image-size", "32", "--batch-size", "4", "--epochs", "2",
        "--device", "cpu", "--num-threads", "1", "--no-tensorboard", "--warmup-epochs", "0", "--learning-rate", "0.5",
        "--checkpoint-minutes", "0", "--optimizer", "sgd", "--weight-decay", "1e-4", "--validate-every", "1",
    ]


@pytest.fixture
def initial_weights(tmp_path: Path) -> Path:
    """A weights file for tests of options that need trained weights: a ResNet-18's initial weights, of seed 0 and
    without --zero-init-residual, as wide as networks are when it is made."""
    params, aux = init_params(models.create("resnet18", NUM_CLASSES).symbol, 0, zero_init_residual=False)
    classes = [f"class{label}" for label in range(NUM_CLASSES)]
    file = tmp_path / "weights" / "initial.npz"
    checkpoint.save(Checkpoint(params, aux, {}, Config(model="resnet18"), classes), file)
    return file


@pytest.fixture(scope="session")
def light_run() -> Callable[..., int]:
    """Runs `python -m train ARGUMENTS` in this process and returns the exit code. The report is left out unless
    requested: its plots and predictions take longer than the run."""
    from train import __main__ as program
    from train.commands import session

    def run(*arguments: object, report: bool = False) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "LOADER_SECONDS", 0.05)  # no test here looks at the loader's speed
            if not report:
                patch.setattr(session, "prepare_report", lambda: None)
                patch.setattr(session, "write_report", lambda folder, record: folder)
                patch.setattr(session, "has_predictions", lambda trainer, recorder: False)
            return program.main([str(argument) for argument in arguments])

    return run


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are made but not drawn, which would take most of a report's time, for tests of the report's other
    content."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    monkeypatch.setattr(plots.Drawing, "png", picture.getvalue())
    monkeypatch.setattr(plots.Drawing, "svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>")


@pytest.fixture
def run_train(
    capfd: pytest.CaptureFixture[str], light_run: Callable[..., int]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `python -m train ARGUMENTS` in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object, report: bool = False) -> tuple[int, str, str]:
        capfd.readouterr()
        code = light_run(*arguments, report=report)
        out, err = capfd.readouterr()
        return code, out, err

    return run
