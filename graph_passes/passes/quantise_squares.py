"""The first convolution in INT8 reads squares of 2x2 pixels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from graph_passes.graph import Graph, Node
from graph_passes.operators import window
from graph_passes.operators.quantised import squares, weight_in_squares


def quantise_squares(graph: Graph) -> Graph:
    """Turn 2x2 pixels of images with 3 or 4 channels into channels, for a convolution at stride 2 that reads the
    images.

        before    images -> Quantise `q` (H, W, 3);  q -> QuantisedConvolution (7x7, stride 2, pad 3)
        after     images -> QuantiseSquares `q` (H / 2 + 3, W / 2 + 3, 16);  q -> QuantisedConvolution (4x4)

    Tensor cores need at least 16 channels. The sums are the same integers. The weight is rearranged, with zeros in
    between: `quantise_squares_params`.
    """
    changed: dict[str, Node] = {}
    for convolution in _convolutions(graph):
        quantise, size = graph[convolution.inputs[0].node], window(convolution)
        changed[quantise.name] = quantise.derive("QuantiseSquares", quantise.name, quantise.inputs,
                                                 kernel=size.kernel, pad=size.pad)
        kernel = tuple(squares(*of).window for of in zip(size.kernel, size.pad, strict=True))
        changed[convolution.name] = convolution.with_attrs(kernel=kernel, stride=(1, 1), pad=(0, 0))
    return graph.rewrite(lambda node: changed.get(node.name))


def quantise_squares_params(graph: Graph, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of the parameters of `quantise_squares(graph)`, from the parameters of `graph`."""
    changed = {node.inputs[1].node: window(node).pad for node in _convolutions(graph)}
    return {name: weight_in_squares(array, changed[name]) if name in changed else array
            for name, array in params.items()}


def _convolutions(graph: Graph) -> list[Node]:
    found = []
    for node in graph:
        if node.op == "QuantisedConvolution" and node["layout"] == "NHWC" and node["num_group"] == 1:
            quantise = graph.only_used_by_one(node.inputs[0], "Quantise")
            size = window(node)
            is_first = quantise is not None and graph[quantise.inputs[0].node].is_variable
            if is_first and size.stride == (2, 2) and size.dilate == (1, 1):
                found.append(node)
    return found
