"""File formats of weights, each with the function that reads names and arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from common.mxnet_compat import mx
from train.content import content_of_file
from train.errors import TrainError
from train.weights import onnx_file, params_file, record, safetensors_file, torch_file
from train.weights.record import Record

Arrays = dict[str, np.ndarray]


def read(path: Path) -> tuple[Arrays, Record]:
    """The arrays of a file by their original names, and how images are prepared for them.

    Raises UserError if the file cannot be read, is damaged, or has another format than its name suggests.
    """
    try:
        return READERS[path.suffix.lower()](path)
    except OSError as error:
        raise TrainError(f"cannot read {path} ({error.strerror or error}): check its permissions") from None


def _read_mxnet(path: Path) -> Arrays:
    """Read a file of Gluon or of `export --params`. Its names may begin with arg: or aux:."""
    with content_of_file(lambda _: f"{path} is not a complete MXNet parameter file: fetch or write it again"):
        params_file.check(path)
        found = mx.nd.load(str(path))
        if not isinstance(found, dict) or not found:
            raise TrainError(f"{path} has no names for its arrays: write it with save_parameters")
        return {name.removeprefix("arg:").removeprefix("aux:"): array.asnumpy() for name, array in found.items()}


def _with_record(read_arrays: Callable[[Path], Arrays]) -> Callable[[Path], tuple[Arrays, Record]]:
    return lambda path: (read_arrays(path), record.find(path))


READERS: Mapping[str, Callable[[Path], tuple[Arrays, Record]]] = {
    **dict.fromkeys((".pth", ".pt", ".bin", ".tar"), _with_record(torch_file.read)),  # .pth.tar is also common
    ".safetensors": _with_record(safetensors_file.read),
    ".params": _with_record(_read_mxnet),
    ".onnx": onnx_file.read,
}
