"""The graph: MXNet's Symbol JSON in and out, shapes against MXNet's own, rewriting, and errors for bad input."""

import json

import numpy as np
import pytest
from step_networks import small_resnet

from common.mxnet_compat import mx
from graph_passes import VARIABLE, Graph, GraphError, Node, Ref

ZOO = ["resnet18_v1", "resnet50_v2", "mobilenet0_25", "mobilenet_v2_0_25", "densenet121", "inception_v3"]


def zoo_symbol(name):
    return getattr(mx.gluon.model_zoo.vision, name)()(mx.sym.var("data"))


@pytest.mark.parametrize("name", ZOO)
def test_round_trip_gives_the_same_json(name):
    symbol = zoo_symbol(name)
    graph = Graph.from_json(symbol.tojson())
    assert json.loads(graph.to_json()) == json.loads(symbol.tojson())
    assert list(graph.arguments) == symbol.list_arguments()
    assert list(graph.aux) == symbol.list_auxiliary_states()


def test_round_trip_of_several_outputs_and_attributes():
    data = mx.sym.var("data", shape=(2, 6, 5), lr_mult=2.0)
    parts = mx.sym.split(data, num_outputs=3, axis=1, name="parts")
    bn = mx.sym.BatchNorm(parts[1], output_mean_var=True, name="bn")
    symbol = mx.sym.Group([parts[2], bn[0], bn[2], mx.sym.elemwise_add(parts[0], parts[1]), data])
    graph = Graph.from_json(symbol.tojson())
    assert json.loads(graph.to_json()) == json.loads(symbol.tojson())
    loaded = mx.sym.load_json(graph.to_json())
    assert loaded.list_outputs() == symbol.list_outputs()
    assert loaded.infer_shape()[1] == symbol.infer_shape()[1]


def test_a_graph_is_written_as_a_file_that_loads(tmp_path):
    symbol = small_resnet(bottleneck=True)
    symbol.save(str(tmp_path / "net.json"))
    graph = Graph.load(tmp_path / "net.json")
    assert graph == Graph.from_json(graph.to_json())
    assert mx.sym.load_json(graph.to_json()).list_arguments() == symbol.list_arguments()


def test_old_json_forms():
    """`attr` and `param` of nodes, heads of two numbers, `_Plus`, Python 2's longs, no node_row_ptr."""
    variable = {"op": "null", "param": {}, "inputs": []}
    old = {
        "nodes": [
            {**variable, "name": "data"},
            {**variable, "name": "w"},
            {"op": "Convolution", "name": "conv", "inputs": [[0, 0], [1, 0]], "attr": {"ctx_group": "a"},
             "param": {"kernel": "(3L, 3L)", "num_filter": "4", "no_bias": "True"}},
            {"op": "_Plus", "name": "plus", "inputs": [[2, 0], [2, 0]], "param": {}},
        ],
        "arg_nodes": [0, 1],
        "heads": [[3, 0]],
    }
    graph = Graph.from_json(json.dumps(old))
    assert graph["conv"]["kernel"] == (3, 3)
    assert graph["conv"]["no_bias"] is True
    assert graph["plus"].op == "elemwise_add"
    assert mx.sym.load_json(graph.to_json()).list_arguments() == ["data", "w"]


def test_operators_that_share_a_name_are_told_apart():
    first = mx.sym.relu(mx.sym.var("data"), name="same")
    graph = Graph.from_json(mx.sym.relu(first, name="same").tojson())
    assert len(graph) == 3
    assert graph.operators() == {"relu": 2}


@pytest.mark.parametrize("name", ["resnet50_v1", "resnet18_v2", "mobilenet1_0"])
def test_shapes_are_those_that_mxnet_infers(name, rng):
    symbol = zoo_symbol(name)
    shape = (int(rng.integers(1, 5)), 3, int(rng.integers(65, 130)), int(rng.integers(65, 130)))
    shapes = Graph.from_json(symbol.tojson()).infer_shapes({"data": shape})
    internals = symbol.get_internals()
    for output, expected in zip(internals.list_outputs(), internals.infer_shape(data=shape)[1], strict=True):
        ref = Ref(output.removesuffix("_output"))
        if not output.endswith(("_mean", "_var", "output1")) or ref in shapes:
            assert shapes[ref] == expected, output


def test_shapes_of_random_windows(rng):
    for _ in range(60):
        kernel, stride, pad = (tuple(map(int, rng.integers(low, high, 2))) for low, high in ((1, 5), (1, 4), (0, 2)))
        pad = tuple(min(p, k - 1) for p, k in zip(pad, kernel, strict=True))
        size = tuple(map(int, rng.integers(15, 26, 2)))
        data = mx.sym.var("data")
        conv = mx.sym.Convolution(data, kernel=kernel, stride=stride, pad=pad, num_filter=6, num_group=2,
                                  dilate=tuple(map(int, rng.integers(1, 3, 2))), name="conv")
        convention = str(rng.choice(["valid", "full"]))
        pool = mx.sym.Pooling(conv, kernel=(2, 2), stride=(2, 1), pooling_convention=convention, name="pool")
        shapes = Graph.from_json(pool.tojson()).infer_shapes({"data": (2, 4, *size)})
        arguments, (expected,), _ = pool.infer_shape(data=(2, 4, *size))
        assert shapes[Ref("pool")] == expected
        assert shapes[Ref("conv_weight")] == arguments[1]


def test_nhwc_shapes():
    graph = Graph.from_json(small_resnet(bottleneck=False).tojson())
    shapes = graph.infer_shapes({"data": (3, 21, 17, 4)})
    assert shapes[Ref("stem_weight")] == (6, 3, 3, 4)
    assert shapes[Ref("stem")] == (3, 11, 9, 6)
    assert shapes[Ref("softmax_label")] == (3,)


# --- rewriting ---


def relu_pair():
    data = Node(VARIABLE, "data")
    return Graph([data, Node("relu", "a", (Ref("data"),)), Node("relu", "b", (Ref("a"),))], [Ref("b")])


def test_rewrite_leaves_the_graph_alone_and_drops_what_nobody_reads():
    graph = relu_pair()
    result = graph.rewrite(lambda node: Node("Flatten", "f", (Ref("data"),)) if node.name == "b" else None)
    assert [node.name for node in result] == ["data", "f"]
    assert [node.name for node in graph] == ["data", "a", "b"]
    assert result.outputs == (Ref("f"),)
    with pytest.raises(TypeError):
        graph.nodes["a"] = graph["b"]
    with pytest.raises(TypeError):
        graph["a"].attrs["x"] = 1


def test_rewrite_to_several_nodes():
    graph = relu_pair().rewrite(
        lambda node: [Node("Flatten", "f", node.inputs), Node("relu", "g", (Ref("f"),))] if node.name == "a" else None
    )
    assert [(node.name, *(ref.node for ref in node.inputs)) for node in graph] == [
        ("data",), ("f", "data"), ("g", "f"), ("b", "g"),
    ]


def test_only_used_by_one():
    graph = relu_pair()
    assert graph.only_used_by_one(Ref("a"), "relu") is graph["a"]
    assert graph.only_used_by_one(Ref("a"), "Flatten") is None
    assert Graph(graph, [Ref("b"), Ref("a")]).only_used_by_one(Ref("a"), "relu") is None
    twice = Graph([*graph, Node("elemwise_add", "sum", (Ref("a"), Ref("a")))], [Ref("sum")])
    assert twice.only_used_by_one(Ref("a"), "relu") is None


def test_deep_graphs_need_no_recursion():
    nodes = [Node(VARIABLE, "0"), *(Node("relu", str(i), (Ref(str(i - 1)),)) for i in range(1, 5000))]
    assert len(Graph(reversed(nodes), [Ref("4999")])) == 5000


# The graph: MXNet's Symbol JSON in and out, shapes against MXNet's own, rewriting, and errors for bad input.


def test_json_cut_off_anywhere(rng):
    text = small_resnet(bottleneck=True).tojson()
    for length in rng.integers(0, len(text.rstrip()) - 1, 30):
        with pytest.raises(GraphError, match=r"^net\.json is cut off or is not JSON"):
            Graph.from_json(text[:length], source="net.json")


def damaged(change):
    document = json.loads(small_resnet(bottleneck=True).tojson())
    change(document)
    return json.dumps(document)


def set_attribute(op, key, value):
    def change(document):
        next(node for node in document["nodes"] if node["op"] == op)["attrs"][key] = value

    return change


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "not a graph of MXNet"),
        ('{"nodes": 3, "heads": 4}', "damaged or not a graph"),
        ('{"nodes": [], "heads": []}', "no outputs"),
        ('{"nodes": [{}], "heads": [[0, 0, 0]]}', "damaged or not a graph"),
        (damaged(lambda d: d["heads"].append([9999, 0, 0])), "damaged or not a graph"),
        (damaged(lambda d: d["heads"].append([0, 7, 0])), "output 7 of 'data', which does not exist"),
        (damaged(lambda d: d["nodes"][2].update(inputs=[[9, 0, 0]])), "reads node 9, which does not come before it"),
        (damaged(lambda d: d["nodes"][1].update(name="data")), "two nodes of the graph are named 'data'"),
        (damaged(lambda d: d["nodes"][-1].update(subgraphs=[{}])), "'softmax' .* holds a graph of its own"),
        (damaged(set_attribute("Convolution", "kernel", "three")), "Convolution 'stem' has kernel='three'"),
        (damaged(set_attribute("Convolution", "layout", "CHWN")), "Convolution 'stem' has layout='CHWN'"),
        (damaged(set_attribute("BatchNorm", "fix_gamma", "perhaps")), "BatchNorm 'stem_bn' has fix_gamma='perhaps'"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(GraphError, match=message) as error:
        Graph.from_json(text)
    assert "\n" not in str(error.value)


def test_bad_files(tmp_path):
    with pytest.raises(GraphError, match=r"missing\.json \(No such file"):
        Graph.load(tmp_path / "missing.json")
    (tmp_path / "picture.json").write_bytes(np.arange(256, dtype=np.uint8).tobytes())
    with pytest.raises(GraphError, match="not a text file"):
        Graph.load(tmp_path / "picture.json")


def test_cycles_are_found():
    with pytest.raises(GraphError, match="cycle"):
        Graph([Node("relu", "a", (Ref("b"),)), Node("relu", "b", (Ref("a"),))], [Ref("b")])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"image": (1, 9, 9, 3)}, "no input 'image': its inputs are data, softmax_label"),
        ({"data": (1, 9, 3)}, "'stem' needs a batch of images"),
        ({"data": (2, 9, 9, 3), "softmax_label": (3,)}, r"'softmax_label' has shape \(3,\)"),
        ({"data": (2, 9, 9, 3), "stem_weight": (6, 5, 5, 3)}, "'stem_weight' has shape"),
        ({}, "the shape of 'data', read by Convolution 'stem', is not known"),
    ],
)
def test_shapes_that_do_not_fit(inputs, message):
    graph = Graph.from_json(small_resnet(bottleneck=False).tojson())
    with pytest.raises(GraphError, match=message):
        graph.infer_shapes(inputs)


def test_images_too_small_for_the_network():
    symbol = mx.sym.Convolution(mx.sym.var("data"), kernel=(7, 7), num_filter=2, name="conv")
    with pytest.raises(GraphError, match="larger than its padded 5x5 input"):
        Graph.from_json(symbol.tojson()).infer_shapes({"data": (1, 3, 5, 5)})


def test_operators_without_a_shape_rule_are_named():
    with pytest.raises(GraphError, match="operator smooth_l1 of node 'limit' has no shape rule"):
        Graph.from_json(mx.sym.smooth_l1(mx.sym.var("data"), name="limit").tojson()).infer_shapes({"data": (1, 2)})


def relu_chain(*names):
    """x -> relu -> relu -> ..."""
    nodes, source = [Node(VARIABLE, "x")], "x"
    for name in names:
        nodes.append(Node("relu", name, (Ref(source),)))
        source = name
    return Graph(nodes, [Ref(source)])


def test_replace_moves_readers_and_drops_what_nobody_reads():
    graph = relu_chain("a", "b", "c")
    both = Node("AddRelu", "both", (Ref("x"), Ref("x")))
    after = graph.replace([both], {Ref("b"): Ref("both")})
    assert [node.name for node in after] == ["x", "both", "c"] and after["c"].inputs == (Ref("both"),)
    assert graph.replace([both], {Ref("c"): Ref("both")}).outputs == (Ref("both"),), "outputs of the graph move too"
    assert [node.name for node in graph] == ["x", "a", "b", "c"], "the graph itself is as it was"


def test_replace_puts_a_node_behind_another():
    """All readers of `a` read the new node instead, except the new node itself."""
    graph = relu_chain("a", "b")
    after = graph.replace([Node("relu", "between", (Ref("a"),))], {Ref("a"): Ref("between")})
    assert [(node.name, node.inputs) for node in after][2:] == [("between", (Ref("a"),)), ("b", (Ref("between"),))]


def test_replace_follows_moves_of_moves_and_takes_over_names():
    graph = relu_chain("a", "b", "c")
    new = [Node("AddRelu", "b", (Ref("a"), Ref("x"))), Node("relu", "d", (Ref("x"),))]
    after = graph.replace(new, {Ref("a"): Ref("c"), Ref("c"): Ref("d")})
    assert after.outputs == (Ref("d"),) and [node.name for node in after] == ["x", "d"]
    after = graph.replace(new[:1], {})
    assert after["b"].op == "AddRelu" and after["c"].inputs == (Ref("b"),)


def test_sole_reader():
    graph = relu_chain("a", "b")
    assert graph.sole_reader(Ref("a"), "relu") == graph["b"] and graph.sole_reader(Ref("a"), "Flatten") is None
    assert graph.sole_reader(Ref("b"), "relu") is None, "nobody reads it"
    twice = Graph([*graph, Node("AddRelu", "sum", (Ref("a"), Ref("a")))], [Ref("sum")])
    assert twice.sole_reader(Ref("a"), "AddRelu") is None, "read twice"
    assert Graph(graph, [Ref("a"), Ref("b")]).sole_reader(Ref("a"), "relu") is None, "an output of the graph"
