"""The command `validate`: loss and accuracy of a trained network on a data set."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common import files
from train import weights
from train.build import evaluated_images, inference_executor, open_split
from train.classes import is_numbered, some
from train.commands.session import name_images, of_network, prepare, shown_skipped
from train.config import configure
from train.devices import for_int8
from train.errors import TrainError
from train.processes.distributed import Workers
from train.processes.invocation import command_line
from train.recording.metrics import TRAINING_IMAGES, tells_top5
from train.report.document import Tiles
from train.report.inspection import describe
from train.report.page import write_validation
from train.validation import printed_progress, validate
from train.weights import int8_file


class Validated(NamedTuple):
    """Loss and accuracy of a network on a data set."""

    num_images: int  # without those that cannot be read
    loss: float  # mean over the images, in nats
    top1: float  # share of the images whose class is the most likely one
    top5: float  # share of the images whose class is among the five most likely ones
    balanced_top1: float  # mean of the classes' top-1


def main(values: Mapping[str, Any], workers: Workers | None = None) -> Validated:
    """Print loss and accuracy of a trained network. Raises UserError."""
    workers = workers or Workers()
    folder = Path(values["report"]) if values.get("report") else None
    with workers.agreement():
        place = values.get("checkpoint")
        if not place:
            raise TrainError("validation needs trained weights: give --checkpoint with a run folder, a checkpoint or a "
                             "file of weights")
        if folder and workers.rank == 0:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise TrainError(f"the report's folder {folder} already holds files: give another --report")
            files.check_place(folder / "report.md", "give another --report")
        trained = weights.load(place, quiet=workers.rank > 0)
        int8 = int8_file.load(place, trained) if values.get("int8", False) else None
        if int8:
            trained = int8.prepared(trained)
        config = of_network(configure(values, trained.config), values, trained)
        if int8:
            int8_file.check_images(int8, place, config)
            config = for_int8(config, values)
        placement = prepare(config, workers)
        loader = open_split(replace(config, cache=0), "val", placement, workers, trained.classes,
                            f"the network of {place}")  # without cache: each image is needed once
        executor = inference_executor(trained, int8, config, placement)
    with loader:
        progress = printed_progress(loader.num_batches) if workers.rank == 0 else None
        validation = validate(executor, loader, workers, progress=progress)
    assert validation  # it is never stopped early here
    sums, skipped = validation.metrics, name_images(loader, workers)
    if not math.isfinite(sums.loss_sum):
        raise TrainError(f"the loss of {place} is {sums.loss_sum}: its weights are too large for the precision of the "
                         "computation, or its images are prepared wrongly; give --dtype float32, or other weights",
                         on_all_ranks=True)
    loss, top1, top5 = (value / sums.count for value in (sums.loss_sum, sums.top1, sums.top5))
    if workers.rank == 0:
        is_same = Path(config.data).resolve() == Path(trained.config.data).resolve()
        images = TRAINING_IMAGES if is_same and evaluated_images(config) == TRAINING_IMAGES else "images"
        is_top5_told = tells_top5(trained.num_classes)
        balanced = validation.outcomes.balanced_accuracy
        is_balance_wanted = max(config.balance, config.class_weights) > 0 or validation.outcomes.is_uneven
        print(f"{place}{' in INT8' if int8 else ''}: {sums.count:.0f} {images}{shown_skipped(len(skipped))}, "
              f"loss {loss:.4f}, top-1 {top1:.2%}" + f", top-5 {top5:.2%}" * is_top5_told
              + f", balanced accuracy {balanced:.2%}" * is_balance_wanted)
        per_class, *_ = validation.outcomes.by_class(trained.num_classes)
        if trained.config.val_split and not config.val_split and not is_same:
            share = f"{trained.config.val_split:g}"
            print(f"{config.data}: all its images were validated on; the network's run kept {share} of each class of "
                  f"{trained.config.data} for validation, so give --val-split {share} if these are the same images",
                  file=sys.stderr)
        # Data without class names does not say which further classes it has.
        expected = range(trained.num_classes) if is_numbered(loader.own_classes) else loader.labels
        if unseen := [loader.classes[label] for label in expected if label >= 0 and not per_class[label]]:
            print(f"{config.data}: no image of these classes was validated on, so accuracy says nothing about them: "
                  f"{some(unseen)} (add some)", file=sys.stderr)
        if folder:
            on = images if images == TRAINING_IMAGES else f"images of {config.data}"
            found = describe(validation.outcomes, loader, trained.progress.epoch, on)
            figures = Tiles([(f"{value:{form}}", f"{name} on the {on}") for value, form, name in
                             ((top1, ".1%", "top-1"), *[(top5, ".1%", "top-5")] * is_top5_told, (loss, ".4f", "loss"))])
            path = write_validation(folder, f"{place}: validation", figures, command_line(), found, skipped)
            print(f"report: {path}")
    return Validated(round(sums.count), loss, top1, top5, validation.outcomes.balanced_accuracy)
