"""Features of images (the input of the network's classifier) as a NumPy file, for search, clustering and classifiers.

    python -m train embed --checkpoint runs/my-run photos/ --output features.npy
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common import files
from pipelines.given import given
from pipelines.progress import progress_bar
from train.commands.predict_to_file import name_damaged
from train.errors import TrainError
from train.features import Features
from train.image_paths import image_paths
from train.options.commands import EmbedOptions
from train.prediction import Predictor, Unread
from train.processes.signals import ending_with
from train.recording.log_file import writing


def main(values: Mapping[str, Any]) -> None:
    """Compute the features of all images, and write the file. Raises UserError and StoppedBySignal."""
    options = EmbedOptions(**values)
    if not options.checkpoint:
        raise TrainError("embed needs trained weights: give --checkpoint with a run folder, a checkpoint or a file of "
                         "weights")
    output = Path(options.output)
    _check_places(output, options.images, options.overwrite)
    images = [str(path) for path in image_paths(options.images)]
    network = Predictor.load(options, may_raise_batch="batch_size" not in values)
    start = time.monotonic()
    with ending_with("stopped: nothing was written, and the same command begins anew"):
        num_written, unread = write_features(network, images, output, options.on_bad_image)
    for place, reason in sorted(unread.bad.items()):
        print(f"skipped: {images[place]}: {reason}", file=sys.stderr)
    name_damaged([(images[place], message) for place, message in sorted(unread.damaged.items())])
    seconds = time.monotonic() - start
    print(f"{output}: float32 ({num_written}, {network.num_features}), in the order of {list_beside(output)}; "
          f"{num_written / seconds:,.1f} images/sec in {timedelta(seconds=round(seconds))}")


def list_beside(output: Path) -> Path:
    """The file that lists the images of a file of features."""
    return output.with_suffix(".txt")


def _check_places(output: Path, images: Sequence[Path], overwrite: bool) -> None:
    """Raise UserError if one of the two files cannot be written, exists already (unless `overwrite`), or would replace
    a list that names `images`.
    """
    if output.suffix != ".npy":
        raise TrainError(f"--output {output} must end in .npy: give the NumPy file to write" if output.name else
                         "embed writes a NumPy file: give --output features.npy")
    if any(os.path.realpath(place) == os.path.realpath(list_beside(output)) for place in images):
        raise TrainError(f"--output {output} would replace {list_beside(output)}, the list of the images to read: give "
                         "another --output")
    for path in (output, list_beside(output)):
        if path.exists() and not overwrite:
            raise TrainError(f"{path} exists already: give --overwrite to replace it, or another --output")
        files.check_place(path, "give another --output")


def write_features(network: Predictor, images: Sequence[str], output: Path, on_bad_image: str) -> tuple[int, Unread]:
    """Write the features of image files as they are computed, then the list of the files. After an error, existing
    files are unchanged. Returns the number of rows, and the images that are unreadable (no row) or damaged. Raises
    UserError."""
    unread, written = Unread({}, {}), []
    numbered = [given(image, number) for number, image in enumerate(images)]
    with (writing(output, "give another --output"), _npy_file(output, len(images), network.num_features) as (file, end),
          progress_bar(transient=True) as bar):
        task = bar.add_task("computing features", total=len(images))
        for answer in network.answers(numbered, Features, on_bad_image, unread):
            file.write(answer.values.astype("<f4").tobytes())
            written += answer.places
            bar.advance(task, len(answer.places))
        if not written:
            first, reason = min(unread.bad.items())
            raise TrainError(f"no image of {len(images):,} can be read, for example {images[first]}: {reason}; replace "
                             "them")
        end(len(written))
        # The list is written first, so that a file of features always has a list.
        files.write(list_beside(output), os.fsencode("".join(f"{images[place]}\n" for place in written)))
    return len(written), unread


@contextmanager
def _npy_file(path: Path, most_rows: int, columns: int) -> Iterator[tuple[BinaryIO, Any]]:
    """A context that creates a .npy file. Yields a function that appends rows of float32, and a function that completes
    the file with the number of rows. The file gets its final name when the block succeeds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)

    # NumPy leaves room for any number of rows, so the header's length does not depend on the number
    def write_header(rows: int) -> None:
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)})

    with files.replacing(path) as partial, partial.open("wb") as file:
        write_header(most_rows)
        yield file, write_header
        file.flush()
        os.fsync(file.fileno())
