"""A report on a trained classifier: its confusions, the mistakes with the highest probability, and its calibration.

The report is drawn from a data file in the report's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.recording.metrics import TRAINING_IMAGES, interval, shown_interval
from train.recording.outcomes import NUM_BINS, Outcomes
from train.report import arrays, classifier_plots, plots
from train.report.document import Block, Heading, Plot, Table, Text
from train.report.predictions import Predictions

FILE = "classifier.npz"  # file in the report's folder, beside the pictures
CONFUSION, MISTAKES, CALIBRATION = "confusion.png", "mistakes.png", "calibration.png"
MAX_MATRIX = 50  # classes; a picture with more would be unreadable
MAX_TABLE = 20  # classes; with more the table has only the first and the last ones
NUM_ENDS = 10  # number of first classes, and of last classes, in the shortened table
NUM_CONFUSED = 10  # pairs listed beside the confusion matrix; twice as many without it


@dataclass(frozen=True)
class Classifier:
    """The results of a network on a data split."""

    outcomes: Outcomes
    names: list[str]  # unique names of all classes of the network
    files: list[str]  # file or record of each mistake in the outcomes; empty if images have none
    pictures: np.ndarray  # uint8 (S, size, size, 3): pictures of the mistakes that could be read again
    shown: np.ndarray  # int (S,): indices of the mistakes with pictures
    images: str  # a name for the images
    epoch: int  # completed epochs of training; 0: unknown

    def save(self, folder: Path) -> None:
        """Write the results into a report's folder. Raises UserError if that fails."""
        values = {**vars(self), **vars(self.outcomes)}
        del values["outcomes"]
        arrays.save(folder / FILE, values)

    @property
    def is_of_training(self) -> bool:
        """Whether the images are the training images themselves."""
        return self.images == TRAINING_IMAGES

    @property
    def class_accuracy(self) -> np.ndarray:
        """Recall, float (classes,): the share of a class's images that is predicted correctly; NaN without images."""
        images, right, _ = self.outcomes.by_class(len(self.names))
        return np.divide(right, images, out=np.full(len(images), np.nan), where=images > 0)

    def to_dict(self) -> dict[str, Any]:
        """The values in report.json; lists by class are in the order of `classes`."""
        outcomes, names = self.outcomes, self.names
        images, right, guessed = outcomes.by_class(len(names))
        return {
            "images": self.images,
            "count": outcomes.num_images,
            "epoch": self.epoch,
            "top1": (top1 := float(right.sum() / outcomes.num_images)),
            "top1_interval": list(interval(top1, outcomes.num_images)),
            "balanced_top1": outcomes.balanced_accuracy,
            "calibration_error": outcomes.calibration_error,
            "classes": names,
            "class_images": images.tolist(),
            "class_right": right.tolist(),
            "class_guessed": guessed.tolist(),
            "confused": [{"true": names[true], "guessed": names[guess], "count": int(count)}
                         for true, guess, count in outcomes.confused(2 * NUM_CONFUSED)],
            "mistakes": [{"file": file, "true": names[true], "guessed": names[guess], "probability": float(sure)}
                         for file, (_, true, guess), sure in self._mistakes()],
            "calibration": [{"above": m / NUM_BINS, "count": int(count), "right": int(hits), "probability": p / count}
                            for m, (count, hits, p) in enumerate(outcomes.bins.tolist()) if count],
        }

    def _mistakes(self) -> list[tuple[str, np.ndarray, float]]:
        return list(zip(self.files, self.outcomes.mistakes, self.outcomes.sureness, strict=False))

    @property
    def figures(self) -> dict[str, Callable[[plots.Theme], plots.Drawing]]:
        """File name -> function that draws the plot."""
        drawn: dict[str, Callable[[plots.Theme], plots.Drawing]] = {}
        if len(self.names) <= MAX_MATRIX:
            matrix = self.outcomes.confusion(len(self.names))
            drawn[CONFUSION] = lambda theme: classifier_plots.confusion(matrix, self.names, theme)
        drawn[CALIBRATION] = lambda theme: classifier_plots.calibration(self.outcomes, theme)
        return drawn

    @property
    def sheets(self) -> dict[str, bytes]:
        """File name -> PNG of pictures."""
        return {MISTAKES: plots.contact_sheet(self._surest, "The surest mistakes", "")} if len(self.shown) else {}

    @property
    def _surest(self) -> Predictions:
        """The mistakes that have pictures."""
        _, true, guess = self.outcomes.mistakes[self.shown].T
        return Predictions(self.pictures, [self.names[i] for i in true], [self.names[i] for i in guess],
                           self.outcomes.sureness[self.shown], self.epoch)

    def blocks(self, best_epoch: int = 0) -> list[Block]:
        """The classifier's part of a report. `best_epoch`: the epoch of the best weights, which later commands use; 0
        if the report shows these weights.
        """
        outcomes, figures = self.outcomes, self.figures
        known = self.to_dict()
        what = f"{outcomes.num_images:,} {self.images}"
        after = f" after {self.epoch} epoch{'s' * (self.epoch != 1)}" if self.epoch else ""
        caveat = (" These are the images that it was trained on: none of this says how it does on others."
                  if self.is_of_training else "")
        if best_epoch and best_epoch == self.epoch:
            after += ", with the weights that predict, validate and export take"
        elif best_epoch:
            caveat += (f" The best weights, which validate, predict and export take, are those of epoch {best_epoch}: "
                       "python -m train validate --checkpoint RUN --report FOLDER shows what they do.")
        likely = shown_interval(known["top1"], outcomes.num_images)
        text = (f"What the network makes of {what}{after}: top-1 {known['top1']:.2%}"
                + f" (95 % interval: {likely})" * bool(likely)
                + f", balanced accuracy (the mean over the classes) {known['balanced_top1']:.2%}.{caveat}")
        blocks: list[Block] = [Heading("The classifier" + f" on the {TRAINING_IMAGES}" * self.is_of_training),
                               Text(text)]
        if CONFUSION in figures:
            blocks += [Plot(CONFUSION, "A row has the images of one true class, a column those of one predicted class, "
                                       "so right guesses are on the diagonal. The stronger the colour, the larger the "
                                       "share of the row.")]
        blocks += [self._confused_table(NUM_CONFUSED if CONFUSION in figures else 2 * NUM_CONFUSED)]
        blocks += self._class_table()
        if len(self.shown):
            blocks += [self._surest.block(MISTAKES, f"The {len(self.shown)} wrong guesses with the highest probability "
                                          f"on the {what}. Images with a wrong label show up here first.")]
        if self.files:
            rows = [(file, self.names[true], self.names[guess], f"{sure:.1%}")
                    for file, (_, true, guess), sure in self._mistakes()]
            blocks += [Table(("file", "is", "taken for", "probability"), rows, folded="Files of the surest mistakes")]
        blocks += [Plot(CALIBRATION, f"Calibration on the {what}: of guesses with a probability of 80 %, 80 % should "
                                     "be right. The expected calibration error (ECE), which is the mean distance from "
                                     f"that, is {outcomes.calibration_error:.2%}.")]
        return blocks

    def _confused_table(self, count: int) -> Block:
        images, *_ = self.outcomes.by_class(len(self.names))
        rows = [(self.names[true], self.names[guess], f"{times:,}", f"{times / images[true]:.1%}")
                for true, guess, times in self.outcomes.confused(count)]
        if not rows:
            return Text("No image is taken for one of another class.")
        return Table(("class", "confused with", "images", "of the class"), rows)

    def _class_table(self) -> list[Block]:
        """Accuracy by class, the lowest first; with many classes only both ends."""
        images, right, guessed = self.outcomes.by_class(len(self.names))
        accuracy = self.class_accuracy
        seen = np.flatnonzero(images)
        order = seen[np.lexsort((seen, -images[seen], accuracy[seen]))]
        rows: list[Sequence[str]] = [
            (self.names[i], f"{accuracy[i]:.1%}", shown_interval(accuracy[i], int(images[i])),
             f"{right[i]:,} of {images[i]:,}", f"{right[i] / guessed[i]:.1%}" if guessed[i] else "none",
             f"{guessed[i]:,}")
            for i in (order if len(order) <= MAX_TABLE else np.concatenate([order[:NUM_ENDS], order[-NUM_ENDS:]]))
        ]
        notes = []
        if len(order) > MAX_TABLE:
            rows.insert(NUM_ENDS, ("...",) + ("",) * 5)
            notes += [f"These are the {NUM_ENDS} classes with the lowest accuracy and the {NUM_ENDS} with the highest, "
                      f"of {len(order):,}; report.json has all."]
        if without := len(self.names) - len(order):
            notes += [f"{without:,} class{'es' * (without > 1)} of the network {'have' if without > 1 else 'has'} no "
                      "image here."]
        head = ("class", "accuracy", "95 % interval", "right", "precision", "taken for it")
        return [Table(head, rows), *([Text(" ".join(notes))] if notes else [])]


def read(folder: Path) -> Classifier | None:
    """The results stored in a report's folder; None if there are none. Raises TrainError if they cannot be read."""
    return arrays.read(folder / FILE, lambda values: Classifier(
        Outcomes(values["pairs"], values["bins"], values["mistakes"], values["sureness"]), values["names"].tolist(),
        values["files"].tolist(), values["pictures"], values["shown"], str(values["images"]), int(values["epoch"])))
