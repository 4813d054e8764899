"""A network in INT8, as `quantize` writes it beside the checkpoint that it was made of: int8-best.npz for best.npz.

    meta             JSON: format, version, network, the checksum of the weights it was made of, scales, what has stayed
                     in floats, what it was calibrated on, the images that it is for, its accuracy
    params/<name>    weights int8, biases int32, multipliers and what has stayed in floats fp32 (passes/quantise.py)
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
from graph_passes import Graph, GraphError, Ref, passes, pipeline
from graph_passes.executors import Executor
from graph_passes.executors.reference import QuantisedExecutor
from graph_passes.passes.quantise import Kept
from train import checkpoint, models
from train.checkpoint import Checkpoint
from train.config import Config
from train.content import content_of_file
from train.devices import Placement
from train.errors import TrainError

FORMAT, VERSION = "resnet int8", 1
# Of the images: a network that was calibrated for others gets other values than its ranges are for.
IMAGES = ("inference_image_size", "mean", "std")
OPTIONS = {"inference_image_size": "val_image_size"}  # of another name
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Int8Network:
    """What `passes/quantise.py` has made of a trained network."""

    network: str
    checksum: int  # of the weights that it was made of
    scales: dict[str, float]  # by tensor
    kept: Kept
    calibration: dict[str, Any]  # method, images, data
    images: dict[str, Any]  # IMAGES
    params: Arrays
    accuracy: dict[str, float] = dataclasses.field(default_factory=dict)  # top-1 by precision

    def prepared(self, trained: Checkpoint) -> Checkpoint:
        """The trained network with images as the ranges are for, in inference."""
        size, mean, std = (self.images[name] for name in IMAGES)
        config = dataclasses.replace(trained.config, val_image_size=size, mean=tuple(mean), std=tuple(std))
        return dataclasses.replace(trained, config=config)

    def graph(self, trained: Checkpoint) -> Graph:
        """The inference graph in INT8. Raises GraphError where the scales are of another network."""
        graph = models.create(trained.config.model, trained.num_classes).graph
        return pipeline.run(pipeline.quantised_passes("float32", self.scales, self.kept), graph)


def path_of(place: str) -> Path:
    """Where the network in INT8 belongs that is made of the weights at `place`. Raises TrainError for none."""
    path = Path(place)
    found = path if path.is_file() else checkpoint.find(place, prefer_best=True)
    return found.with_name(f"int8-{found.stem}.npz")


def images_of(config: Config) -> dict[str, Any]:
    """What of the preparation of images the ranges depend on."""
    values = {name: getattr(config, name) for name in IMAGES}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def checksum(trained: Checkpoint) -> int:
    """Of the weights and running statistics: CRC-32."""
    found = 0
    for arrays in (trained.params, trained.aux):
        for name in sorted(arrays):
            found = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), zlib.crc32(name.encode(), found))
    return found


def save(network: Int8Network, path: Path) -> None:
    """Write the file complete or not at all. Raises UserError."""
    meta = {"format": FORMAT, "version": VERSION, **vars(network), "kept": network.kept._asdict()}
    params = meta.pop("params")
    content = io.BytesIO()
    np.savez(content, meta=np.array(json.dumps(meta)), **{f"params/{name}": array for name, array in params.items()})
    files.write(path, content.getvalue())


def check_place(place: str, trained: Checkpoint, overwrite: bool) -> None:
    """Raise UserError where a network in INT8 cannot be written, or where these weights have one already that is not
    to be replaced."""
    path = path_of(place)
    files.check_place(path, "copy the checkpoint to another folder and give that")
    if overwrite:
        return
    try:
        found = load(place, trained)
    except TrainError:  # what cannot be used is no loss
        return
    raise TrainError(f"{path} is there already, calibrated ({found.calibration['method']}) on "
                     f"{found.calibration['images']} images of {found.images['inference_image_size']} pixels: give "
                     "--overwrite to replace it")


def load(place: str, trained: Checkpoint) -> Int8Network:
    """The network in INT8 that was made of these weights. Raises TrainError: there is none, it is damaged or of other
    weights."""
    path = path_of(place)
    again = f"run python -m train quantize --checkpoint {place}"
    try:
        with content_of_file(lambda reason: f"{path} is no complete network in INT8 ({reason}): {again}"):
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
    """Raise TrainError where options that were given have made a configuration for other images."""
    for name, value in images_of(config).items():
        if network.images[name] != value:
            option = option_name(OPTIONS.get(name, name))
            raise TrainError(f"{path_of(place)} was calibrated for {option} {_words(network.images[name])}, not "
                             f"{_words(value)}: leave {option} out, or run python -m train quantize --checkpoint "
                             f"{place} with it")


def executor_of(network: Int8Network, trained: Checkpoint, config: Config, placement: Placement) -> Executor:
    """What computes it, with the loss of this configuration: on a GPU the cuda executor, else the reference executor,
    with the same integers. Raises GraphError."""
    graph = models.create(trained.config.model, trained.num_classes, config.label_smoothing).graph
    shape = (config.batch_size, config.inference_image_size, config.inference_image_size, 3)
    shapes = {"data": shape, "softmax_label": shape[:1]}
    if placement.executor != "cuda":
        return QuantisedExecutor(graph, shapes, network.scales, network.kept, network.params)
    from graph_passes.executors.cuda.quantised_executor import QuantisedCudaExecutor

    return QuantisedCudaExecutor(graph, shapes, network.scales, network.kept, network.params, placement.device,
                                 config.deterministic)


def _check(network: Int8Network, trained: Checkpoint) -> None:
    """Raise ValueError where the arrays are not those of the graph."""
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
            raise ValueError(f"its {name} is {found.get(name)}, and {wanted.get(name)} in the network")


def _words(value: Any) -> str:
    """As on a command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
