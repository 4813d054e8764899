"""Predictions for some validation images, evenly spread over the split: nobody chose those that went well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from graph_passes.executors import Executor
from pipelines import Loader, LoaderConfig, load_chosen
from train.reporting.metrics import VALIDATION
from train.reporting.predictions import Predictions

NUM_SHOWN = 24
SHOWN_SIZE = 160  # pixels: a network may see too few for people


def predict_some(executor: Executor, loader: Loader, epoch: int, images: str = VALIDATION) -> Predictions:
    """Predictions for images of a validation loader's split. Raises DataError where none can be decoded.

    `images`: which these are, one of `metrics.EVALUATED`.
    """
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
    mean, std = config.transform.mean, config.transform.std
    return Predictions(
        pictures=(np.concatenate(pictures) * std + mean).round().clip(0, 255).astype(np.uint8),
        true=[names[loader.labels[label]] for label in labels],
        guessed=[names[guess] if guess < len(names) else f"class {guess}" for guess in guesses],
        probability=np.array(probabilities),
        epoch=epoch,
        images=images,
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
        valid, label = (array.asnumpy()[: batch.num_valid] for array in (values, batch.label))
        yield valid.astype(np.float32), label.astype(int)
