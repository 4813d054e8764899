"""A network's predictions for some validation images, stored in the report's folder and drawn from the stored file."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from train.recording.metrics import VALIDATION
from train.report import arrays
from train.report.document import Picture, Pictures

FILE, PICTURE = "predictions.npz", "predictions.png"  # in the report's folder
JPEG_QUALITY = 85


@dataclass(frozen=True)
class Predictions:
    """The predictions for N images."""

    pictures: np.ndarray  # uint8 (N, size, size, 3)
    true: list[str]  # names of the true classes
    guessed: list[str]  # names of the most likely classes
    probability: np.ndarray  # float (N,): the probability of the guess
    epoch: int  # completed epochs of training
    images: str = VALIDATION  # kind of the images: validation or training images

    @property
    def num_right(self) -> int:
        return sum(true == guess for true, guess in zip(self.true, self.guessed, strict=True))

    def block(self, file: str, caption: str) -> Pictures:
        """The pictures as a block of a document; `file`: the PNG with all pictures."""
        jpegs = []
        for pixels in self.pictures:
            jpeg = io.BytesIO()
            Image.fromarray(pixels).save(jpeg, "JPEG", quality=JPEG_QUALITY)
            jpegs.append(jpeg.getvalue())
        return Pictures(file, caption, list(map(Picture, jpegs, self.guessed, self.probability.tolist(), self.true)))

    @property
    def caption(self) -> str:
        """The picture's caption."""
        images = "validation set" if self.images == VALIDATION else self.images
        epochs = f"{self.epoch} epoch{'s' * (self.epoch != 1)}"
        return (f"{len(self.true)} images, spread evenly over the {images}, and what the network takes them for "
                f"after {epochs}, with the probability of its guess: {self.num_right} are right.")


def save(predictions: Predictions, folder: Path) -> None:
    """Write the predictions into a report's folder. Raises UserError if that fails."""
    arrays.save(folder / FILE, vars(predictions))


def read(folder: Path) -> Predictions | None:
    """The predictions in a report's folder; None if there are none. Raises TrainError if they cannot be read."""
    return arrays.read(folder / FILE, lambda values: Predictions(
        values["pictures"], values["true"].tolist(), values["guessed"].tolist(), values["probability"],
        int(values["epoch"]), str(values["images"]) if "images" in values else VALIDATION))  # files of earlier versions
