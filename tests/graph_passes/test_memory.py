"""The memory plan: nothing overlaps, executing the plan literally gives the same bits, and the plan is good."""

import itertools
import math

import numpy as np
import pytest
from step_networks import fused, random_variables, small_resnet

from graph_passes import Graph, Node, Ref, passes
from graph_passes.executors.reference import evaluate
from graph_passes.operators import OPERATORS
from graph_passes.passes.memory import ALIGNMENT, Step, plan_arena
from train.models.resnet import resnet

POISON = 0xFF  # byte of a floating-point number that is NaN
BYTES = {"float32": 4, "float16": 2, "int32": 4, "uint8": 1}


def training_step(graph, shapes, dtype="float32"):
    return passes.precision(passes.gradient_add(passes.gradient(graph, shapes)), dtype)


def check(plan, graph, shapes):
    """Check the plan against the graph itself, not against the lifetimes that the plan states."""
    sizes, dtypes = graph.infer_shapes(shapes), passes.tensor_dtypes(graph)
    nodes = list(graph)
    written = {ref: i for i, node in enumerate(nodes) for ref in sizes if ref.node == node.name}
    read = dict(written)
    for i, node in enumerate(nodes):
        read.update(dict.fromkeys(node.inputs, i))
    outside = {ref for ref in sizes if graph[ref.node].is_variable} | set(graph.outputs)
    assert plan.allocations.keys() == sizes.keys() - outside
    assert plan.external.keys() == outside
    for ref, a in plan.allocations.items():
        assert a.num_bytes == math.prod(sizes[ref]) * BYTES[dtypes[ref]]
        assert a.offset % ALIGNMENT == 0 and a.offset + a.num_bytes <= plan.arena_bytes
        assert (a.first, a.last) == (written[ref], read[ref])
    for (x, a), (y, b) in itertools.combinations(plan.allocations.items(), 2):
        share_bytes = a.offset < b.offset + b.num_bytes and b.offset < a.offset + a.num_bytes
        if share_bytes and written[x] <= read[y] and written[y] <= read[x]:
            old, new = (x, y) if written[x] < written[y] else (y, x)
            assert plan.allocations[new].in_place, f"{x} and {y} overlap"
            assert graph[new.node].inputs.count(old) == 1, f"{x} and {y} overlap"
            assert read[old] == written[new], "the old tensor is still needed"
            assert plan.allocations[old].offset == plan.allocations[new].offset
            assert a.num_bytes == b.num_bytes and dtypes[x] == dtypes[y]
    live = [sum(-(-a.num_bytes // ALIGNMENT) * ALIGNMENT for a in plan.allocations.values() if a.first <= i <= a.last)
            for i in range(len(nodes))]
    shared = [sum(-(-a.num_bytes // ALIGNMENT) * ALIGNMENT for a in plan.allocations.values()
                  if a.in_place and a.first == i) for i in range(len(nodes))]
    assert plan.live_bytes == [alive - twice for alive, twice in zip(live, shared, strict=True)]
    assert plan.lower_bound <= plan.arena_bytes <= plan.tensor_bytes


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_overlaps_in_a_resnet(depth, fuse, dtype):
    shapes = {"data": (3, 75, 67, 4)}
    graph = fused(resnet(depth)) if fuse else Graph.from_json(resnet(depth).tojson())
    step = training_step(graph, shapes, dtype)
    if dtype == "float16":
        shapes["loss_scale"] = (1,)
    check(passes.memory(step, shapes), step, shapes)


def test_resnet50_at_batch_256_is_as_small_as_its_order_allows():
    """The bound is the most that is alive at any node. Keeping all tensors would take more than twice as much."""
    shapes = {"data": (256, 224, 224, 4), "loss_scale": (1,)}
    step = training_step(fused(resnet(50)), {"data": shapes["data"]}, "float16")
    plan = passes.memory(step, shapes)
    assert plan.arena_bytes <= 1.01 * plan.lower_bound
    assert plan.tensor_bytes > 2 * plan.arena_bytes
    # Fusing must pay: without it, ReLU outputs and sums of gradients need memory, too.
    plain = Graph.from_json(resnet(50).tojson())
    unfused = passes.memory(training_step(plain, {"data": shapes["data"]}, "float16"), shapes)
    assert plan.arena_bytes < unfused.arena_bytes
    assert plan.tensor_bytes < 0.8 * unfused.tensor_bytes
    text = plan.table()
    assert f"{plan.arena_bytes / 2**20:,.1f} MiB" in text and "stem_conv" in text


@pytest.mark.parametrize("second, in_place", [("one", False), ("other", True)])
def test_what_is_read_as_two_inputs_keeps_its_place(second, in_place):
    nodes = [Node("null", "x"), Node("relu", "one", (Ref("x"),)), Node("relu", "other", (Ref("x"),)),
             Node("elemwise_add", "sum", (Ref("one"), Ref(second))), Node("relu", "last", (Ref("sum"),))]
    plan = passes.memory(Graph(nodes, [Ref("last")]), {"x": (5, 7)})
    assert plan.allocations[Ref("sum")].in_place == in_place


# --- executed literally ---


def run_in_arena(graph, variables, plan, shapes):
    """All tensors are in one array of bytes, at the planned offsets; dead tensors are poisoned at once."""
    sizes, dtypes = graph.infer_shapes(shapes), passes.tensor_dtypes(graph)
    arena = np.full(plan.arena_bytes, POISON, np.uint8)
    outside = {Ref(name): array for name, array in variables.items()}

    def place(ref):
        a = plan.allocations[ref]
        return arena[a.offset : a.offset + a.num_bytes].view(dtypes[ref]).reshape(sizes[ref])

    for number, node in enumerate(graph):
        if node.is_variable:
            continue
        inputs = [outside[ref] if ref in outside else place(ref).copy() for ref in node.inputs]
        outputs = evaluate(node, inputs)
        for ref, a in plan.allocations.items():
            if a.last == number and a.first < number:
                place(ref).view(np.uint8)[...] = POISON
        for index, output in enumerate(outputs):
            ref = Ref(node.name, index)
            if ref in plan.external:
                outside[ref] = output.astype(dtypes[ref], order="C")
            else:
                place(ref)[...] = output
    return [outside[ref] for ref in graph.outputs]


def run_apart(graph, variables):
    """The graph's outputs, computed with a separate array for every tensor."""
    dtypes = passes.tensor_dtypes(graph)
    values = {Ref(name): array for name, array in variables.items()}
    for node in graph:
        if not node.is_variable:
            for index, output in enumerate(evaluate(node, [values[ref] for ref in node.inputs])):
                # In C order, as in the arena: BLAS rounds differently for a transposed view.
                values[Ref(node.name, index)] = output.astype(dtypes[Ref(node.name, index)], order="C")
    return [values[ref] for ref in graph.outputs]


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_small_resnet_executed_in_its_arena(bottleneck, fuse, rng):
    shapes = {"data": (3, 21, 19, 3), "softmax_label": (3,)}
    graph = fused(small_resnet(bottleneck)) if fuse else Graph.from_json(small_resnet(bottleneck).tojson())
    step = training_step(graph, shapes)
    plan = passes.memory(step, shapes)
    check(plan, step, shapes)
    assert plan.arena_bytes < 0.7 * plan.tensor_bytes
    variables = random_variables(graph, shapes, rng, dtype=np.float32)
    for got, expected in zip(run_in_arena(step, variables, plan, shapes), run_apart(step, variables), strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(got, expected)


def random_graph(rng):
    """Operators that change the shape or keep it, read by any number of later ones, and several outputs."""
    nodes, shapes, open_refs = [Node("null", "data")], {Ref("data"): (3, 4, 5, 8)}, [Ref("data")]
    for number in range(int(rng.integers(5, 40))):
        ref = open_refs[rng.integers(max(0, len(open_refs) - 6), len(open_refs))]
        same_shape = [other for other in open_refs if shapes[other] == shapes[ref]]
        other = same_shape[rng.integers(len(same_shape))]
        name = f"n{number}"
        kind = rng.integers(6)
        if kind == 0:
            node = Node("elemwise_add", name, (ref, other))
        elif kind == 1:
            node = Node("AddRelu", name, (other, ref))
        elif kind == 2:
            node = Node("relu", name, (ref,))
        elif kind == 3:
            node = Node("Flatten", name, (ref,))
        elif kind == 4:
            node = Node("transpose", name, (ref,))
        else:
            weight = Node("null", f"{name}_weight")
            nodes.append(weight)
            attrs = {"num_hidden": int(rng.integers(1, 300)), "no_bias": True}
            node = Node("FullyConnected", name, (ref, Ref(weight.name)), attrs)
        nodes.append(node)
        open_refs.append(Ref(name))
        shapes = Graph(nodes, [Ref(n.name) for n in nodes]).infer_shapes({"data": (3, 4, 5, 8)})
    more_outputs = rng.integers(1, len(open_refs), rng.integers(3))
    return Graph(nodes, [open_refs[-1], *(open_refs[i] for i in more_outputs)])


def test_random_graphs_executed_in_their_arenas(rng):
    in_place = 0
    for _ in range(40):
        graph = random_graph(rng)
        shapes = {"data": (3, 4, 5, 8)} if "data" in graph.nodes else {}
        plan = passes.memory(graph, shapes)
        if not plan.allocations:
            continue
        check(plan, graph, shapes)
        in_place += sum(a.in_place for a in plan.allocations.values())
        sizes = graph.infer_shapes(shapes)
        variables = {name: rng.uniform(-0.1, 0.1, sizes[Ref(name)]).astype(np.float32) for name in graph.variables}
        results = run_in_arena(graph, variables, plan, shapes), run_apart(graph, variables)
        for got, expected in zip(*results, strict=True):
            np.testing.assert_array_equal(got, expected)
    assert in_place > 10


# --- in place ---


def chain(*nodes, outputs):
    return Graph([Node("null", "x"), *nodes], [Ref(name) for name in outputs])


def relu(name, source):
    return Node("relu", name, (Ref(source),))


def test_in_place_where_the_input_dies():
    graph = chain(relu("a", "x"), relu("b", "a"), relu("c", "b"), outputs=["c"])
    plan = passes.memory(graph, {"x": (5, 100)})
    assert plan.allocations[Ref("b")].in_place and not plan.allocations[Ref("a")].in_place
    assert plan.arena_bytes == plan.lower_bound == 2048  # one tensor of 2000 bytes; x and c are the caller's
    assert plan.external == {Ref("x"): 2000, Ref("c"): 2000}


def test_a_graph_without_tensors_of_its_own():
    plan = passes.memory(chain(relu("a", "x"), outputs=["a"]), {"x": (5, 100)})
    assert (plan.arena_bytes, plan.lower_bound, dict(plan.allocations)) == (0, 0, {})
    assert "0.0 MiB   0 tensors" in plan.table()


def test_not_in_place_where_somebody_reads_the_input_later():
    add = Node("elemwise_add", "c", (Ref("b"), Ref("a")))
    graph = chain(relu("a", "x"), relu("b", "a"), add, relu("d", "c"), outputs=["d"])
    plan = passes.memory(graph, {"x": (5, 100)})
    assert [plan.allocations[Ref(name)].in_place for name in "abc"] == [False, False, True]
    assert plan.arena_bytes == 2 * 2048


def test_one_successor_for_a_place():
    """Two outputs of one step may both replace the same input: only one of them does."""
    step = Step(reads=["x"], writes=["y", "z"], in_place={"y": ["x"], "z": ["x"]})
    steps = [Step([], ["x"], {}), step, Step(["y", "z"], [], {})]
    allocations, arena_bytes = plan_arena(steps, dict.fromkeys("xyz", 300))
    assert sorted(a.in_place for a in allocations.values()) == [False, False, True]
    assert allocations["y"].offset != allocations["z"].offset
    assert arena_bytes == 2 * 512


def test_not_in_place_between_sizes():
    """Element i of a 16-bit output has another address than element i of a 32-bit input."""
    steps = [Step([], ["x"], {}), Step(["x"], ["y"], {"y": ["x"]}), Step(["y"], [], {})]
    allocations, arena_bytes = plan_arena(steps, {"x": 512, "y": 256})
    assert not allocations["y"].in_place and arena_bytes == 768


def test_a_tensor_may_be_written_in_several_steps():
    steps = [Step([], ["sum"], {}), Step([], ["part"], {}), Step(["part", "sum"], ["sum"], {"sum": ["part"]})]
    allocations, arena_bytes = plan_arena(steps, {"sum": 256, "part": 256})
    assert not any(a.in_place for a in allocations.values())
    assert (allocations["sum"].first, allocations["sum"].last) == (0, 2)
    assert arena_bytes == 512


def test_replacements_name_what_exists():
    found = [(operator, output, inputs) for operator in OPERATORS.values()
             for output, inputs in operator.in_place.items()]
    assert len(found) > 15
    for operator, output, inputs in found:
        assert output in operator.outputs, operator.name
        assert set(inputs) <= set(operator.inputs), operator.name
