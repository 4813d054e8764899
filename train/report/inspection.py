"""What a report shows of a network: predictions for some validation images, evenly spread over the split (nobody chose
those that went well), and what it makes of all of them.
"""

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
SHOWN_SIZE = 160  # pixels: a network may see too few for people


def predict_some(executor: Executor, loader: Loader, epoch: int, images: str = VALIDATION) -> Predictions:
    """Predictions for images of a validation loader's split. Raises DataError where none can be decoded.

    `images`: which these are, one of `metrics.EVALUATED`.
    """
    chosen = spread(loader.num_images, NUM_SHOWN)
    config = replace(loader.config, on_bad_image="skip")  # there are others: a picture must not end a run
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
    """A classifier by what validation with this loader has found, in any process.

    Args:
        epoch: whole epochs of training that it has behind it; 0: not known.
        images: what validation has seen, in words.
    """
    chosen = outcomes.mistakes[:, 0].tolist()
    pictures, shown = np.zeros((0, SHOWN_SIZE, SHOWN_SIZE, 3), np.uint8), np.zeros(0, np.int64)
    if chosen:
        with contextlib.suppress(DataError):  # of files that have gone since: the counts hold all the same
            pictures, shown = _pictures(loader, chosen)
    return Classifier(outcomes, display_names(loader.classes), loader.names(chosen), pictures, shown, images, epoch)


def _pictures(loader: Loader, chosen: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Images of a validation loader's split in its crop, but in pixels for people (S, size, size, 3); and which of the
    chosen these are (S,): those that can be decoded. Raises DataError where none can."""
    config = replace(loader.config, on_bad_image="skip", image_size=SHOWN_SIZE, device="cpu", dtype="float32",
                     channels=3)
    data, _, places = zip(*_valid(config, chosen), strict=True)
    mean, std = config.transform.mean, config.transform.std
    return (np.concatenate(data) * std + mean).round().clip(0, 255).astype(np.uint8), np.concatenate(places)


def spread(total: int, count: int) -> list[int]:
    """At most `count` of the numbers below `total`, evenly spread."""
    count = min(count, total)
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


def _valid(
    config: LoaderConfig, chosen: Sequence[int], executor: Executor | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Pixels of the chosen images, or with an executor their probabilities, labels, and their places among the chosen,
    batch by batch."""
    with open_chosen(config, chosen) as loader:
        for batch in loader:
            values = executor.forward(batch.data) if executor else batch.data
            valid, label = (array.asnumpy()[: batch.num_valid] for array in (values, batch.label))
            yield valid.astype(np.float32), label.astype(int), np.array(batch.indices, np.int64)
