"""A network's results for a report: predictions for some validation images, spread evenly over the split so that nobody
selects the good ones, and the outcomes over all images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from graph_passes.executors import Executor
from pipelines import DataError, Loader, LoaderConfig, open_chosen
from train.classes import display_names
from train.recording.metrics import VALIDATION
from train.recording.outcomes import Outcomes
from train.report.classifier import Classifier
from train.report.predictions import Predictions

NUM_SHOWN = 24
SHOWN_SIZE = 160  # pixels; the network's own input may be too small to look at


def predict_some(executor: Executor, loader: Loader, epoch: int, images: str = VALIDATION) -> Predictions:
    """Predictions for some images of a validation loader's split. Raises DataError if none can be decoded.

    `images`: a name for the images, a key of `metrics.EVALUATED`.
    """
    chosen = spread(loader.num_images, NUM_SHOWN)
    config = replace(loader.config, on_bad_image="skip")  # an unreadable image must not end a run
    labels, guesses, probabilities = [], [], []
    for data, label, _ in _valid(config, chosen, executor):
        best = data.argmax(axis=1)
        labels += label.tolist()
        guesses += best.tolist()
        probabilities += data[np.arange(len(best)), best].tolist()
    pictures, _ = _pictures(loader, chosen)
    names = display_names(loader.classes)
    return Predictions(
        pictures=pictures,
        true=[names[loader.labels[label]] for label in labels],
        guessed=[names[guess] if guess < len(names) else f"class {guess}" for guess in guesses],
        probability=np.array(probabilities),
        epoch=epoch,
        images=images,
    )


def describe(outcomes: Outcomes, loader: Loader, epoch: int, images: str) -> Classifier:
    """Combine the outcomes of a validation with this loader, in any process, with names and pictures.

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
    """Pictures of chosen images of a validation loader's split, in its crop but large enough to look at (S, size, size,
    3); and the indices of those that could be decoded (S,). Raises DataError if none can."""
    config = replace(loader.config, on_bad_image="skip", image_size=SHOWN_SIZE, device="cpu", dtype="float32",
                     channels=3)
    data, _, places = zip(*_valid(config, chosen), strict=True)
    mean, std = config.transform.mean, config.transform.std
    return (np.concatenate(data) * std + mean).round().clip(0, 255).astype(np.uint8), np.concatenate(places)


def spread(total: int, count: int) -> list[int]:
    """At most `count` evenly spread numbers below `total`."""
    count = min(count, total)
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


def _valid(
    config: LoaderConfig, chosen: Sequence[int], executor: Executor | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield, batch by batch, the chosen images' pixels (with an executor: probabilities), labels, and positions in
    `chosen`."""
    with open_chosen(config, chosen) as loader:
        for batch in loader:
            values = executor.forward(batch.data) if executor else batch.data
            valid, label = (array.asnumpy()[: batch.num_valid] for array in (values, batch.label))
            yield valid.astype(np.float32), label.astype(int), np.array(batch.indices, np.int64)
