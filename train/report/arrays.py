"""Files of named arrays, from which pictures of a report are drawn anew."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from common import files
from train.content import content_of_file
from train.errors import TrainError

T = TypeVar("T")


def save(path: Path, values: Mapping[str, Any]) -> None:
    """Write what NumPy makes arrays of without pickling, making the folder if need be. Raises UserError."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in values.items():
            array = io.BytesIO()
            np.lib.format.write_array(array, np.asarray(value), allow_pickle=False)
            # A ZipInfo has a time of its own; a zip file cannot hold that of a clock before 1980.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), array.getvalue(), zipfile.ZIP_DEFLATED)
    files.write(path, content.getvalue())


def read(path: Path, make: Callable[[Mapping[str, np.ndarray]], T]) -> T | None:
    """What `make` makes of the arrays; None where there is no file. Raises TrainError where it cannot be read."""
    if not path.is_file():
        return None

    def sentence(fault: object) -> str:
        return f"{path} cannot be read ({fault}): delete it, and the report comes without it"

    try:
        with content_of_file(sentence), np.load(path, allow_pickle=False) as values:
            return make(values)
    except OSError as error:
        raise TrainError(sentence(error)) from None
