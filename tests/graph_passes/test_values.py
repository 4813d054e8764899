"""Value numbering: no fusing pass changes what an output of the graph is, in whatever order the passes run; and tensors
of one number are the same arrays."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from int8_networks import quantised
from step_networks import random_variables
from test_fused_step import NETWORKS, network

from graph_passes import Graph, Node, Ref, passes, pipeline
from graph_passes.executors.reference import evaluate
from graph_passes.operators import OPERATORS
from graph_passes.operators.dropout import SEED
from graph_passes.passes.quantise import Kept
from graph_passes.values import Values, number
from train import models

Listed = Mapping[str, pipeline.Pass]
VARIANTS: dict[str, Callable[[Graph], Graph]] = {
    "plain": lambda graph: graph,
    "frozen": lambda graph: passes.freeze(graph, "stage2"),
    "fine-tuned": lambda graph: passes.slow_backbone(graph, 0.1),
    "dropping": lambda graph: passes.dropout(passes.stochastic_depth(graph, 0.2, "image"), 0.1),
    "dropping batches": lambda graph: passes.stochastic_depth(graph, 0.2, "block"),
}
FIRST_FUSING = {"training": "norm_pair", "inference": "stem_pool", "int8": "quantised_way"}


def any_way(chance: random.Random) -> passes.Choose:
    return lambda graph, node, ways: chance.choice([*ways])


def listed_for(kind: str, shapes: dict[str, tuple[int, ...]], chance: random.Random) -> Listed:
    if kind == "int8":
        scales: dict[str, float] = defaultdict(lambda: 0.5)
        return pipeline.gpu_quantised_passes("float16", scales, Kept(), any_way(chance))
    if kind == "training":
        return pipeline.training_passes(shapes, "float16", any_way(chance))
    return pipeline.inference_passes("float16", any_way(chance))


def split(listed: Listed, kind: str, graph: Graph) -> tuple[Graph, dict[str, pipeline.Pass]]:
    """The graph as the fusing passes find it, and these."""
    names = [*listed]
    first = names.index(FIRST_FUSING[kind])
    return pipeline.run({name: listed[name] for name in names[:first]}, graph), {
        name: listed[name] for name in names[first:]}


def outputs(graph: Graph, values: Values) -> list[int]:
    found = number(graph, values)
    return [found[ref] for ref in graph.outputs]


def check_in_any_order(kind: str, graph: Graph, shapes: dict[str, tuple[int, ...]], chance: random.Random,
                       orders: int) -> int:
    """Each pass alone, then all in random orders; how many of them changed the graph."""
    changed = 0
    for order in range(1 + orders):
        before, fusing = split(listed_for(kind, shapes, chance), kind, graph)
        values = Values()
        wanted = outputs(before, values)
        after = before
        for name in chance.sample([*fusing], len(fusing)):
            last = before if order == 0 else after
            after = fusing[name](last)
            changed += after != last
            assert outputs(after, values) == wanted, name
    return changed


@pytest.mark.parametrize("kind", ["training", "inference"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_fusing_pass_changes_an_output(name: str, kind: str, rng: np.random.Generator) -> None:
    graph, shapes = network(name)
    check_in_any_order(kind, graph, shapes, random.Random(int(rng.integers(2**32))), orders=4)


@pytest.mark.long(but=["*resnet50-plain"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("kind", FIRST_FUSING)
def test_no_fusing_pass_changes_an_output_of_a_resnet(kind: str, name: str, variant: str,
                                                      rng: np.random.Generator) -> None:
    graph = VARIANTS[variant](models.create(name, 10).graph)
    shapes = {"data": (2, 64, 64, 3), "softmax_label": (2,)}
    chance = random.Random(int(rng.integers(2**32)))
    assert check_in_any_order(kind, graph, shapes, chance, orders=3) >= 4


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
    for _ in range(4):
        before, fusing = split(listed_for(kind, shapes, chance), kind, graph)
        compare(before, values, given, seen)
        compare(pipeline.run(fusing, before), values, given, seen)
    assert len(seen) > 10


def compare(graph: Graph, values: Values, given: Mapping[str, np.ndarray], seen: dict[int, np.ndarray]) -> None:
    """Run the graph; each of its tensors against the one of the same number that is `seen` already."""
    numbers, arrays = number(graph, values), dict[Ref, np.ndarray]()
    for node in graph:
        found = [given[node.name]] if node.is_variable else evaluate(node, [arrays[ref] for ref in node.inputs])
        for role, ref, array in zip(_roles(node), node.refs(), found, strict=True):
            arrays[ref] = array
            if role not in ("sums", "winner", "data_at_winner"):  # where nobody wins, these say nothing
                wanted = seen.setdefault(numbers[ref], array)
                np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-6 * max(1, np.abs(wanted).max()),
                                           err_msg=f"{node.op} {node.name} {role}")


def _roles(node: Node) -> list[str]:
    return [*OPERATORS[node.op].output_names(node)] if node.op in OPERATORS else [""] * node.num_outputs


@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet50", marks=pytest.mark.long)])
def test_integers_of_one_number_are_the_same(name: str, rng: np.random.Generator) -> None:
    """To the bit, in INT8."""
    case = quantised(name, 2, 33, rng)
    graph = pipeline.run(pipeline.quantised_passes("float32", case.scales, case.kept), case.network)
    given = case.params | {"data": case.images, "softmax_label": np.zeros(2)}
    values, seen, chance = Values(), dict[int, np.ndarray](), random.Random(int(rng.integers(2**32)))
    fusing = {each: run for each, run in listed_for("int8", case.shapes, chance).items()
              if each in ("quantised_sum", "quantised_pair")}
    compare(graph, values, given, seen)
    for order in (["quantised_sum", "quantised_pair"], ["quantised_pair", "quantised_sum"]):
        after = pipeline.run({each: fusing[each] for each in order}, graph)
        assert outputs(after, values) == outputs(graph, values)
        compare(after, values, given, seen)


def test_what_differs_has_other_numbers() -> None:
    """Another window, another order of what is no sum, another constant, another algorithm's reserve."""
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
