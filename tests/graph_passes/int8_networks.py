"""INT8 networks for tests: calibrated on noise, with the values of their parameters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from graph_passes import Graph, Ref, passes, pipeline
from graph_passes.calibration import folded, observed
from graph_passes.executors import reference
from graph_passes.executors.cuda.kernels import quantised_conv, quantised_conv_stream
from graph_passes.executors.cuda.quantised import Quantisation
from graph_passes.passes.quantise import CLASSIFIER_KEPT, Kept, quantise_params
from train import models

Arrays = dict[str, np.ndarray]

# The kernels of an INT8 convolution by label, with their tiles if they have some.
TILES = {f"QuantisedConv {tile}": size for tile, size in quantised_conv.TILES.items()}
STREAMS = {f"QuantisedConvStream {tile}": size for tile, size in quantised_conv_stream.TILES.items()}
TAPS, SQUARES, DIRECT = "QuantisedConvTaps", "QuantisedConvSquares", "QuantisedConvolution"  # DIRECT: for all shapes
SUMS = tuple(f"QuantisedConvStreamSum {tile}" for tile in quantised_conv_stream.TILES)


@dataclass(frozen=True)
class Int8:
    """A network, its quantisation, and its calibration images, rounded to float16."""

    network: Graph
    scales: dict[str, float]
    kept: Kept
    params: Arrays
    images: np.ndarray  # (N, H, W, 3) float32

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"data": self.images.shape, "softmax_label": self.images.shape[:1]}

    @property
    def int8(self) -> Quantisation:
        """The quantisation in the form that the cuda executor takes."""
        return Quantisation(self.scales, self.kept, self.params)

    def expected(self, in_16_bits: Collection[str] = ()) -> dict[Ref, np.ndarray]:
        """All tensors of the INT8 graph for the images, by the reference's operators. Outputs of the nodes `in_16_bits`
        are rounded to float16 before they are read."""
        graph = pipeline.run(pipeline.quantised_passes("float32", self.scales, self.kept), self.network)
        given = self.params | {"data": self.images, "softmax_label": np.zeros(len(self.images))}
        values = {Ref(name): given[name] for name in graph.variables}
        for node in graph:
            if not node.is_variable:
                outputs = reference.evaluate(node, [values[ref] for ref in node.inputs])
                if node.name in in_16_bits:
                    outputs = [array.astype(np.float16).astype(np.float32) for array in outputs]
                values.update(zip(node.refs(), outputs, strict=False))
        return values


def quantised(name: str, images: int, size: int, rng: np.random.Generator, kept: Kept = CLASSIFIER_KEPT,
              classes: int = 24) -> Int8:
    """A network with random weights and running statistics."""
    made = models.create(name, classes)
    params, aux = made.initial_values(0, zero_init_residual=False)
    data = rng.standard_normal((images, size, size, 3)).astype(np.float16).astype(np.float32)
    fused = pipeline.run(pipeline.FUSED, made.graph)
    values = passes.fold_bn_params(fused, params, aux) | aux
    plain = folded(made.graph)
    found = reference.forward(plain, {Ref(each): (values | {"data": data, "softmax_label": np.zeros(images)})[each]
                                      for each in plain.variables}, training=False)
    scales = {each: float(np.abs(found[Ref(each)]).max()) / 127 or 1.0 for each in observed(plain)}
    listed = pipeline.quantised_passes("float32", scales, kept)
    before = pipeline.run({each: run for each, run in listed.items() if each != "quantise"}, made.graph)
    return Int8(made.graph, scales, kept, quantise_params(before, values, scales, kept), data)
