"""The forms of files that hold weights: for each, what reads the names and arrays of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from train.errors import TrainError
from train.weights import onnx_file, record, torch_file
from train.weights.record import Record

Arrays = dict[str, np.ndarray]


def read(path: Path) -> tuple[Arrays, Record]:
    """The arrays of a file, by their names there, and how images are prepared for them.

    Raises UserError where it cannot be read, is damaged or of another form than its name says.
    """
    try:
        return READERS[path.suffix.lower()](path)
    except OSError as error:
        raise TrainError(f"cannot read {path} ({error.strerror or error}): see to its permissions") from None


def _read_safetensors(path: Path) -> Arrays:
    try:
        import safetensors
    except ImportError:
        raise TrainError(f"{path} needs the package safetensors: run make setup, or pip install safetensors") from None
    try:
        found = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise TrainError(f"{path} is no complete file of safetensors ({error}): fetch or write it once more") from None
    arrays = {name: _from_safetensors(path, name, tensor) for name, tensor in found}
    return torch_file.without_prefixes(path, arrays)


_SAFETENSORS_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
                      "U8": "<u1", "BOOL": "?", "BF16": "<u2"}


def _from_safetensors(path: Path, name: str, tensor: Mapping[str, Any]) -> np.ndarray:
    kind = tensor["dtype"]
    if kind not in _SAFETENSORS_TYPES:
        raise TrainError(f"{path} has {name} in {kind}, which this program does not read: save it as float32")
    values = np.frombuffer(tensor["data"], _SAFETENSORS_TYPES[kind]).reshape(tensor["shape"])
    return torch_file.from_bfloat16(values) if kind == "BF16" else values


def _read_mxnet(path: Path) -> Arrays:
    """Of Gluon and of `export --params`. What they were made with may have put arg: or aux: before names."""
    with path.open("rb") as file:  # MXNet's own message would be its stack trace
        start = file.read(24)
    try:
        if int.from_bytes(start[16:], "little") > path.stat().st_size:  # arrays, for which MXNet would take memory
            raise ValueError
        found = mx.nd.load(str(path))
        if not isinstance(found, dict) or not found:
            raise TrainError(f"{path} has no names for its arrays: write it with save_parameters")
        # Here too MXNet says that a shape in the file cannot be.
        return {name.removeprefix("arg:").removeprefix("aux:"): array.asnumpy() for name, array in found.items()}
    except (mx.MXNetError, ValueError, TypeError, LookupError, MemoryError):
        raise TrainError(f"{path} is no complete parameter file of MXNet: fetch or write it once more") from None


def _with_record(read_arrays: Callable[[Path], Arrays]) -> Callable[[Path], tuple[Arrays, Record]]:
    return lambda path: (read_arrays(path), record.find(path))


READERS: Mapping[str, Callable[[Path], tuple[Arrays, Record]]] = {
    **dict.fromkeys((".pth", ".pt", ".bin", ".tar"), _with_record(torch_file.read)),  # .pth.tar is usual too
    ".safetensors": _with_record(_read_safetensors),
    ".params": _with_record(_read_mxnet),
    ".onnx": onnx_file.read,
}
