"""Files of named arrays, from which a report's pictures can be redrawn."""

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
    """Write values that NumPy can convert to arrays without pickling; creates the folder if needed. Raises
    UserError."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in values.items():
            array = io.BytesIO()
            np.lib.format.write_array(array, np.asarray(value), allow_pickle=False)
            # ZipInfo sets a fixed time. The clock may show a time before 1980, which a zip file cannot store.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), array.getvalue(), zipfile.ZIP_DEFLATED)
    files.write(path, content.getvalue())


def read(path: Path, make: Callable[[Mapping[str, np.ndarray]], T]) -> T | None:
    """Read the arrays of a file and return `make(arrays)`; None if the file does not exist. Raises TrainError if the
    file cannot be read.
    """
    if not path.is_file():
        return None

    def sentence(fault: object) -> str:
        return f"{path} cannot be read ({fault}): delete it to get the report without it"

    try:
        with content_of_file(sentence), np.load(path, allow_pickle=False) as values:
            return make(values)
    except OSError as error:
        raise TrainError(sentence(error)) from None
