"""Dropout (Srivastava et al., JMLR 15, 2014) of single elements, or as stochastic depth (Huang et al.,
arXiv:1603.09382) of whole images: a fraction `p` becomes 0, and the rest is divided by 1 - p, so that means stay.

A network has MXNet's `Dropout`. In a training step the pass `draw_masks` has replaced it by operators that take their
random bits from a variable, the seed. The seed has two words of 32 bits, the lower word first. So the bits are the same
on every executor. In inference nothing is dropped.

The bits come from Philox4x32-10 (Salmon et al., 'Parallel random numbers: as easy as 1, 2, 3', SC'11): the first word
for the counter (element, number of the Dropout, 0, 0) and the key `seed`. An element is kept if that word is at least p
* 2^32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from graph_passes.operators.base import (
    FALSE,
    OPTIONAL_SIZES,
    TRUE,
    Array,
    Attribute,
    Gradient,
    NodeView,
    Operator,
    Ref,
    Shape,
    Shapes,
    integers,
    known,
    one_of,
)
from graph_passes.operators.elementwise import elementwise

SEED = "dropout_seed"  # name of the variable
PER_IMAGE, PER_BATCH = (1, 2, 3), (0, 1, 2, 3)  # axes along which the mask of MXNet's Dropout is constant

# --- random bits ---

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Sequence[Array], key: Iterable[int]) -> list[Array]:
    """Philox4x32-10: four arrays of random words, uint32, for counters of four words and a key of two words."""
    words = [np.asarray(word, np.uint64) for word in counter]
    keys = [int(word) for word in key]
    for _ in range(_ROUNDS):
        products = [word * np.uint64(factor) for word, factor in zip(words[::2], _MULTIPLIERS, strict=True)]
        words = [products[1] >> _HALF ^ words[1] ^ np.uint64(keys[0]), products[1] & _LOW,
                 products[0] >> _HALF ^ words[3] ^ np.uint64(keys[1]), products[0] & _LOW]
        keys = [(word + step) % 2**32 for word, step in zip(keys, _KEY_STEPS, strict=True)]
    return [word.astype(np.uint32) for word in words]


def threshold(p: float) -> int:
    """The threshold for random words; an element with a smaller word is dropped."""
    return min(round(p * 2**32), 2**32 - 1)


def kept_scale(p: float) -> float:
    """The factor of kept elements, an fp32 number."""
    return float(np.float32(1 / (1 - p)))


def words_of(seed: int) -> Array:
    """A 64-bit seed as (2,) uint32."""
    return np.array([seed % 2**32, seed >> 32], np.uint32)


def keep_factors(p: float, number: int, elements: Array, seed: Array) -> Array:
    """float32, 0 or 1 / (1 - p), for the elements with these indices."""
    words = philox([elements, np.full_like(elements, number), *[np.zeros_like(elements)] * 2], seed)[0]
    return np.where(words >= threshold(p), np.float32(kept_scale(p)), np.float32(0))


# --- shapes ---


def _factors(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    return [(2,)], [(len(node["rates"]), node["images"])]


def _images(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    return [data, known(node, shapes, 1)], [data]


def _elements(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    return [data, (2,)], [data]


def factors_shape(node: NodeView, shapes: Sequence[Shape | None], index: int) -> Shapes:
    """The shape of the factors, input number `index`, of a node that has factors."""
    return [] if node["no_factors"] else [known(node, shapes, index)]


# --- NumPy ---


def dropped(node: NodeView, x: Array, factors: Array | None) -> Array:
    """Each image of x times the image's factor in this node's row of `factors`; x itself if there are no factors."""
    if factors is None:
        return x
    return x * factors[node["row"]].astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))


def _compute_factors(node: NodeView, seed: Array) -> list[Array]:
    images = np.arange(node["images"], dtype=np.uint64) * (0 if node["per_batch"] else 1)
    return [np.stack([keep_factors(p, number, images, seed)
                      for p, number in zip(node["rates"], node["numbers"], strict=True)])]


def _compute_images(node: NodeView, x: Array, factors: Array) -> list[Array]:
    return [dropped(node, x, factors)]


def _compute_elements(node: NodeView, x: Array, seed: Array) -> list[Array]:
    elements = np.arange(x.size, dtype=np.uint64).reshape(x.shape)
    return [x * keep_factors(node["p"], node["number"], elements, seed).astype(x.dtype)]


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    return [NUMPY[node.op](node, dy, inputs[1])[0], None]


NUMPY = {"DropoutImages": _compute_images, "DropoutElements": _compute_elements}


# --- the gradient in the graph ---


def _gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    """The gradient is the same operator: a product with the same factors."""
    backward = node.replace(name=f"{node.name}_backward", inputs=(dy, node.inputs[1]))
    return Gradient([backward], {"data": Ref(backward.name)})


# --- the descriptions ---


def rate(value: Any) -> float:
    """Parse a dropout rate, from 0 to below 1."""
    if not 0 <= float(value) < 1:
        raise ValueError(value)
    return float(value)


def _rates(value: Any) -> tuple[float, ...]:
    return tuple(rate(each) for each in (value.strip("(),").split(",") if isinstance(value, str) else value))


ROW = {"row": Attribute(int, 0)}  # row of `factors`, which has one row for each Dropout of a kind
FACTORS = {"factors": "no_factors"}  # optional input of operators that include the product with factors


def dropping(inputs: Sequence[str]) -> dict[str, Attribute]:
    """The dropout attributes of an operator with these inputs."""
    return {**ROW, "no_factors": TRUE} if "factors" in inputs else {}


OPERATORS = (
    Operator("Dropout", ("data",), elementwise, lambda node, x: [x],
             {"p": Attribute(rate, 0.5), "axes": OPTIONAL_SIZES, "mode": Attribute(one_of("training"), "training")},
             in_place={"output": ("data",)}, numpy_gradient=lambda node, x, y, dy, training: [dy]),
    # Factors (Dropouts, images), each 0 or 1 / (1 - p). `per_batch`: one factor for all images.
    Operator("DropoutFactors", ("seed",), _factors, _compute_factors,
             {"rates": Attribute(_rates), "numbers": Attribute(integers), "images": Attribute(int), "per_batch": FALSE},
             ("factors",), forward="Dropout"),
    Operator("DropoutImages", ("data", "factors"), _images, _compute_images, ROW, in_place={"output": ("data",)},
             gradient=_gradient, numpy_gradient=_numpy_gradient, forward="Dropout",
             body=lambda b: [b.dropped(b["data"])]),
    Operator("DropoutElements", ("data", "seed"), _elements, _compute_elements,
             {"p": Attribute(rate), "number": Attribute(int)}, in_place={"output": ("data",)}, gradient=_gradient,
             numpy_gradient=_numpy_gradient, forward="Dropout"),
)
