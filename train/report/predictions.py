"""What a network makes of some images that validation sees, kept in a file of the report's folder, which draws it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.recording.metrics import VALIDATION
from train.report import arrays

FILE, PICTURE = "predictions.npz", "predictions.png"  # in the report's folder


@dataclass(frozen=True)
class Predictions:
    """Of N images."""

    pictures: np.ndarray  # uint8 (N, size, size, 3)
    true: list[str]  # names of their classes
    guessed: list[str]  # names of the classes that the network thinks most likely
    probability: np.ndarray  # float (N,), what it thinks of its guess
    epoch: int  # whole epochs of training that it has behind it
    images: str = VALIDATION  # which the N are of: these, or the training images

    @property
    def num_right(self) -> int:
        return sum(true == guess for true, guess in zip(self.true, self.guessed, strict=True))

    @property
    def caption(self) -> str:
        """Of the picture."""
        images = "validation set" if self.images == VALIDATION else self.images
        epochs = f"{self.epoch} epoch{'s' * (self.epoch != 1)}"
        return (f"{len(self.true)} images, spread evenly over the {images}, and what the network takes them for "
                f"after {epochs}, with the probability of its guess: {self.num_right} are right.")


def save(predictions: Predictions, folder: Path) -> None:
    """Write them into a report's folder. Raises UserError where that fails."""
    arrays.save(folder / FILE, vars(predictions))


def read(folder: Path) -> Predictions | None:
    """Those that a report's folder holds; None where there are none. Raises TrainError where they cannot be read."""
    return arrays.read(folder / FILE, lambda values: Predictions(
        values["pictures"], values["true"].tolist(), values["guessed"].tolist(), values["probability"],
        int(values["epoch"]), str(values["images"]) if "images" in values else VALIDATION))  # files of earlier versions
