"""What a network makes of some validation images, for the picture in a run's report.

The images lie evenly spread over the split, so nobody chose the ones that went well. They are kept in a file of the
report's folder, from which `python -m train.report` draws the picture anew.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graph_passes.executors import Executor
from pipelines import MEAN, STD, Loader, LoaderConfig, load_chosen
from train import files
from train.errors import TrainError

FILE, PICTURE = "predictions.npz", "predictions.png"  # in the report's folder
NUM_SHOWN = 24
SHOWN_SIZE = 160  # pixels: a network may see too few for people


@dataclass(frozen=True)
class Predictions:
    """Of N images."""

    pictures: np.ndarray  # uint8 (N, SHOWN_SIZE, SHOWN_SIZE, 3)
    true: list[str]  # names of their classes
    guessed: list[str]  # names of the classes that the network thinks most likely
    probability: np.ndarray  # float (N,), what it thinks of its guess
    epoch: int  # whole epochs of training that it has behind it

    @property
    def num_right(self) -> int:
        return sum(true == guess for true, guess in zip(self.true, self.guessed, strict=True))

    @property
    def caption(self) -> str:
        """Of the picture."""
        epochs = f"{self.epoch} epoch{'s' * (self.epoch != 1)}"
        return (f"{len(self.true)} images spread evenly over the validation set, and what the network took them for after "
                f"{epochs}, with the probability that it gave its guess: {self.num_right} are right.")


def predict_some(executor: Executor, loader: Loader, epoch: int) -> Predictions:
    """Predictions for images of a validation loader's split. Raises DataError where none can be decoded."""
    chosen = spread(loader.num_images, NUM_SHOWN)
    config = replace(loader.config, on_bad_image="skip")  # there are others: a picture must not end a run
    labels, guesses, probabilities = [], [], []
    for data, label in _valid(config, chosen, executor):
        best = data.argmax(axis=1)
        labels += label.tolist()
        guesses += best.tolist()
        probabilities += data[np.arange(len(best)), best].tolist()
    for_people = replace(config, image_size=SHOWN_SIZE, device="cpu", dtype="float32", channels=3)
    pictures = [data for data, _ in _valid(for_people, chosen)]
    names = loader.class_names
    return Predictions(
        pictures=(np.concatenate(pictures) * STD + MEAN).round().clip(0, 255).astype(np.uint8),
        true=[names[label] for label in labels],
        guessed=[names[guess] if guess < len(names) else f"class {guess}" for guess in guesses],
        probability=np.array(probabilities),
        epoch=epoch,
    )


def spread(total: int, count: int) -> list[int]:
    """At most `count` of the numbers below `total`, evenly spread."""
    count = min(count, total)
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


def _valid(
    config: LoaderConfig, chosen: Sequence[int], executor: Executor | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pixels of the chosen images, or with an executor their probabilities, and labels, batch by batch."""
    for batch in load_chosen(config, chosen):
        values = executor.forward(batch.data) if executor else batch.data
        yield values.asnumpy()[: batch.num_valid].astype(np.float32), batch.label.asnumpy()[: batch.num_valid].astype(int)


def save(predictions: Predictions, folder: Path) -> None:
    """Write them into a report's folder. Raises TrainError where that fails."""
    content = io.BytesIO()
    np.savez_compressed(content, **{name: np.asarray(value) for name, value in vars(predictions).items()})
    files.write(folder / FILE, content.getvalue())


def read(folder: Path) -> Predictions | None:
    """Those that a report's folder holds; None where there are none. Raises TrainError where they cannot be read."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with np.load(path) as values:
            true, guessed = values["true"].tolist(), values["guessed"].tolist()
            return Predictions(values["pictures"], true, guessed, values["probability"], int(values["epoch"]))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise TrainError(f"{path} cannot be read ({error}): delete it, and the report comes without it") from None
