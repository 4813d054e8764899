"""Kernels of single operators, each by its own launch, against the operator's NumPy in float64; on a GPU, and on the
emulated one: random values, odd shapes, the ends of a dtype's range, NaN and infinity, poisoned outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import COMPILER, EmulatedGpu
from emulation.steps import emulate_builders, emulated_toolchain
from gpu_arrays import DTYPES, PRECISION, Device, rounded

from graph_passes import Graph, Node, Ref, passes
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.function import DeviceFunction
from graph_passes.executors.cuda.toolchain import Toolchain, toolchain
from graph_passes.executors.reference import evaluate
from graph_passes.graph import VARIABLE
from graph_passes.operators import OPERATORS as TABLE
from graph_passes.operators.activations import FUNCTIONS
from graph_passes.passes import tensor_dtypes

Values = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
HERE = [pytest.param("emulation", marks=pytest.mark.skipif(not COMPILER, reason="there is no g++")),
        pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=HERE)
def tools(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int) -> Toolchain:
    if request.param == "gpu":
        return toolchain(Gpu(), tf32=False, cache_folder=tmp_path)
    emulate_builders(monkeypatch)
    return emulated_toolchain(EmulatedGpu(seed))


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(0, 1, shape)


def large(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Up to the end of float16, with 0, infinity and NaN."""
    values = rng.choice([-1, 1], shape) * 10.0 ** rng.uniform(-8, 4.8, shape)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, -65504, 6e-8]
    return np.where(rng.random(shape) < 0.2, rng.choice(special, shape), values)


def finite(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.nan_to_num(large(rng, shape), nan=1.0, posinf=65504, neginf=-65504)


FUNCTION_OF = {  # an operator and its attributes for each function of single elements
    **{name: (name, {}) for name in ("relu", "sigmoid", "tanh", "softsign")},
    "softrelu": ("Activation", {"act_type": "softrelu"}),
    "leaky": ("LeakyReLU", {"act_type": "leaky", "slope": 0.25}),
    "elu": ("LeakyReLU", {"act_type": "elu", "slope": 0.7}),
    "selu": ("LeakyReLU", {"act_type": "selu"}), "gelu": ("LeakyReLU", {"act_type": "gelu"}),
    "clip": ("clip", {"a_min": -0.5, "a_max": 6.0}), "hard_sigmoid": ("hard_sigmoid", {}),
}
CONSTANTS = {"leaky": (0.25, 0), "elu": (0.7, 0), "clip": (-0.5, 6), "hard_sigmoid": (0.2, 0.5)}
ODD, IMAGES = (3, 5, 7, 11), (3, 7, 5, 24)
POINTWISE = (
    *((op, attrs, ODD) for op, attrs in FUNCTION_OF.values()),
    *(("ActivationBackward", dict(zip(("function", "a", "b"), (name, *CONSTANTS.get(name, (0, 0))), strict=True)),
       ODD, ODD) for name in FUNCTIONS),
    ("ReluBackward", {"single_grad": True}, ODD, ODD), ("ReluBackward", {"single_grad": False}, ODD, ODD, ODD),
    ("AddRelu", {}, ODD, ODD), ("elemwise_mul", {}, ODD, ODD), ("ProductBackward", {}, ODD, ODD, ODD),
    ("_plus_scalar", {"scalar": 3.0}, ODD), ("_minus_scalar", {"scalar": 0.5}, ODD),
    ("_mul_scalar", {"scalar": -2.5}, ODD),
    ("_div_scalar", {"scalar": 6.0}, ODD),
)
BROADCASTS = (
    ("broadcast_mul", {}, IMAGES, (3, 1, 1, 24)), ("broadcast_mul", {}, (3, 1, 1, 24), IMAGES),
    ("broadcast_add", {}, IMAGES, (3, 1, 1, 24)), ("broadcast_add", {}, IMAGES, IMAGES),
    ("ProductBackward", {}, IMAGES, IMAGES, (3, 1, 1, 24)), ("ProductBackward", {}, IMAGES, (3, 1, 1, 24), IMAGES),
    ("ProductBackward", {}, (2, 23, 17, 8), (2, 1, 1, 8), (2, 23, 17, 8)),
    ("SumTo", {"shape": (3, 1, 1, 24)}, IMAGES), ("SumTo", {"shape": (1, 1, 1, 8)}, (1, 41, 13, 8)),
    ("mean", {"axis": (1, 2), "keepdims": True}, IMAGES),
    ("MeanBackward", {"axis": (1, 2), "keepdims": True, "data_shape": IMAGES}, (3, 1, 1, 24)),
)
# Channels that are no multiple of 8: each tensor is copied into another form before, and back.
ODD_IMAGES = (3, 5, 4, 11)
ODD_CHANNELS = (
    ("broadcast_mul", {}, ODD_IMAGES, (3, 1, 1, 11)), ("broadcast_add", {}, (3, 1, 1, 11), ODD_IMAGES),
    ("ProductBackward", {}, ODD_IMAGES, ODD_IMAGES, (3, 1, 1, 11)), ("SumTo", {"shape": (3, 1, 1, 11)}, ODD_IMAGES),
    ("mean", {"axis": (1, 2), "keepdims": False}, ODD_IMAGES),
    ("MeanBackward", {"axis": (1, 2), "keepdims": True, "data_shape": ODD_IMAGES}, (3, 1, 1, 11)),
    *(("Pooling", {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 0), "pool_type": kind, "layout": "NHWC"}, ODD_IMAGES)
      for kind in ("max", "avg")),
    ("Pooling", {"kernel": (1, 1), "global_pool": True, "pool_type": "avg", "layout": "NHWC"}, ODD_IMAGES),
    ("BiasRelu", {}, ODD_IMAGES, (11,)), ("BiasAddRelu", {}, (5, 11), (11,), (5, 11)),
    ("ScaleChannels", {}, ODD_IMAGES, (11,)), ("ScaleChannels", {}, IMAGES, (24,)),
)
LAYER_NORMS = tuple(
    (op, {"axis": -1, "eps": 1e-6}, *shapes) for channels in (1, 7, 40, 100) for rows in (1, 13) for op, shapes in (
        ("LayerNorm", ((rows, channels), (channels,), (channels,))),
        ("LayerNormBackward", ((rows, channels), (rows, channels), (channels,)))))
OPERATORS = (*POINTWISE, *BROADCASTS, *LAYER_NORMS)


def check_operator(tools: Toolchain, dtype: str, op: str, attrs: dict[str, Any], shapes: Sequence[tuple[int, ...]],
                   rng: np.random.Generator, values: Values, terms: float | str = 0.0) -> None:
    """Compute it on the device, twice, and in float64. `terms`: the size of what cancels or is summed, or the name of
    the input that has it; an error of a rounding of this is right too."""
    roles = TABLE[op].input_names(Node(op, "node", (), attrs))[:len(shapes)]
    names = ["data", *(f"other_{role}" for role in roles[1:])]  # a device function has an input `data`
    node = Node(op, "node", tuple(map(Ref, names)), attrs)
    graph = Graph([*(Node(VARIABLE, name) for name in names), node], node.refs())
    marked = passes.precision(graph, dtype)
    given, dtypes = dict(zip(names, shapes, strict=True)), tensor_dtypes(marked)
    function = DeviceFunction(lambda price: marked, given, dtype, tools)
    device = Device(tools.gpu, tools.kernels)
    arrays = {name: rounded(values(rng, given[name]), dtypes[Ref(name)]) for name in names}
    for name, buffer in function.variables.items():
        device.set(buffer.address, arrays[name], dtypes[Ref(name)])
    for buffer in function.outputs:
        tools.gpu.fill(buffer.address, 0xFF, buffer.num_bytes)
    for _ in range(2):
        function()
    with np.errstate(all="ignore"):
        size = np.abs(arrays[terms]) if isinstance(terms, str) else terms
        wanted = evaluate(marked["node"], [arrays[name] for name in names])
        for ref, buffer, exact in zip(node.refs(), function.outputs, wanted, strict=True):
            got = device.get(buffer.address, buffer.shape, dtypes[ref])
            check_close(got, exact.reshape(got.shape), dtypes[ref], size, f"{op} {attrs} {ref}")
    function.close()


def check_close(got: np.ndarray, exact: np.ndarray, dtype: str, terms: float | np.ndarray, what: str) -> None:
    """Each element: a rounding of the stored type, and some of fp32, in which it is computed."""
    stored = rounded(exact, dtype)
    with np.errstate(all="ignore"):
        # 2^-24 is float16's smallest number; in fp32 the functions of CUDA and of the C library differ in the last bits
        limit = PRECISION[dtype] * np.abs(stored) + 2.0**-20 * (np.abs(exact) + terms) + (2.0**-24 if dtype == "float16"
                                                                                        else 1e-37)
        is_right = (got == stored) | (np.isnan(got) & np.isnan(stored)) | (np.abs(got - exact) <= limit)
        at_the_end = np.isinf(got) & (np.abs(exact) > (65503 if dtype == "float16" else 3e38))
    wrong = ~(is_right | (at_the_end & (np.sign(got) == np.sign(exact))))
    assert not wrong.any(), f"{what}: {got[wrong][:4]} for {exact[wrong][:4]}, {wrong.sum()} of {wrong.size}"


def cases(operators: Sequence[Any]) -> Iterator[Any]:
    for op, attrs, *shapes in operators:
        name = attrs.get("function", attrs.get("act_type", ""))
        yield pytest.param(op, attrs, shapes, id=f"{op}{name}-{'x'.join(map(str, shapes[0]))}")


@pytest.mark.long(but=["emulation-*-large-float16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [normal, large], ids=["normal", "large"])
@pytest.mark.parametrize("op, attrs, shapes", cases(POINTWISE))
def test_pointwise(tools: Toolchain, dtype: str, values: Values, op: str, attrs: dict[str, Any],
                   shapes: list[tuple[int, ...]], rng: np.random.Generator) -> None:
    if op.endswith("Backward") and values is large:
        values = finite  # a step whose gradients are not finite is skipped
    check_operator(tools, dtype, op, attrs, shapes, rng, values, terms="data" if op == "ActivationBackward" else 1.0)


@pytest.mark.long(but=["emulation-*-float16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, attrs, shapes", cases((*BROADCASTS, *ODD_CHANNELS)))
def test_broadcasts(tools: Toolchain, dtype: str, op: str, attrs: dict[str, Any], shapes: list[tuple[int, ...]],
                    rng: np.random.Generator) -> None:
    pixels = max(np.prod(shape[1:3]) for shape in shapes)
    check_operator(tools, dtype, op, attrs, shapes, rng, normal, terms=float(pixels))
    if op.startswith("broadcast"):
        check_operator(tools, dtype, op, attrs, shapes, rng, large)


@pytest.mark.long(but=["emulation-*-13x40-300-2-float16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean, size", [(0, 1), (300, 2), (0, 1e4), (0, 1e-3)])
@pytest.mark.parametrize("op, attrs, shapes", cases(LAYER_NORMS))
def test_layer_norm(tools: Toolchain, dtype: str, mean: float, size: float, op: str, attrs: dict[str, Any],
                    shapes: list[tuple[int, ...]], rng: np.random.Generator) -> None:
    """Also far from 0, at the end of float16, and where eps decides; a single channel is its own mean."""
    means = iter([mean, 1] if op == "LayerNorm" else [0, mean, 1])  # of x and gamma, of dy, x and gamma

    def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(next(means, 0), size if len(shape) == 2 else 0.3, shape)

    # The mean of fp32 is a rounding off, of which 1 / deviation is at most 1000, by eps; a single channel has 0.
    deviation = size if shapes[0][1] > 1 else 0
    check_operator(tools, dtype, op, attrs, shapes, rng, values,
                   terms=(abs(mean) + size) * (1 + 1 / np.hypot(deviation, 1e-3)) * 13
                   * (1 + size if "Back" in op else 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["LayerNorm", "LayerNormBackward"])
def test_layer_norm_keeps_nan_in_its_row(tools: Toolchain, dtype: str, op: str, rng: np.random.Generator) -> None:
    def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        array = rng.normal(0, 1, shape)
        if len(shape) == 2:
            array[2, 3], array[4, 0] = np.nan, np.inf
        return array

    shapes = [(6, 24), (24,), (24,)] if op == "LayerNorm" else [(6, 24), (6, 24), (24,)]
    check_operator(tools, dtype, op, {"axis": -1, "eps": 1e-6}, shapes, rng, values, terms=10)


@pytest.mark.long(but=["emulation-float16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_channels(tools: Toolchain, dtype: str, rng: np.random.Generator) -> None:
    """Concat, slice_axis and its gradient, of any numbers of channels, by vectors and by elements."""
    for widths in ((8, 16, 24), (3, 5), (1, 8, 2), (16, 4)):
        total, ends = sum(widths), list(itertools.accumulate(widths, initial=0))
        check_operator(tools, dtype, "Concat", {"num_args": len(widths), "dim": 3},
                       [(2, 3, 5, width) for width in widths], rng, large)
        for begin, end in itertools.pairwise(ends):
            part = {"axis": 3, "begin": begin, "end": end if end < total else None}
            check_operator(tools, dtype, "slice_axis", part, [(2, 3, 5, total)], rng, large)
            check_operator(tools, dtype, "SliceAxisBackward", {**part, "data_shape": (2, 3, 5, total)},
                           [(2, 3, 5, end - begin)], rng, large)


@pytest.mark.long(but=["emulation-float16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_transposes(tools: Toolchain, dtype: str, rng: np.random.Generator) -> None:
    for shape in ((5, 3), (4, 1, 7), (3, 2, 5, 7)):
        for axes in itertools.permutations(range(len(shape))):
            check_operator(tools, dtype, "transpose", {"axes": axes}, [shape], rng, large)


@pytest.mark.long(but=["emulation-float16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reversed_dimensions(tools: Toolchain, dtype: str, rng: np.random.Generator) -> None:
    """Neighbouring elements move together where the last dimension stays: 1, 2, 4 or 8 of them."""
    for shape in ((5,), (4, 3), (2, 5, 3, 4), (3, 2, 5, 7), (2, 3, 4, 6), (1, 4, 3, 16)):
        for axes in ((-1,), tuple(range(len(shape))), (1, 2), (0,)):
            if max(axes) < len(shape):
                check_operator(tools, dtype, "reverse", {"axis": axes}, [shape], rng, large)
