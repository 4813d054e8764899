"""Passes layout, add_relu, bn_relu, bn_add_relu, unfuse, fold_bn: their matches, what they leave unchanged, and equal
results."""

import numpy as np
import pytest
from step_networks import random_variables, small_resnet

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, Ref, passes
from graph_passes.executors import create_executor
from graph_passes.executors.reference import forward
from train.models.resnet import resnet

PASSES = {
    "layout": lambda graph: passes.layout(graph, "NHWC"),
    "add_relu": passes.add_relu,
    "bn_relu": passes.bn_relu,
    "bn_add_relu": passes.bn_add_relu,
}
# fp32 sums in the same order: the remaining differences are rounding, where a pass leads to other kernels (transposed
# layouts).
TOLERANCE = 1e-5


def graph_of(symbol):
    return Graph.from_json(symbol.tojson())


def zoo_graph(name):
    scores = getattr(mx.gluon.model_zoo.vision, name)(classes=11)(mx.sym.var("data"))
    return graph_of(mx.sym.SoftmaxOutput(scores, normalization="batch", name="softmax"))


def all_passes(graph):
    for function in PASSES.values():
        graph = function(graph)
    return graph


def counts(graph, *ops):
    return tuple(graph.operators()[op] for op in ops)


# --- what they find ---


@pytest.mark.parametrize(("depth", "convolutions", "bn_relu", "bn_add_relu", "plain"), [
    (18, 20, 9, 8, 3), (34, 36, 17, 16, 3), (50, 53, 33, 16, 4), (101, 104, 67, 33, 4), (152, 155, 101, 50, 4),
])
def test_counts_on_resnets(depth, convolutions, bn_relu, bn_add_relu, plain):
    graph = graph_of(resnet(depth))
    assert counts(graph, "Convolution", "BatchNorm") == (convolutions, convolutions)
    assert counts(passes.add_relu(graph), "AddRelu") == (bn_add_relu,)
    assert counts(passes.bn_relu(graph), "BatchNormRelu") == (bn_relu,)
    assert counts(passes.bn_add_relu(graph), "BatchNormAddRelu") == (bn_add_relu,)
    expected = (convolutions, bn_relu, bn_add_relu, plain, 0, 0)
    ops = ("Convolution", "BatchNormRelu", "BatchNormAddRelu", "BatchNorm", "elemwise_add", "Activation")
    assert counts(all_passes(graph), *ops) == expected
    assert counts(passes.bn_add_relu(passes.bn_relu(graph)), *ops) == expected  # in another order, without add_relu
    assert counts(passes.fold_bn(all_passes(graph)), "Convolution", "BatchNorm") == (convolutions, 0)


@pytest.mark.parametrize(("name", "expected"), [
    ("resnet50_v1", {"Convolution": 53, "BatchNormRelu": 33, "BatchNormAddRelu": 16, "BatchNorm": 4, "Pooling": 2,
                     "FullyConnected": 1, "SoftmaxOutput": 1, "transpose": 1}),
    ("resnet50_v2", {"Convolution": 53, "BatchNormRelu": 50, "BatchNorm": 1, "elemwise_add": 16, "Pooling": 2,
                     "Flatten": 1, "FullyConnected": 1, "SoftmaxOutput": 1, "transpose": 1}),
    ("mobilenet1_0", {"Convolution": 27, "BatchNormRelu": 27, "Pooling": 1, "Flatten": 1, "FullyConnected": 1,
                      "SoftmaxOutput": 1, "transpose": 1}),
])
def test_counts_on_the_model_zoo(name, expected):
    assert all_passes(zoo_graph(name)).operators() == expected


def test_fused_nodes_are_named_after_what_they_came_from():
    graph = all_passes(graph_of(resnet(50)))
    assert graph["stem_bn_relu"].op == "BatchNormRelu"
    assert [ref.node for ref in graph["stage1_block1_bn3_add_relu"].inputs] == [
        "stage1_block1_conv3", "stage1_block1_bn3_gamma", "stage1_block1_bn3_beta", "stage1_block1_bn3_moving_mean",
        "stage1_block1_bn3_moving_var", "stage1_block1_shortcut_bn",
    ]
    assert graph["stage1_block1_bn3_add_relu"]["eps"] == graph_of(resnet(50))["stage1_block1_bn3"]["eps"]


# --- what they leave ---


def bn(x, **attrs):
    return mx.sym.BatchNorm(x, name="bn", **attrs)


def shared_bn():
    y = bn(mx.sym.var("data"))
    return mx.sym.relu(y) * y


def shared_sum():
    total = bn(mx.sym.var("data")) + mx.sym.var("other")
    return mx.sym.relu(total) * total


def output_bn():
    y = bn(mx.sym.var("data"))
    return mx.sym.Group([mx.sym.relu(y), y])


def output_sum():
    total = bn(mx.sym.var("data")) + mx.sym.var("other")
    return mx.sym.Group([mx.sym.relu(total), total])


def used_statistics():
    y = bn(mx.sym.var("data"), output_mean_var=True)
    return mx.sym.Group([mx.sym.relu(y[0]), y[1]])


def doubled():
    y = bn(mx.sym.var("data"))
    return mx.sym.Group([mx.sym.Activation(y + y, act_type="tanh"), mx.sym.relu(mx.sym.broadcast_add(y, y))])


@pytest.mark.parametrize("symbol", [shared_bn, shared_sum, output_bn, output_sum, used_statistics, doubled])
def test_nothing_is_fused_over_a_tensor_that_others_need(symbol):
    graph = graph_of(symbol())
    assert passes.bn_add_relu(passes.bn_relu(passes.add_relu(graph))) == graph


def test_a_batch_norm_that_others_read_is_left_out_of_the_sum():
    y, other = bn(mx.sym.var("data")), mx.sym.BatchNorm(mx.sym.var("more"), name="other")
    graph = passes.bn_add_relu(graph_of(mx.sym.Group([mx.sym.relu(y + other, name="r"), y])))
    assert graph.operators() == {"BatchNorm": 1, "BatchNormAddRelu": 1}
    assert graph["other_add_relu"].inputs[5] == Ref("bn")


def test_fold_bn_leaves_shared_weights_and_other_axes():
    data, weight = mx.sym.var("data"), mx.sym.var("w")
    conv = [mx.sym.Convolution(data, weight, kernel=(1, 1), num_filter=4, no_bias=True, name=n) for n in "ab"]
    shared = graph_of(mx.sym.BatchNorm(conv[0], name="x") + mx.sym.BatchNorm(conv[1], name="y"))
    assert passes.fold_bn(shared) == shared
    width = graph_of(mx.sym.BatchNorm(conv[0], axis=3))
    assert passes.fold_bn(width) == width


# --- that nothing changes ---


def run(graph, shapes, params, aux, data, label):
    """Outputs, then gradients and running statistics (canonical) of a training pass, on MXNet in fp32."""
    executor = create_executor("mxnet", graph, shapes)
    executor.set_params(params, aux)
    outputs = executor.forward(mx.nd.array(data)).asnumpy()
    executor.forward_backward(mx.nd.array(data), mx.nd.array(label))
    results = {name: executor.to_canonical(name, grad) for name, grad in executor.grads.items()}
    return {"output": outputs, **results, **{name: array.asnumpy() for name, array in executor.aux.items()}}


def largest_difference(results, expected):
    """Relative to the largest element of each tensor. Gradients that cancel to zero count against the largest of all
    tensors (a bias before a BatchNorm has the gradient 0 plus rounding)."""
    assert results.keys() == expected.keys()
    floor = 1e-3 * max(np.abs(array).max() for array in expected.values())
    return max(np.abs(results[k] - v).max() / max(np.abs(v).max(), floor) for k, v in expected.items())


def canonical_variables(graph, shapes, rng):
    """Values in the canonical layout, for a graph in any layout."""
    nhwc = passes.layout(graph, "NHWC")
    values = random_variables(nhwc, shapes, rng, classes=7, dtype=np.float32)
    params = {name: values[name] for name in graph.arguments if name not in shapes}
    return params, {name: values[name] for name in graph.aux}, values["data"], values["softmax_label"]


NETWORKS = {
    "basic block": (lambda: graph_of(small_resnet(False)), (3, 19, 23, 3)),
    "bottleneck": (lambda: graph_of(small_resnet(True)), (2, 21, 17, 4)),
    "bottleneck, NCHW": (lambda: graph_of(small_resnet(True, layout="NCHW")), (2, 3, 17, 21)),
    "resnet18_v1": (lambda: zoo_graph("resnet18_v1"), (3, 3, 45, 37)),
    "resnet18_v2": (lambda: zoo_graph("resnet18_v2"), (3, 3, 33, 47)),
    "resnet50_v1": (lambda: zoo_graph("resnet50_v1"), (2, 3, 33, 33)),
    "resnet50_v2": (lambda: zoo_graph("resnet50_v2"), (2, 3, 33, 33)),
    "mobilenet0_25": (lambda: zoo_graph("mobilenet0_25"), (3, 3, 39, 33)),
}


@pytest.mark.long(but=["basic*", "bottleneck*"])
@pytest.mark.usefixtures("narrow_networks")
@pytest.mark.parametrize("network", NETWORKS)
def test_outputs_and_gradients_after_each_pass(network, rng):
    build, data_shape = NETWORKS[network]
    before, shapes = build(), {"data": data_shape, "softmax_label": data_shape[:1]}
    variables = canonical_variables(before, shapes, rng)
    expected = run(before, shapes, *variables)
    graph = before
    for name, function in PASSES.items():
        after = function(graph)
        if after != graph:
            assert largest_difference(run(after, shapes, *variables), expected) < TOLERANCE, name
        graph = after
    assert len(passes.unfuse(graph)) == len(passes.layout(before, "NHWC"))


@pytest.mark.long(but=["mobilenet*"])
@pytest.mark.parametrize("name", ["vgg11_bn", "mobilenet_v2_0_25", "squeezenet1_0", "densenet121"])
def test_operators_that_no_pass_knows_go_through_unharmed(name, rng):
    """Concat, clip, Dropout, a Flatten of more than a pixel: their inputs get back their original layout."""
    scores = getattr(mx.gluon.model_zoo.vision, name)(classes=7)(mx.sym.var("data"))
    before, after = graph_of(scores), all_passes(graph_of(scores))
    size = (2, 3, 224, 224) if name in ("squeezenet1_0", "densenet121") else (2, 3, 64, 64)
    symbols = [mx.sym.load_json(passes.layout(passes.unfuse(g), "NCHW").to_json()) for g in (before, after)]
    shapes, _, aux_shapes = symbols[0].infer_shape(data=size)
    draw = lambda names, shapes: {  # noqa: E731
        n: mx.nd.array(rng.uniform(0.5, 1.5, s) if n.endswith(("gamma", "var")) else rng.normal(size=s) / 8)
        for n, s in zip(names, shapes, strict=True)
    }
    arguments, aux = draw(symbols[0].list_arguments(), shapes), draw(symbols[0].list_auxiliary_states(), aux_shapes)
    expected, result = (
        s.bind(mx.cpu(), {n: arguments[n] for n in s.list_arguments()}, aux_states=aux).forward()[0].asnumpy()
        for s in symbols
    )
    np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


# --- layout ---


@pytest.mark.parametrize("name", ["resnet50_v1", "resnet50_v2", "mobilenet1_0"])
def test_layout_there_and_back_is_the_same_graph(name):
    graph = zoo_graph(name)
    nhwc = passes.layout(graph, "NHWC")
    assert set(passes.weight_layouts(graph).values()) == {"OIHW"}
    assert set(passes.weight_layouts(nhwc).values()) == {"OHWI"}
    assert passes.layout(nhwc, "NHWC") == nhwc
    assert passes.layout(nhwc, "NCHW") == graph


def test_one_transpose_at_the_data_and_none_inside():
    graph = passes.layout(all_passes(graph_of(resnet(152))), "NCHW")
    assert [node.name for node in graph if node.op == "transpose"] == ["data_nchw"]
    assert {node["layout"] for node in graph if node.op in ("Convolution", "Pooling")} == {"NCHW"}
    assert {node["axis"] for node in graph if node.op.startswith("BatchNorm")} == {1}


@pytest.mark.parametrize("bottleneck", [False, True])
def test_nhwc_and_nchw_agree_in_float64(bottleneck, rng):
    """The reference executor runs both layouts as they are."""
    graph = all_passes(graph_of(small_resnet(bottleneck)))
    values = random_variables(graph, {"data": (3, 13, 18, 3)}, rng)
    nchw = passes.layout(graph, "NCHW")
    layouts = passes.weight_layouts(nchw)
    converted = {Ref(n): v.transpose(0, 3, 1, 2) if n in layouts else v for n, v in values.items()}
    expected = forward(graph, {Ref(name): value for name, value in values.items()}, training=True)
    result = forward(nchw, converted, training=True)
    np.testing.assert_allclose(result[nchw.outputs[0]], expected[graph.outputs[0]], rtol=1e-12)


def test_a_weight_that_is_read_otherwise_too_keeps_its_layout():
    weight = mx.sym.var("w", shape=(4, 3, 2, 2))
    conv = mx.sym.Convolution(mx.sym.var("data"), weight, kernel=(2, 2), num_filter=4, no_bias=True, name="conv")
    graph = passes.layout(graph_of(mx.sym.Group([conv, mx.sym.sum(weight)])), "NHWC")
    assert graph["w"].attrs["__shape__"] == "(4, 3, 2, 2)"
    assert graph[graph["conv"].inputs[1].node]["axes"] == (0, 2, 3, 1)
    alone = passes.layout(graph_of(conv), "NHWC")
    assert alone["w"].attrs["__shape__"] == "(4, 2, 2, 3)"


def test_the_data_may_change_its_layout_too(rng):
    """With the data in the new layout the graph has no transpose, and the result is equal. Data that has the layout
    already does not change.
    """
    nchw = graph_of(small_resnet(True, layout="NCHW"))
    nhwc = passes.layout(nchw, "NHWC", inputs=["data"])
    assert "transpose" not in nhwc.operators()
    assert passes.layout(nhwc, "NHWC", inputs=["data"]) == nhwc
    through_transpose = passes.layout(nhwc, "NCHW")
    assert passes.layout(through_transpose, "NHWC", inputs=["data"]) == nhwc
    values = random_variables(nchw, {"data": (2, 3, 13, 18)}, rng)
    converted = {"data", *passes.weight_layouts(nchw)}
    result = forward(nhwc, {Ref(name): value.transpose(0, 2, 3, 1) if name in converted else value
                            for name, value in values.items()}, training=True)
    expected = forward(nchw, {Ref(name): value for name, value in values.items()}, training=True)
    np.testing.assert_allclose(result[nhwc.outputs[0]], expected[nchw.outputs[0]], rtol=1e-12)


def test_unknown_layouts_and_inputs_are_refused():
    with pytest.raises(GraphError, match="no layout 'NWHC': choose NCHW or NHWC"):
        passes.layout(graph_of(small_resnet(False)), "NWHC")
    with pytest.raises(GraphError, match="no input 'images' to convert to NCHW"):
        passes.layout(graph_of(small_resnet(False)), "NCHW", inputs=["images"])


# --- fold_bn ---


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bottleneck", [False, True])
def test_folded_networks_give_the_same_inference(fused, bottleneck, rng):
    graph = graph_of(small_resnet(bottleneck))
    graph = all_passes(graph) if fused else graph
    shapes = {"data": (3, 25, 18, 3), "softmax_label": (3,)}
    params, aux, data, _ = canonical_variables(graph, shapes, rng)
    folded = passes.fold_bn(graph)
    assert counts(folded, "BatchNorm", "BatchNormRelu", "BatchNormAddRelu") == (0, 0, 0)
    outputs = []
    for g, p, a in ((graph, params, aux), (folded, passes.fold_bn_params(graph, params, aux), {})):
        executor = create_executor("mxnet", g, shapes)
        executor.set_params(p, a)
        outputs.append(executor.forward(mx.nd.array(data)).asnumpy())
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=TOLERANCE, atol=1e-7)
