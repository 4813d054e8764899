"""Dropout: factors for whole images, and the products with these factors. For Dropouts of single elements, one kernel
draws and multiplies.
"""

from __future__ import annotations

import ctypes
from typing import Any

from graph_passes.executors.cuda.builder import Builder, Launches, no_lowering, padded_rows, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import count, threads
from graph_passes.executors.cuda.kernels.pointwise import whole_vectors
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.graph import Node
from graph_passes.operators.dropout import kept_scale, threshold

_CUDA = Declarations("dropout.cu")
MAX_DROPOUTS = _CUDA.value("MAX_DROPOUTS")


class Rates(ctypes.Structure):
    """`Rates` of dropout.cu."""

    _fields_ = _CUDA.fields("Rates")


def factors(builder: Builder, node: Node) -> None:
    """Launch the factors of all images in all Dropouts, in one launch."""
    rates, result = node["rates"], builder.output(node)
    require(len(rates) <= MAX_DROPOUTS, node, f"is one of {len(rates)} that drop images: use {MAX_DROPOUTS} at most")
    given = Rates()
    for row, (rate, number) in enumerate(zip(rates, node["numbers"], strict=True)):
        given.threshold[row], given.scale[row], given.number[row] = threshold(rate), kept_scale(rate), number
    builder.launch(node, "dropout.cu", "dropout_factors", *threads(len(rates) * node["images"]),
                   In(builder.input(node, "seed")), Out(result), given, count(len(rates)), count(node["images"]),
                   ctypes.c_bool(node["per_batch"]))


def drops(node: Node) -> bool:
    """Whether an operator includes the product with stochastic-depth factors."""
    return not node.get("no_factors", True)


def factors_of(builder: Builder, node: Node, rows: int) -> tuple[Any, Any, Any]:
    """Arguments of kernels that include the product with stochastic-depth factors: all factors, the index of the first
    image's factor, and the number of `rows` per image. A null pointer for a node without factors.
    """
    if not drops(node):
        return In(None), count(0), count(1)
    given = builder.input(node, "factors")
    images = given.shape[1]
    return In(given), count(node["row"] * images), count(rows // images)


def images(builder: Builder, node: Node) -> None:
    """Launch a product that no pass has fused."""
    x, y, given = builder.input(node, "data"), builder.output(node), builder.input(node, "factors")
    vectors, num_images = builder.vectors(y), given.shape[1]
    builder.launch(node, "dropout.cu", builder.kernel("dropout_images"), *threads(vectors), In(x), In(given),
                   Out(y, over=x), count(node["row"] * num_images), count(vectors), count(vectors // num_images))


def elements(builder: Builder, node: Node) -> None:
    x, y = builder.input(node, "data"), builder.output(node)
    vectors = whole_vectors(y)
    builder.launch(node, "dropout.cu", builder.kernel("dropout_elements"), *threads(vectors), In(x),
                   In(builder.input(node, "seed")), Out(y, over=x), ctypes.c_uint32(threshold(node["p"])),
                   ctypes.c_float(kept_scale(node["p"])), count(node["number"]), count(vectors))


def refuse(builder: Builder, node: Node) -> None:
    """Refuse a Dropout that `draw_masks` has not replaced."""
    raise no_lowering(node)


LAUNCHES: Launches = {
    "Dropout": refuse,
    "DropoutFactors": factors,
    "DropoutImages": padded_rows(images),
    "DropoutElements": elements,
}
