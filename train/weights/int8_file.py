"""The file of an INT8 network, which `quantize` writes beside its checkpoint: int8-best.npz for best.npz.

    meta             JSON: format, version, network, checksum of the float weights, scales, layers kept in floats, the
                     calibration, the kind of images, its accuracy
    params/<name>    weights int8, biases int32, multipliers and float layers fp32 (passes/quantise.py)
"""

from __future__ import annotations

import dataclasses
import io
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common import files
from common.command_line import option_name
from graph_passes import Graph, GraphError, Ref, passes
from graph_passes.executors import Executor
from graph_passes.passes.quantise import Kept
from train import checkpoint, models
from train.checkpoint import Checkpoint
from train.config import Config
from train.content import content_of_file
from train.devices import Placement
from train.errors import TrainError

FORMAT, VERSION = "resnet int8", 1
# Options of the images. With other values, the tensors would leave the calibrated ranges.
IMAGES = ("inference_image_size", "mean", "std")
OPTIONS = {"inference_image_size": "val_image_size"}  # option names, if different
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Int8Network:
    """An INT8 network, made by `passes/quantise.py` from a trained network."""

    network: str
    checksum: int  # checksum of the float weights
    scales: dict[str, float]  # tensor -> scale
    kept: Kept
    calibration: dict[str, Any]  # method, images, data
    images: dict[str, Any]  # the options IMAGES
    params: Arrays
    accuracy: dict[str, float] = dataclasses.field(default_factory=dict)  # precision -> top-1

    def prepared(self, trained: Checkpoint) -> Checkpoint:
        """The trained network, set to prepare images for inference as in the calibration."""
        size, mean, std = (self.images[name] for name in IMAGES)
        config = dataclasses.replace(trained.config, val_image_size=size, mean=tuple(mean), std=tuple(std))
        return dataclasses.replace(trained, config=config)

    def graph(self, trained: Checkpoint) -> Graph:
        """The inference graph in INT8. Raises GraphError if the scales belong to another network."""
        graph = models.create(trained.config.model, trained.num_classes).graph
        from graph_passes import pipeline  # imports all kernels, which other networks do not need

        return pipeline.run(pipeline.quantised_passes("float32", self.scales, self.kept), graph)


def path_of(place: str) -> Path:
    """The path of the INT8 network for the weights at `place`. Raises TrainError if no weights are found."""
    path = Path(place)
    found = path if path.is_file() else checkpoint.find(place, prefer_best=True)
    return found.with_name(f"int8-{found.stem}.npz")


def images_of(config: Config) -> dict[str, Any]:
    """The options of image preparation on which the ranges depend."""
    values = {name: getattr(config, name) for name in IMAGES}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def checksum(trained: Checkpoint) -> int:
    """CRC-32 of the weights and running statistics."""
    found = 0
    for arrays in (trained.params, trained.aux):
        for name in sorted(arrays):
            found = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), zlib.crc32(name.encode(), found))
    return found


def save(network: Int8Network, path: Path) -> None:
    """Write the file atomically. Raises UserError."""
    meta = {"format": FORMAT, "version": VERSION, **vars(network), "kept": network.kept._asdict()}
    params = meta.pop("params")
    content = io.BytesIO()
    np.savez(content, meta=np.array(json.dumps(meta)), **{f"params/{name}": array for name, array in params.items()})
    files.write(path, content.getvalue())


def check_place(place: str, trained: Checkpoint, overwrite: bool) -> None:
    """Raise UserError if the INT8 network cannot be written, or exists already and `overwrite` is off."""
    path = path_of(place)
    files.check_place(path, "copy the checkpoint to another folder and give that")
    if overwrite:
        return
    try:
        found = load(place, trained)
    except TrainError:  # an unusable file may be replaced
        return
    raise TrainError(f"{path} exists already, calibrated ({found.calibration['method']}) on "
                     f"{found.calibration['images']} images of {found.images['inference_image_size']} pixels: give "
                     "--overwrite to replace it")


def load(place: str, trained: Checkpoint) -> Int8Network:
    """Load the INT8 network that was made from these weights. Raises TrainError if the INT8 network does not exist, is
    damaged, or was made from other weights.
    """
    path = path_of(place)
    again = f"run python -m train quantize --checkpoint {place}"
    try:
        with content_of_file(lambda reason: f"{path} is not a complete network in INT8 ({reason}): {again}"):
            network = _read(path)
            found = network.checksum == checksum(trained)
            if found:
                _check(network, trained)
    except FileNotFoundError:
        raise TrainError(f"there is no {path}, the network in INT8: {again} first") from None
    except OSError as error:
        raise TrainError(f"cannot read {path} ({error.strerror or error}): {again}") from None
    if not found:
        raise TrainError(f"{path} was made of other weights than {place} has now: {again}")
    return network


def _read(path: Path) -> Int8Network:
    with np.load(path, allow_pickle=False) as archive:
        meta = json.loads(archive["meta"].item())
        if meta.pop("format") != FORMAT or meta.pop("version") != VERSION:
            raise ValueError(f"it is not of the format {FORMAT}, version {VERSION}")
        params = {name.removeprefix("params/"): archive[name] for name in archive.files if name != "meta"}
    return Int8Network(**{**meta, "kept": Kept(**meta["kept"]), "params": params})


def check_images(network: Int8Network, place: str, config: Config) -> None:
    """Raise TrainError if given options prepare images differently from the calibration."""
    for name, value in images_of(config).items():
        if network.images[name] != value:
            option = option_name(OPTIONS.get(name, name))
            raise TrainError(f"{path_of(place)} was calibrated for {option} {_words(network.images[name])}, not "
                             f"{_words(value)}: leave {option} out, or run python -m train quantize --checkpoint "
                             f"{place} with it")


def executor_of(network: Int8Network, trained: Checkpoint, config: Config, placement: Placement) -> Executor:
    """The executor of the INT8 network, with the configuration's loss: cuda on a GPU, otherwise reference. Both compute
    equal integers. Raises GraphError.
    """
    graph = models.create(trained.config.model, trained.num_classes, config.label_smoothing).graph
    shape = (config.batch_size, config.inference_image_size, config.inference_image_size, 3)
    shapes = {"data": shape, "softmax_label": shape[:1]}
    if placement.executor != "cuda":
        from graph_passes.executors.reference import QuantisedExecutor

        return QuantisedExecutor(graph, shapes, network.scales, network.kept, network.params)
    from graph_passes.executors.cuda.executor import CudaExecutor
    from graph_passes.executors.cuda.quantised import Quantisation

    return CudaExecutor(graph, shapes, placement.device, Quantisation(network.scales, network.kept, network.params),
                        deterministic=config.deterministic)


def _check(network: Int8Network, trained: Checkpoint) -> None:
    """Raise ValueError unless the arrays are exactly the arrays that the graph needs."""
    try:
        graph, size = network.graph(trained), network.prepared(trained).config.inference_image_size
        shapes = graph.infer_shapes({"data": (1, size, size, 3), "softmax_label": (1,)})
    except GraphError as error:
        raise ValueError(error) from None
    dtypes = passes.tensor_dtypes(graph)
    wanted = {name: (shapes[Ref(name)], dtypes[Ref(name)]) for name in graph.variables
              if name not in ("data", "softmax_label")}
    found = {name: (array.shape, str(array.dtype)) for name, array in network.params.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(f"its {name} is {found.get(name)}, but {wanted.get(name)} in the network")


def _words(value: Any) -> str:
    """A value as on a command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
