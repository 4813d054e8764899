"""safetensors files. The format has no checksum, so files of this program have a checksum in their metadata. The
checksum is verified if present.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from train.content import content_of_file
from train.errors import TrainError
from train.weights import torch_file

CHECKSUM = "resnet_mxnet_sha256"  # key in the metadata
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1",
          "BOOL": "?", "BF16": "<u2"}


def read(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors by name; bfloat16 becomes float32. Raises OSError, and TrainError if the file is damaged."""
    try:
        import safetensors
    except ImportError:
        raise TrainError(f"{path} needs the package safetensors: run make setup, or pip install safetensors") from None
    with content_of_file(lambda reason: f"{path} is not a complete safetensors file ({reason}): fetch or write it "
                                        "again"):
        content = path.read_bytes()
        found = safetensors.deserialize(content)
        wanted = _metadata(content).get(CHECKSUM)
        if wanted is not None and wanted != _checksum({name: tensor["data"] for name, tensor in found},
                                                      {name: tensor["shape"] for name, tensor in found}):
            raise ValueError("its tensors do not match its checksum")
        arrays = {name: _array(path, name, tensor) for name, tensor in found}
    return torch_file.without_prefixes(path, arrays)


def content(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The content of a file with these tensors. Raises TrainError if the package is missing."""
    try:
        from safetensors.numpy import save
    except ImportError:
        raise TrainError("a .safetensors file needs the package safetensors: run make setup, or pip install safetensors"
                         ) from None
    shapes = {name: array.shape for name, array in tensors.items()}
    checksum = _checksum({name: np.ascontiguousarray(array) for name, array in tensors.items()}, shapes)
    return save(dict(tensors), metadata={"format": "pt", CHECKSUM: checksum})


def _checksum(values: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    """The checksum of names, shapes and bytes. It does not depend on the order of the tensors in the file."""
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(json.dumps([name, list(shapes[name])]).encode())
        digest.update(memoryview(values[name]).cast("B") if np.size(values[name]) else b"")
    return digest.hexdigest()


def _metadata(content: bytes) -> dict[str, str]:
    """The metadata in the header. The header is a length (uint64) followed by JSON."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    found = header.get("__metadata__", {})
    return found if isinstance(found, dict) else {}


def _array(path: Path, name: str, tensor: Mapping[str, Any]) -> np.ndarray:
    kind = tensor["dtype"]
    if kind not in _TYPES:
        raise TrainError(f"{path} has {name} in {kind}, which this program does not read: save it as float32")
    values = np.frombuffer(tensor["data"], _TYPES[kind]).reshape(tensor["shape"])
    return torch_file.from_bfloat16(values) if kind == "BF16" else values
