"""Bodies: a kernel's operator computes what its primitives compute. Also checks that a kernel, its operator and its
files have one name."""

from __future__ import annotations

import re
from importlib import import_module

import pytest
from step_networks import bottlenecks, fused, own_forms

from graph_passes import Graph, GraphError, Node, Ref, pipeline
from graph_passes.choice import fewest
from graph_passes.executors.cuda.kernel_library import SOURCES
from graph_passes.executors.cuda.kernels import LAUNCHES, OPERATORS
from graph_passes.operators import OPERATORS as DESCRIBED
from graph_passes.operators import infer_node_shapes
from graph_passes.operators.base import by_body

FILES = {path.stem: operators for path in sorted(SOURCES.glob("[a-z]*.py"))
         if (operators := getattr(import_module(f"graph_passes.executors.cuda.kernels.{path.stem}"), "OPERATORS", ()))}
PARAMETERS = re.compile(r"(gamma|beta|weight|bias|moving_mean|moving_var)(_\d)?")
CONVOLUTION = {"kernel": (1, 1), "num_filter": 8, "layout": "NHWC"}


def words(camel_case: str) -> list[str]:
    """NormConv1x1 -> norm, conv1x1."""
    return re.findall(r"[A-Z][a-z]*(?:\d+x\d+)?", camel_case)


def names(kernel: str, operator: str) -> bool:
    """Whether the operator has the kernel's name, except for words in between or at the end for additional functions of
    an instance."""
    rest = iter(word.lower() for word in words(operator))
    return all(word in rest for word in kernel.split("_"))


@pytest.mark.parametrize("file", FILES)
def test_an_operator_has_the_name_of_a_kernel_of_its_file(file: str) -> None:
    kernels = re.findall(r"__global__ [^;{]*?\b(\w+)\([^()]*\)\s*\{", (SOURCES / f"{file}.cu").read_text())
    for operator in FILES[file]:
        assert any(names(kernel, operator.name) for kernel in kernels), (operator.name, kernels)


def test_every_kernels_operator_has_a_body_and_a_launch() -> None:
    assert len(OPERATORS) == len({operator.name for operator in OPERATORS}) > 35
    assert all(operator.body and operator.fused and operator.name in LAUNCHES for operator in OPERATORS)
    by_hand = {operator.name for operator in OPERATORS if operator.compute is not by_body}
    assert all("MaxPool" in name or name in ("StemWgrad", "StemWeights") for name in by_hand), "with their winners"


@pytest.mark.parametrize("price", [fewest, own_forms])
def test_shapes_of_parameters_follow_from_bodies(price) -> None:
    """Gamma's shape follows from the normalised data, and a weight's shape from its convolution."""
    graph, shapes = fused(bottlenecks(7)), {"data": (2, 22, 18, 4), "softmax_label": (2,)}
    seen = set()
    for made in (pipeline.training_step(graph, shapes, "float16", price), pipeline.inference(graph, "float16", price)):
        found = made.infer_shapes(shapes)
        for node in made:
            if node.op in DESCRIBED and DESCRIBED[node.op].fused and DESCRIBED[node.op].body:
                roles = DESCRIBED[node.op].input_names(node)
                unread = "gamma" if node.op.endswith("AddReluBackwardReduce") else ""  # computed by its body
                given = [None if PARAMETERS.fullmatch(role) and role != unread else found[ref]
                         for role, ref in zip(roles, node.inputs, strict=True)]
                inputs, outputs = infer_node_shapes(node, given)
                assert [*inputs, *outputs] == [found[ref] for ref in (*node.inputs, *node.refs())], node.op
                seen.add(node.op)
    assert len(seen) > 12


def test_what_a_body_is_not_told() -> None:
    variables = [Node("null", name) for name in ("x", "w", "b", "x_2", "w_2", "b_2")]
    both = Node("Conv1x1ForwardSumRelu", "sum", tuple(Ref(each.name) for each in variables), CONVOLUTION)
    graph = Graph([*variables, both], both.refs())
    assert graph.infer_shapes({"x": (2, 3, 5, 16), "x_2": (2, 3, 5, 24)})[Ref("w_2")] == (8, 1, 1, 24)
    with pytest.raises(GraphError, match="the shape of 'x_2', read by Conv1x1ForwardSumRelu 'sum', is not known"):
        graph.infer_shapes({"x": (2, 3, 5, 16)})
    with pytest.raises(GraphError, match=r"'sum' makes a tensor of the shape \(2, 3, 4, 8\) where it needs \(2, 3, 5"):
        graph.infer_shapes({"x": (2, 3, 5, 16), "x_2": (2, 3, 4, 24)})
