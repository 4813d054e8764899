"""Adds names and pictures to the outcomes of a validation, for a report. Pictures show the mistakes, and a sample that
is spread evenly over the split, so that the sample is not selected by results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

import pipelines
from pipelines import DataError, Loader, LoaderConfig
from train.classes import display_names
from train.recording.metrics import VALIDATION
from train.recording.outcomes import Outcomes
from train.report.classifier import Classifier
from train.report.predictions import Predictions

SHOWN_SIZE = 160  # pixels; the network's own input may be too small to look at


def sample(outcomes: Outcomes, loader: Loader, epoch: int, images: str = VALIDATION) -> Predictions:
    """The predictions for the sample of a validation with this loader. Any process may call this. Raises DataError if
    no image of the sample can be decoded any more.

    Args:
        epoch: completed epochs of training.
        images: a name for the images, a key of `metrics.EVALUATED`.
    """
    pictures, read = _pictures(loader, outcomes.sample[:, 0].tolist())
    names = display_names(loader.classes)
    _, true, guessed = outcomes.sample[read].T.tolist()
    return Predictions(
        pictures=pictures,
        true=[names[label] for label in true],
        guessed=[names[label] if label < len(names) else f"class {label}" for label in guessed],
        probability=outcomes.sample_sureness[read],
        epoch=epoch,
        images=images,
    )


def describe(outcomes: Outcomes, loader: Loader, epoch: int, images: str) -> Classifier:
    """Combine the outcomes of a validation with this loader, with names and pictures. Any process may call this.

    Args:
        epoch: completed epochs of training; 0: unknown.
        images: a name for the images.
    """
    chosen = outcomes.mistakes[:, 0].tolist()
    pictures, shown = np.zeros((0, SHOWN_SIZE, SHOWN_SIZE, 3), np.uint8), np.zeros(0, np.int64)
    if chosen:
        with contextlib.suppress(DataError):  # the files may be gone by now; the counts are still valid
            pictures, shown = _pictures(loader, chosen)
    return Classifier(outcomes, display_names(loader.classes), loader.names(chosen), pictures, shown, images, epoch)


def _pictures(loader: Loader, chosen: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (S, size, size, 3) of chosen images of a validation loader's split, cropped as by the loader, but large
    enough to look at; and the indices (S,) of the images that could be decoded. Raises DataError if no image can be
    decoded.
    """
    config = replace(loader.config, on_bad_image="skip", image_size=SHOWN_SIZE, device="cpu", dtype="float32",
                     channels=3)
    data, places = zip(*_valid(config, chosen), strict=True)
    mean, std = config.transform.mean, config.transform.std
    return (np.concatenate(data) * std + mean).round().clip(0, 255).astype(np.uint8), np.concatenate(places)


def _valid(config: LoaderConfig, chosen: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield, batch by batch, the chosen images' pixels, and their positions in `chosen`."""
    with pipelines.open_chosen(config, chosen) as loader:
        for batch in loader:
            yield batch.data.asnumpy()[: batch.num_valid].astype(np.float32), np.array(batch.indices, np.int64)
