"""A tiny run that was trained through the library, for the tests of this folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import resnet_mxnet as rm
from train.commands import session
from train.models import resnet

TINY = {"model": "resnet18", "image_size": 32, "batch_size": 4, "epochs": 2, "device": "cpu", "num_threads": 1,
        "tensorboard": False, "warmup_epochs": 0.0, "checkpoint_minutes": 0, "learning_rate": 0.1}


class Trained:
    """The result of `rm.train` in a separate thread."""

    def __init__(self, **options: Any) -> None:
        self.epochs: list[tuple[int, dict[str, float]]] = []
        self.run: rm.Run | None = None
        self.error: BaseException | None = None
        thread = threading.Thread(target=self._train, kwargs=options)
        thread.start()
        thread.join()

    def _train(self, **options: Any) -> None:
        def remember(epoch: int, results: Any) -> None:
            self.epochs.append((epoch, dict(results)))

        try:
            self.run = rm.train(callbacks=[remember], **options)
        except BaseException as error:
            self.error = error


@pytest.fixture(scope="module")
def light_training() -> Iterator[None]:
    """Networks an eighth as wide, and no report, because its plots take longer than the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resnet, "FIRST_WIDTH", 8)
        patch.setattr(session, "LOADER_SECONDS", 0.05)
        patch.setattr(session, "write_report", lambda folder, record: folder)
        patch.setattr(session, "has_predictions", lambda trainer, recorder: False)
        yield


@pytest.fixture(scope="module")
def trained(tiny_data: Path, light_training: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run that was trained in a thread other than the main thread."""
    return Trained(data=tiny_data, output=tmp_path_factory.mktemp("runs") / "tiny", **TINY)


@pytest.fixture(scope="module")
def run(trained: Trained) -> rm.Run:
    if trained.error:
        raise trained.error
    assert trained.run
    return trained.run


@pytest.fixture(scope="module")
def net(run: rm.Run) -> Iterator[rm.TrainedNetwork]:
    with rm.load(run.folder) as network:
        yield network
