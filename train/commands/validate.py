"""The command `validate`: loss and accuracy of a trained network on a data set, and its results for each image."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import files
from pipelines import Loader
from train import weights
from train.build import evaluated_images, inference_executor, open_split
from train.checkpoint import load_plugins
from train.classes import is_numbered, some
from train.commands.prediction_file import ENCODING, ERRORS, FORMS, check_name
from train.commands.session import name_images, of_network, prepare, shown_skipped
from train.config import configure
from train.devices import for_int8
from train.errors import TrainError
from train.options.data import SYNTHETIC
from train.plugin_metrics import PluginMetrics
from train.processes.distributed import Workers
from train.processes.invocation import command_line
from train.ranking import most_likely
from train.recording.log_file import writing
from train.recording.metrics import TRAINING_IMAGES, shown_interval, tells_top5
from train.report.document import Tiles
from train.report.inspection import describe
from train.report.page import write_validation
from train.validation import printed_progress, validate
from train.weights import int8_file

TOP = 5  # classes in the record of an image


class EachImage:
    """The network's results for each image of a validation, in this process. The form is compact enough for millions of
    images.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._parts: list[tuple[np.ndarray, ...]] = []

    def __call__(self, probabilities: np.ndarray, labels: np.ndarray, images: Sequence[int]) -> None:
        """Add a batch: probabilities (N, classes), labels (N,), indices in the split (N,)."""
        labels = labels.astype(np.int32)
        own = np.maximum(probabilities[np.arange(len(labels)), labels], np.finfo(np.float32).tiny)
        self._parts.append((np.asarray(images, np.int64), labels, *most_likely(probabilities, self._top), -np.log(own)))

    def gathered(self, workers: Workers) -> list[tuple[np.ndarray, ...]]:
        """The parts of all processes: indices (N), labels (N), classes (N, top), their probabilities, and losses (N). A
        collective operation."""
        return [part for of_process in workers.gather(self._parts) for part in of_process]

    @staticmethod
    def write(path: Path, parts: Sequence[tuple[np.ndarray, ...]], loader: Loader, names: Sequence[str],
              skipped: Sequence[tuple[str, str]]) -> None:
        """Write all records, in the order of the split; skipped images (file, reason) come last. Raises TrainError."""
        images, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(images)
        labels, classes, best, losses = (column[order].tolist() for column in columns)
        form = FORMS[path.suffix](names, len(classes[0]) if classes else 0, has_true=True, has_loss=True)
        with writing(path, "give another --output"), ExitStack() as opened:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = opened.enter_context(opened.enter_context(files.replacing(path)).open("wb"))
            file.write(form.header)
            for image, label, ranked, values, loss in zip(images[order].tolist(), labels, classes, best, losses,
                                                          strict=True):
                (name,) = loader.names([image])
                record = form.prediction(name, ranked, values, names[label], loss)
                file.write(record.encode(ENCODING, ERRORS))
            for image, reason in skipped:
                file.write(form.failure(image, reason).encode(ENCODING, ERRORS))


class Validated(NamedTuple):
    """Loss and accuracy of a network on a data set."""

    num_images: int  # images, without unreadable images
    loss: float  # mean over the images, in nats
    top1: float  # share of the images whose class is the most likely one
    top5: float  # share of the images whose class is among the five most likely ones
    balanced_top1: float  # mean of the classes' top-1
    plugin_metrics: dict[str, float]  # means of the plug-ins' metrics over the images, by name


def main(values: Mapping[str, Any], workers: Workers | None = None) -> Validated:
    """Print loss and accuracy of a trained network. Raises UserError."""
    workers, output = workers or Workers(), values.get("output_")
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
        load_plugins(trained)
        config = of_network(configure(values, trained.config), values, trained)
        if int8:
            int8_file.check_images(int8, place, config)
            config = for_int8(config, values)
        if output and workers.rank == 0:
            _check_output(Path(output), config.data)
        placement = prepare(config, workers)
        loader = open_split(replace(config, cache=0), "val", placement, workers, trained.classes,
                            f"the network of {place}")  # without the cache, because each image is needed once
        executor = inference_executor(trained, int8, config, placement)
    with loader:
        progress = printed_progress(loader.num_batches) if workers.rank == 0 else None
        each = EachImage(min(TOP, trained.num_classes)) if output else None
        of_plugins = PluginMetrics(config.plugin)

        def take(probabilities: np.ndarray, labels: np.ndarray, images: Sequence[int]) -> None:
            of_plugins(probabilities, labels, images)
            if each:
                each(probabilities, labels, images)

        validation = validate(executor, loader, workers, progress=progress, each=take)
    assert validation  # validation is never stopped early here
    sums, skipped = validation.metrics, name_images(loader, workers)
    parts = each.gathered(workers) if each else []
    plugin_metrics = of_plugins.means(workers, sums.count)
    if not math.isfinite(sums.loss_sum):
        raise TrainError(f"the loss of {place} is {sums.loss_sum}: its weights are too large for the precision of the "
                         "computation, or its images are prepared wrongly; give --dtype float32, or other weights",
                         on_all_ranks=True)
    loss, top1, top5 = (value / sums.count for value in (sums.loss_sum, sums.top1, sums.top5))
    if workers.rank == 0:
        is_same = Path(config.data).resolve() == Path(trained.config.data).resolve()
        images = TRAINING_IMAGES if is_same and evaluated_images(config) == TRAINING_IMAGES else "images"
        likely = shown_interval(top1, round(sums.count))
        is_top5_told = tells_top5(trained.num_classes)
        balanced = validation.outcomes.balanced_accuracy
        is_balance_wanted = max(config.balance, config.class_weights) > 0 or validation.outcomes.is_uneven
        print(f"{place}{' in INT8' if int8 else ''}: {sums.count:.0f} {images}{shown_skipped(len(skipped))}, "
              f"loss {loss:.4f}, top-1 {top1:.2%}" + f" (95 % interval: {likely})" * bool(likely)
              + f", top-5 {top5:.2%}" * is_top5_told
              + f", balanced accuracy {balanced:.2%}" * is_balance_wanted
              + "".join(f", {name} {value:.4g}" for name, value in plugin_metrics.items()))
        per_class, *_ = validation.outcomes.by_class(trained.num_classes)
        if trained.config.val_split and not config.val_split and not is_same:
            share = f"{trained.config.val_split:g}"
            print(f"{config.data}: all its images were validated on; the network's run kept {share} of each class of "
                  f"{trained.config.data} for validation, so give --val-split {share} if these are the same images",
                  file=sys.stderr)
        # Data without class names does not tell which classes without images exist.
        expected = range(trained.num_classes) if is_numbered(loader.own_classes) else loader.labels
        if unseen := [loader.classes[label] for label in expected if label >= 0 and not per_class[label]]:
            print(f"{config.data}: no image of these classes was validated on, so accuracy says nothing about them: "
                  f"{some(unseen)} (add some)", file=sys.stderr)
        if output:
            EachImage.write(Path(output), parts, loader, trained.class_names, skipped)
            print(f"each image: {output}")
        if folder:
            on = images if images == TRAINING_IMAGES else f"images of {config.data}"
            found = describe(validation.outcomes, loader, trained.progress.epoch, on)
            figures = Tiles([(f"{top1:.1%}", f"top-1 on the {on}" + f"; 95 % interval: {likely}" * bool(likely)),
                             *[(f"{top5:.1%}", f"top-5 on the {on}")] * is_top5_told,
                             (f"{loss:.4f}", f"loss on the {on}")])
            path = write_validation(folder, f"{place}: validation", figures, command_line(), found, skipped)
            print(f"report: {path}")
    return Validated(round(sums.count), loss, top1, top5, validation.outcomes.balanced_accuracy, plugin_metrics)


def _check_output(path: Path, data: str) -> None:
    """Raise UserError, before the validation, if the records cannot be written to `path`."""
    check_name(path)
    if path.exists():
        raise TrainError(f"{path} is there already: give another --output")
    if data == SYNTHETIC:
        raise TrainError(f"--output {path} needs images with files, and the images of --data {SYNTHETIC} have no "
                         "files: leave out --output")
    files.check_place(path, "give another --output")
