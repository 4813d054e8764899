"""Recurrent layers on the GPU: every offered algorithm, in each precision, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_arrays import DTYPES, Device, relative_error, rounded

from graph_passes import VARIABLE, Graph, GraphError, Node, Ref, passes
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.function import DeviceFunction
from graph_passes.executors.cuda.toolchain import Toolchain, toolchain
from graph_passes.executors.reference import evaluate
from graph_passes.operators.rnn import ALGORITHMS, GATES
from graph_passes.pipeline import cover

pytestmark = pytest.mark.gpu

# Bound for the norm of the error relative to the norm, for any tensor. States, gates and the gradients between steps
# are stored in the dtype, and a gradient passes through up to 12 steps and two layers: a few roundings (2^-11, 2^-8,
# and for TF32's products 2^-11) add up. docs/cuda_executor.md has the measured maxima.
TOLERANCE = {"float32": 2e-6, "tf32": 2e-3, "float16": 4e-3, "bfloat16": 3e-2}
# Steps, sequences, features, hidden.
SIZES = {"odd": (7, 3, 5, 9), "aligned": (12, 16, 64, 128), "wide": (12, 72, 256, 256)}


@pytest.fixture(scope="module", params=["exact", "tf32"])
def tools(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolchain]:
    yield toolchain(Gpu(), tf32=request.param == "tf32", cache_folder=tmp_path_factory.mktemp("cache"))


def step(mode: str, hidden: int, num_layers: int, bidirectional: bool, algorithm: str) -> Graph:
    """A layer's forward pass with its last states, and its gradients."""
    names = ["data", "parameters", "state", *["state_cell"] * (mode == "lstm")]
    attrs = {"mode": mode, "state_size": hidden, "num_layers": num_layers, "bidirectional": bidirectional,
             "state_outputs": True, "algorithm": algorithm}
    inputs = tuple(map(Ref, names))
    forward = Node("RNNTrain", "rnn", inputs, attrs)
    reads = (Ref("head"), *inputs, Ref("rnn"), forward.output("reserve"))
    backward = Node("RNNBackward", "rnn_backward", reads, attrs)
    variables = [Node(VARIABLE, name) for name in (*names, "head")]
    return Graph([*variables, forward, backward], [*forward.refs()[:-1], *backward.refs()])


def shapes_of(graph: Graph, size: str) -> dict[str, tuple[int, ...]]:
    steps, sequences, features, hidden = SIZES[size]
    both = 2 if graph["rnn"]["bidirectional"] else 1
    return {"data": (steps, sequences, features), "head": (steps, sequences, both * hidden)}


def run_on_gpu(tools: Toolchain, graph: Graph, shapes: dict[str, tuple[int, ...]], dtype: str,
               values: dict[str, np.ndarray], covers: bool = False
               ) -> tuple[list[np.ndarray], DeviceFunction]:
    """The graph's outputs from the second of two runs; before it, all memory was poisoned."""
    device = Device(tools.gpu, tools.kernels)
    marked = passes.precision(graph, dtype)
    function = DeviceFunction(lambda price: cover(marked, price) if covers else marked, shapes, dtype, tools)
    for buffer in function.outputs:
        tools.gpu.fill(buffer.address, 0xFF, buffer.num_bytes)
    for name, buffer in function.variables.items():
        tools.gpu.copy(buffer.address, device.put(values[name], dtype), buffer.num_bytes)
    for _ in range(2):
        function()
    return [device.get(buffer.address, buffer.shape, dtype) for buffer in function.outputs], function


def random_values(graph: Graph, shapes: dict[str, tuple[int, ...]], dtype: str,
                  rng: np.random.Generator) -> dict[str, np.ndarray]:
    sizes, hidden = graph.infer_shapes(shapes), graph["rnn"]["state_size"]
    scale = {"parameters": hidden**-0.5}
    return {name: rounded(rng.uniform(-1, 1, sizes[Ref(name)]) * scale.get(name, 1.0), dtype)
            for name in graph.variables}


def keep_off_the_kink(graph: Graph, values: dict[str, np.ndarray], dtype: str) -> None:
    """Use smaller weights and larger biases, so that no sum comes near 0. Among 50,000 units some always would.
    Rounding would then decide whether ReLU lets a gradient through, which exceeds TOLERANCE for any implementation."""
    layer = graph["rnn"]
    biases = 2 * layer["state_size"] * layer["num_layers"] * (2 if layer["bidirectional"] else 1)
    values["parameters"] = rounded(values["parameters"] / 8, dtype)
    values["parameters"][-biases:] += 0.5
    values["parameters"] = rounded(values["parameters"], dtype)


def in_numpy(graph: Graph, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    tensors: dict[Ref, Any] = {Ref(name): value for name, value in values.items()}
    for node in graph:
        if not node.is_variable:
            tensors.update(zip(node.refs(), evaluate(node, [tensors[ref] for ref in node.inputs]), strict=True))
    return [tensors[ref] for ref in graph.outputs]


def check(got: list[np.ndarray], wanted: list[np.ndarray], graph: Graph, tolerance: float) -> None:
    errors = {f"{ref.node}:{ref.output}": relative_error(ours, theirs)
              for ref, ours, theirs in zip(graph.outputs, got, wanted, strict=True)}
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_layers, bidirectional", [(1, False), (2, True)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_numpy(tools: Toolchain, dtype: str, mode: str, algorithm: str, num_layers: int, bidirectional: bool,
                       size: str, request: pytest.FixtureRequest, rng: np.random.Generator) -> None:
    """The standard algorithm exists for every layer; if cuDNN can run another one, it must be right, too."""
    is_tf32 = request.node.callspec.params["tools"] == "tf32"
    if is_tf32 and dtype != "float32":
        pytest.skip("16-bit layers know no TF32")
    graph = step(mode, SIZES[size][3], num_layers, bidirectional, algorithm)
    shapes = shapes_of(graph, size)
    values = random_values(graph, shapes, dtype, rng)
    few_near_the_kink = size == "odd" and dtype == "float32" and not is_tf32
    if mode == "rnn_relu" and not few_near_the_kink:
        keep_off_the_kink(graph, values, dtype)
    try:
        got, _ = run_on_gpu(tools, graph, shapes, dtype, values)
    except GraphError as error:
        if algorithm == "standard":
            raise
        pytest.skip(str(error))
    wanted = in_numpy(graph, values)
    assert mode != "rnn_relu" or few_near_the_kink or wanted[0].min() > 0.1
    check(got, wanted, graph, TOLERANCE["tf32" if is_tf32 else dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fastest_is_chosen_and_right(tools: Toolchain, dtype: str, request: pytest.FixtureRequest,
                                         rng: np.random.Generator) -> None:
    graph = step("lstm", 128, 1, False, "standard")
    shapes = shapes_of(graph, "aligned")
    values = random_values(graph, shapes, dtype, rng)
    got, function = run_on_gpu(tools, graph, shapes, dtype, values, covers=True)
    check(got, in_numpy(graph, values), graph, max(TOLERANCE[dtype], TOLERANCE["tf32"]))
    if dtype == "float32" and request.node.callspec.params["tools"] == "exact":
        assert not function.choices, "standard alone is exact"
        return
    algorithm = function.graph["rnn"]["algorithm"]
    assert algorithm == function.graph["rnn_backward"]["algorithm"]
    assert [choice.kernel for choice in function.choices] == [f"RNNTrain {algorithm}", f"RNNBackward {algorithm}"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_inputs_give_equal_bits(tools: Toolchain, dtype: str, rng: np.random.Generator) -> None:
    """With the algorithm that --deterministic runs use, in sizes whose sums cuDNN may split."""
    graph = step("lstm", 512, 1, False, "standard")
    shapes = {"data": (20, 64, 512), "head": (20, 64, 512)}
    values = random_values(graph, shapes, dtype, rng)
    first, function = run_on_gpu(tools, graph, shapes, dtype, values)
    device = Device(tools.gpu, tools.kernels)
    for _ in range(5):
        function()
        again = [device.get(buffer.address, buffer.shape, dtype) for buffer in function.outputs]
        assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
