"""The command quantize: convert a trained network to INT8, and show the loss of accuracy.

    python -m train quantize --checkpoint runs/my-run [--data PATH] [--calibration entropy] [--images 512]

The ranges come from training images that are prepared as for validation. The command writes int8-<checkpoint>.npz
beside the checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from common.mxnet_compat import mx
from common.phases import CALIBRATION, phase
from graph_passes import Graph, Ref, passes, pipeline
from graph_passes.calibration import Calibration, folded, observed
from graph_passes.executors import reference
from graph_passes.executors.base import Executor, Metrics
from graph_passes.executors.mxnet import MXNetExecutor
from graph_passes.operators import LOSSES
from graph_passes.passes.quantise import CLASSIFIER_KEPT, Kept, in_floats, layers, quantise_params
from pipelines import Batch, Loader, LoaderConfig, open_chosen
from pipelines.sources import open_source
from train import models, weights
from train.build import build_executor, evaluated_images, open_split
from train.checkpoint import Checkpoint
from train.commands.session import name_images, of_network, prepare, shown_skipped
from train.config import Config, configure
from train.devices import Placement
from train.errors import TrainError
from train.options.commands import QuantizeOptions
from train.processes.distributed import Workers
from train.processes.signals import ending_with
from train.recording.metrics import TRAINING_IMAGES, tells_top5
from train.validation import printed_progress, validate
from train.weights import int8_file
from train.weights.int8_file import Int8Network, executor_of

CPU = Placement("mxnet", "cpu(0)", "")
MIN_IMAGES = 16  # with fewer images, single images would determine the ranges
# A batch has at most 2^20 pixels and at most 64 images, because all tensors of a batch are in memory at once.
_BATCH_PIXELS, _LARGEST_BATCH = 2**20, 64
NOISE_IMAGES = 4  # images for calibrating an untrained network
MUCH = 0.01  # a loss of top-1 above this is too large for INT8

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class LayerError:
    """The error of a layer in INT8, as signal-to-noise ratios in dB. With 20 dB more, the noise is a tenth."""

    name: str
    limit: float  # the output's largest representable absolute value; 0 for a float output
    weight_db: float  # error of the layer's weights alone
    output_db: float  # error of the output for images, including the noise of all earlier layers


def main(values: Mapping[str, Any]) -> None:
    """Quantise a trained network. Raises UserError and StoppedBySignal."""
    options = QuantizeOptions(**values)
    if not options.checkpoint:
        raise TrainError("quantize needs trained weights: give --checkpoint with a run folder, a checkpoint or a file "
                         "of weights")
    if options.images < MIN_IMAGES:
        raise TrainError(f"--images {options.images} is too few to calibrate on: give {MIN_IMAGES} or more, some "
                         "hundreds are good")
    with ending_with("stopped: nothing was written, and the same command begins anew"):
        _quantize(options, values)


def _quantize(options: QuantizeOptions, values: Mapping[str, Any]) -> None:
    trained, workers = weights.load(options.checkpoint), Workers()
    int8_file.check_place(options.checkpoint, trained, options.overwrite)
    config = of_network(configure(values, trained.config), values, trained)
    size = config.inference_image_size
    usual = max(1, min(_LARGEST_BATCH, _BATCH_PIXELS // size**2))
    batch_size = min(values.get("batch_size", usual), options.images)
    config = replace(config, batch_size=batch_size, cache=0, device="cpu", executor="mxnet", dtype="auto")
    prepare(config, workers)
    loader = open_split(config, "val", CPU, workers, trained.classes, f"the network of {options.checkpoint}")
    source = replace(loader.config, split="train")
    chosen = choose(source, values.get("images"), config.seed)
    kept = Kept(options.float_first, not options.int8_classifier)
    fewer = f" (all there are, and fewer than {options.images})" if len(chosen) < options.images else ""
    print(f"calibrating ({options.calibration}) on {len(chosen)} training images of {size} pixels{fewer} ...",
          flush=True)
    with open_chosen(source, chosen) as calibration, phase(CALIBRATION):
        network, errors = quantised(trained, config, iter(calibration), options.calibration, kept)
        name_images(calibration, workers)
    if (left := network.calibration["images"]) < MIN_IMAGES:
        raise TrainError(f"only {left} of the {len(chosen)} training images can be decoded, too few to calibrate on: "
                         f"replace the skipped images, or give data with {MIN_IMAGES} or more images that can be "
                         "decoded")
    graph = network.graph(trained)
    _print(errors, graph)
    exact = build_executor(config, trained.num_classes, size, CPU, trained)
    images = TRAINING_IMAGES if evaluated_images(config) == TRAINING_IMAGES else "validation images"
    accuracy = {}
    with loader:
        for precision, executor in (("float32", exact), ("int8", executor_of(network, trained, config, CPU))):
            sums = _validated(executor, loader, workers)
            accuracy[precision] = sums.top1 / sums.count
            top5 = f", top-5 {sums.top5 / sums.count:.2%}" * tells_top5(trained.num_classes)
            print(f"{precision}: loss {sums.loss_sum / sums.count:.4f}, top-1 {accuracy[precision]:.2%}{top5} on "
                  f"{sums.count:.0f} {images}{shown_skipped(loader.num_skipped)}", flush=True)
    name_images(loader, workers)
    lost = accuracy["float32"] - accuracy["int8"]
    if lost > MUCH:
        others = " or --float-first" * (not kept.first) + " or no --int8-classifier" * (not kept.classifier)
        print(f"INT8 loses {100 * lost:.1f} points of top-1: try another --calibration or more --images{others}",
              file=sys.stderr)
    path = int8_file.path_of(options.checkpoint)
    int8_file.save(replace(network, accuracy=accuracy), path)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {sum(1 for _ in layers(graph))} layers in INT8")


def choose(config: LoaderConfig, count: int | None, seed: int) -> list[int]:
    """Choose `count` random training images, by the seed. `count` None: the default number, or all images if there are
    fewer.

    Raises DataError, and TrainError if there are fewer than `count` or MIN_IMAGES.
    """
    total = len(open_source(config.data, config.split, **config.reading))
    if total < MIN_IMAGES:
        raise TrainError(f"{config.data} has {total} training images, too few to calibrate on: give data with "
                         f"{MIN_IMAGES} or more")
    count = count or min(QuantizeOptions.images, total)
    if total < count:
        raise TrainError(f"{config.data} has {total} training images, too few for --images {count}: give --images "
                         f"{total}")
    return sorted(np.random.default_rng(seed).choice(total, count, replace=False).tolist())


def quantised(trained: Checkpoint, config: Config, batches: Iterator[Batch], method: str,
              kept: Kept) -> tuple[Int8Network, list[LayerError]]:
    """Quantise a trained network, calibrated on these batches. Returns the INT8 network, and the errors of its layers
    on the first batch. Raises UserError.
    """
    graph = models.create(trained.config.model, trained.num_classes).graph
    tensors_of = _Tensors(graph, trained, config)
    calibration, first, count = Calibration(tensors_of.names), None, 0
    for batch in batches:
        tensors = tensors_of(batch)
        calibration.add(tensors)
        first = first or tensors
        count += batch.num_valid
    assert first  # there are at least MIN_IMAGES images
    scales = calibration.scales(method)
    listed = pipeline.quantised_passes("float32", scales, kept)
    before = pipeline.run({name: each for name, each in listed.items() if name != "quantise"}, graph)
    network = Int8Network(
        network=trained.network, checksum=int8_file.checksum(trained), scales=scales, kept=kept,
        calibration={"method": method, "images": count, "data": config.data}, images=int8_file.images_of(config),
        params=quantise_params(before, tensors_of.params, scales, kept),
    )
    return network, _errors(network, network.graph(trained), tensors_of.params, first)


def untrained(model: str, num_classes: int, image_size: int) -> tuple[Checkpoint, Int8Network]:
    """A network with initial values and its INT8 version, calibrated on noise of this image size. Only for measurements
    of speed, which do not depend on the values.
    """
    params, aux = models.create(model, num_classes).initial_values(seed=0, zero_init_residual=False)
    config = Config(model=model, image_size=image_size, batch_size=NOISE_IMAGES)
    trained = Checkpoint(params=params, aux=aux, state={}, config=config,
                         class_names=[str(label) for label in range(num_classes)])
    shape = (NOISE_IMAGES, image_size, image_size, 3)
    images = np.random.default_rng(0).standard_normal(shape, np.float32)
    batch = Batch(mx.nd.array(images), mx.nd.zeros(NOISE_IMAGES), NOISE_IMAGES)
    network, _ = quantised(trained, config, iter([batch]), "max", CLASSIFIER_KEPT)
    return trained, network


class _Tensors:
    """Computes, for a batch of images, the float values of all tensors that may become int8, and of the classifiers'
    outputs.
    """

    def __init__(self, graph: Graph, trained: Checkpoint, config: Config) -> None:
        fused = pipeline.run(pipeline.FUSED, graph)
        self.params = passes.fold_bn_params(fused, trained.params, trained.aux) | trained.aux
        inference = folded(graph)
        self.names = observed(inference)
        self._given = [*self.names, *(node.name for node in inference if node.op == "FullyConnected")]
        shape = (config.batch_size, config.inference_image_size, config.inference_image_size, 3)
        self._executor = MXNetExecutor(Graph(inference, [Ref(name) for name in self._given]), {"data": shape})
        own, aux = self._executor.params, self._executor.aux
        self._executor.set_params({name: self.params[name] for name in own}, {name: self.params[name] for name in aux})

    def __call__(self, batch: Batch) -> Tensors:
        found = self._executor.forward_all(batch.data)
        return {name: array[: batch.num_valid] for name, array in zip(self._given, found, strict=True)}


def _errors(network: Int8Network, graph: Graph, params: Mapping[str, np.ndarray], exact: Tensors) -> list[LayerError]:
    """The error of each layer. `exact`: the float values of the layers' tensors for some images."""
    variables = {**network.params, "data": exact["data"], "softmax_label": np.zeros(len(exact["data"]))}
    found = reference.forward(graph, {Ref(name): variables[name] for name in graph.variables}, training=False)
    errors = []
    for layer in layers(graph):
        name, integers = layer.node.name, network.params[layer.weight]
        scale = layer.node["scale"]
        # The factors of the multiplier, in the order of `quantise_params`.
        weight_scale = network.params[layer.multiplier].astype(np.float64) * scale / layer.data_scale
        weight = integers * weight_scale.reshape(-1, *(1,) * (integers.ndim - 1))
        output = found[Ref(name)]
        errors.append(LayerError(
            name, limit=127 * scale if output.dtype == np.int8 else 0.0,
            weight_db=_decibel(params[layer.weight], weight),
            output_db=_decibel(exact[name], output * scale),
        ))
    return errors


def _decibel(exact: np.ndarray, found: np.ndarray) -> float:
    """Signal-to-noise ratio in dB; inf without noise."""
    exact = exact.astype(np.float64)
    signal, noise = (exact**2).sum(), ((found - exact) ** 2).sum()
    return float(10 * np.log10(signal / noise)) if noise and signal else float("inf")


def _validated(executor: Executor, loader: Loader, workers: Workers) -> Metrics:
    found = validate(executor, loader, workers, progress=printed_progress(loader.num_batches))
    assert found  # validation is never stopped early here
    return found.metrics


def _print(errors: list[LayerError], graph: Graph) -> None:
    table = Table("layer", "largest value", "weights, dB", "output, dB", box=None, pad_edge=False,
                  title="signal to noise of INT8; outputs with the noise of all layers before", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in errors:
        limit = f"{each.limit:.4g}" if each.limit else "float32"
        table.add_row(each.name, limit, f"{each.weight_db:.1f}", f"{each.output_db:.1f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    kept = [f"{node.name} ({node.op})" for node in in_floats(graph) if node.op not in ("Flatten", *LOSSES)]
    print(f"in float32: {', '.join(kept) or 'nothing'}, and the loss", flush=True)
