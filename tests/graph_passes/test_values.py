"""Value numbering: no cover changes the value of a graph's output, whichever candidates are taken and in whatever order
they were found. Tensors with equal numbers are equal arrays."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from int8_networks import quantised
from step_networks import random_variables
from test_fused_step import NETWORKS, network

from graph_passes import Graph, Node, Ref, passes, pipeline
from graph_passes.candidates import Candidates
from graph_passes.choice import Price, chosen_of, fewest
from graph_passes.executors.reference import evaluate
from graph_passes.operators import OPERATORS
from graph_passes.operators.dropout import SEED
from graph_passes.passes.quantise import Kept
from graph_passes.values import Values, number
from train import models

Shapes = dict[str, tuple[int, ...]]
VARIANTS: dict[str, Callable[[Graph], Graph]] = {
    "plain": lambda graph: graph,
    "frozen": lambda graph: passes.freeze(graph, "stage2"),
    "fine-tuned": lambda graph: passes.slow_backbone(graph, 0.1),
    "dropping": lambda graph: passes.dropout(passes.stochastic_depth(graph, 0.2, "image"), 0.1),
    "dropping batches": lambda graph: passes.stochastic_depth(graph, 0.2, "block"),
}
KINDS = ("training", "inference", "int8")


def before_the_cover(kind: str, graph: Graph, shapes: Shapes) -> Graph:
    """The graph as the fusion rules find it."""
    if kind == "int8":
        scales: dict[str, float] = defaultdict(lambda: 0.5)
        listed = pipeline.gpu_quantised_passes("float16", scales, Kept(first=True), fewest)
    elif kind == "training":
        listed = pipeline.training_passes(shapes, "float16", fewest)
    else:
        listed = pipeline.inference_passes("float16", fewest)
    return pipeline.run({name: each for name, each in listed.items() if name != "cover"}, graph)


def any_price(chance: random.Random) -> Price:
    """Prices by which anything may be taken, even more than is needed: some kernels cost nothing."""
    return lambda table: [chance.choice([0.0, chance.random(), 1.0]) for _ in table]


def outputs(graph: Graph, values: Values) -> list[int]:
    found = number(graph, values)
    return [found[ref] for ref in graph.outputs]


def check_covers(kind: str, graph: Graph, shapes: Shapes, chance: random.Random, covers: int) -> set[str]:
    """Check covers by any price; returns all operators that were taken."""
    before = before_the_cover(kind, graph, shapes)
    values, sizes = Values(), before.infer_shapes(shapes)
    wanted, taken = outputs(before, values), set[str]()
    for _ in range(covers):
        after = pipeline.cover(before, any_price(chance), sizes)
        assert outputs(after, values) == wanted
        assert after.infer_shapes(shapes).keys() >= {*after.outputs}
        taken |= after.operators().keys()
    return taken


@pytest.mark.parametrize("kind", ["training", "inference"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_cover_changes_an_output(name: str, kind: str, rng: np.random.Generator) -> None:
    graph, shapes = network(name)
    check_covers(kind, graph, shapes, random.Random(int(rng.integers(2**32))), covers=6)


@pytest.mark.long(but=["*resnet50-plain"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_cover_changes_an_output_of_a_resnet(kind: str, name: str, variant: str, rng: np.random.Generator) -> None:
    graph = VARIANTS[variant](models.create(name, 10).graph)
    shapes = {"data": (2, 64, 64, 3), "softmax_label": (2,)}
    taken = check_covers(kind, graph, shapes, random.Random(int(rng.integers(2**32))), covers=4)
    assert len([op for op in taken if op in OPERATORS and OPERATORS[op].fused]) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_rules_decides_nothing(kind: str, rng: np.random.Generator) -> None:
    """The order of the rules changes neither the set of candidates nor, if all prices differ, the choice among them."""
    shapes = {"data": (2, 64, 64, 3), "softmax_label": (2,)}
    before = before_the_cover(kind, models.create("resnet50", 10).graph, shapes)
    chance, sizes = random.Random(int(rng.integers(2**32))), before.infer_shapes(shapes)
    prices: dict[tuple[str, str], float] = defaultdict(chance.random)
    found = []
    for _ in range(3):
        table = Candidates(before, sizes)
        table.apply(chance.sample(pipeline.RULES, len(pipeline.RULES)))
        priced = [prices[each.label, each.node.name] for each in table]
        taken = table.graph_of(chosen_of(table, priced))
        found.append((Counter((each.label, each.node.name) for each in table), taken.operators(), taken.outputs))
    assert found[0] == found[1] == found[2]


@pytest.mark.long(but=["*basic blocks", "*biases", "*words", "*strided bottlenecks"])
@pytest.mark.parametrize("kind", ["training", "inference"])
@pytest.mark.parametrize("name", NETWORKS)
def test_tensors_of_one_number_are_the_same(name: str, kind: str, rng: np.random.Generator) -> None:
    """In float64, over graphs that are fused in several ways. The sums of a batch may have either form."""
    graph, shapes = network(name)
    given = random_variables(graph, shapes, rng)
    given |= {SEED: given["data"].view(np.uint32).ravel()[:2], "loss_scale": np.array([8.0])}
    if kind == "inference":
        given |= passes.fold_bn_params(pipeline.run(pipeline.FUSED, graph), given, given)
    chance, values, seen = random.Random(int(rng.integers(2**32))), Values(), dict[int, np.ndarray]()
    before = before_the_cover(kind, graph, shapes)
    compare(before, values, given, seen)
    for _ in range(4):
        compare(pipeline.cover(before, any_price(chance), before.infer_shapes(shapes)), values, given, seen)
    assert len(seen) > 10


def compare(graph: Graph, values: Values, given: Mapping[str, np.ndarray], seen: dict[int, np.ndarray]) -> None:
    """Run the graph, and compare each of its tensors with the one of equal number in `seen`."""
    numbers, arrays = number(graph, values), dict[Ref, np.ndarray]()
    for node in graph:
        found = [given[node.name]] if node.is_variable else evaluate(node, [arrays[ref] for ref in node.inputs])
        for role, ref, array in zip(_roles(node), node.refs(), found, strict=True):
            arrays[ref] = array
            if role not in ("sums", "winner", "data_at_winner"):  # without a winner these say nothing
                wanted = seen.setdefault(numbers[ref], array)
                np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-6 * max(1, np.abs(wanted).max()),
                                           err_msg=f"{node.op} {node.name} {role}")


def _roles(node: Node) -> list[str]:
    return [*OPERATORS[node.op].output_names(node)] if node.op in OPERATORS else [""] * node.num_outputs


@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet50", marks=pytest.mark.long)])
def test_integers_of_one_number_are_the_same(name: str, rng: np.random.Generator) -> None:
    """Tensors with equal numbers have equal integers in INT8."""
    case = quantised(name, 2, 33, rng)
    graph = pipeline.run(pipeline.quantised_passes("float32", case.scales, case.kept), case.network)
    given = case.params | {"data": case.images, "softmax_label": np.zeros(2)}
    values, seen, chance = Values(), dict[int, np.ndarray](), random.Random(int(rng.integers(2**32)))
    compare(graph, values, given, seen)
    for _ in range(4):
        after = pipeline.cover(graph, any_price(chance))
        assert outputs(after, values) == outputs(graph, values)
        compare(after, values, given, seen)


def test_what_differs_has_other_numbers() -> None:
    """Nodes get different numbers if they differ in the window, in the order of operands that do not commute, in a
    constant, or in the algorithm that wrote the reserve."""
    x, y, w = Node("null", "x"), Node("null", "y"), Node("null", "w")

    def convolution(name: str, data: str, **attrs: object) -> Node:
        return Node("Convolution", name, (Ref(data), Ref("w")),
                    {"num_filter": 8, "no_bias": True, "layout": "NHWC", **attrs})

    nodes = [convolution("a", "x", kernel=(1, 1)), convolution("b", "x", kernel=(3, 3)),
             convolution("c", "x", kernel=(1, 1), stride=(2, 2)), convolution("d", "y", kernel=(1, 1)),
             Node("elemwise_add", "e", (Ref("x"), Ref("y"))), Node("relu", "f", (Ref("e"),))]
    same = [convolution("a2", "x", kernel=(1, 1), dtype="float16"), Node("elemwise_add", "e2", (Ref("y"), Ref("x"))),
            Node("AddRelu", "f2", (Ref("y"), Ref("x")))]
    names = [node.name for node in (*nodes, *same)]
    found = number(Graph([x, y, w, *nodes, *same], [Ref(name) for name in names]))
    assert len({found[Ref(node.name)] for node in (x, y, w, *nodes)}) == 3 + len(nodes)
    assert all(found[Ref(node.name)] == found[Ref(node.name[0])] for node in same)


def test_what_a_graph_computes_twice_stays_two_tensors() -> None:
    """Each of the two equal tensors is an output with its own memory: they are the gradients of different parameters.
    """
    x, w = Node("null", "x"), Node("null", "w")
    attrs = {"kernel": (1, 1), "num_filter": 8, "no_bias": True, "layout": "NHWC", "dtype": "float16"}
    twice = [Node("Convolution", name, (Ref("x"), Ref("w")), attrs) for name in ("a", "b")]
    zeros = [Node("Zeros", name, (), {"shape": (8,)}) for name in ("c", "d")]
    sums = [Node("BatchNormStatistics", f"{each.name}_sums", (Ref(each.name),), {"axis": 3}) for each in twice]
    graph = Graph([x, w, *twice, *zeros, *sums], [*map(Ref, ("a", "b", "c", "d", "a_sums", "b_sums"))])
    after = pipeline.cover(graph, fewest)
    assert len({*after.outputs}) == 6
    assert after.operators() == {"ConvolutionStatistics": 1, "Convolution": 1, "Zeros": 2, "BatchNormStatistics": 1}
