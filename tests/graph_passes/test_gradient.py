"""The training step as one graph: its structure, and its gradients against MXNet's autograd and finite differences."""

import numpy as np
import pytest
from step_networks import fused, random_variables, rounding_decides, small_resnet

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, Node, Ref, passes
from graph_passes.executors import reference
from train import models
from train.models.resnet import resnet

SHAPES_224 = {"data": (2, 224, 224, 4)}


# --- structure ---


@pytest.mark.parametrize("depth, convolutions, adds", [(18, 20, 8), (50, 53, 16)])
def test_structure_of_resnet(depth, convolutions, adds):
    graph = fused(resnet(depth))
    step = passes.gradient(graph, SHAPES_224)
    kinds = step.operators()
    assert kinds["ConvolutionWgrad"] == convolutions
    assert kinds["ConvolutionDgrad"] == convolutions - 1, "nobody needs the gradient of the data"
    assert kinds["BatchNormAddReluTrain"] == kinds["BatchNormAddReluBackward"] == adds
    assert kinds["BatchNormReluTrain"] == kinds["BatchNormReluBackward"] == graph.operators()["BatchNormRelu"]
    # Every block's input has two readers: `adds` sums of gradients, each read by one BatchNorm or the max pooling.
    assert kinds["elemwise_add"] == adds
    merged = passes.gradient_add(step)
    assert merged.operators()["elemwise_add"] == 0
    assert sum(not node["single_grad"] for node in merged if "single_grad" in node.attrs) == adds
    assert merged.infer_shapes(SHAPES_224).keys() >= set(merged.outputs)


def test_outputs_have_the_shapes_of_their_parameters():
    graph = fused(resnet(50))
    step = passes.gradient_add(passes.gradient(graph, SHAPES_224))
    shapes, outputs = step.infer_shapes(SHAPES_224), passes.output_names(step)
    parameters = [name for name in graph.arguments if name not in ("data", "softmax_label")]
    assert set(outputs) == {"loss", "top1", "top5", *graph.aux, *(f"{name}_grad" for name in parameters)}
    for name in parameters:
        assert shapes[outputs[f"{name}_grad"]] == shapes[Ref(name)], name
    for name in graph.aux:
        assert shapes[outputs[name]] == shapes[Ref(name)], name


def test_last_layers_come_first_and_wgrad_before_dgrad():
    step = passes.gradient_add(passes.gradient(fused(resnet(50)), SHAPES_224))
    number = {node.name: i for i, node in enumerate(step)}
    ready = [number[ref.node] for name, ref in passes.output_names(step).items() if name.endswith("_grad")]
    assert ready == sorted(ready)
    convolutions = [node.name for node in step if node.op == "Convolution"]
    wgrads = [number[f"{name}_wgrad"] for name in convolutions]
    # The order of the forward pass, except for the projections, which come after the branch that they join
    main = [n for n, name in zip(wgrads, convolutions, strict=True) if "shortcut" not in name]
    assert main == sorted(main, reverse=True)
    assert all(number[f"{name}_wgrad"] < number[f"{name}_dgrad"] for name in convolutions if name != "stem_conv")
    # All weights of a stage are ready before any of the stage in front of it.
    stages = {stage: [number[f"{name}_wgrad"] for name in convolutions if name.startswith(f"stage{stage}")]
              for stage in "1234"}
    assert all(max(stages[a]) < min(stages[b]) for a, b in ("43", "32", "21"))


def test_step_survives_json():
    step = passes.gradient_add(passes.gradient(fused(resnet(18)), SHAPES_224))
    again = Graph.from_json(step.to_json())
    assert again == step
    assert passes.output_names(again) == passes.output_names(step)


def test_no_work_for_inputs_and_fixed_gamma():
    data = mx.sym.BatchNorm(mx.sym.Variable("data"), axis=3, fix_gamma=True, name="bn")
    x = mx.sym.FullyConnected(mx.sym.Flatten(data), num_hidden=3, name="fc")
    step = passes.gradient(Graph.from_json(mx.sym.SoftmaxOutput(x, name="softmax").tojson()), {"data": (2, 3, 3, 5)})
    grads = [name for name in passes.output_names(step) if name.endswith("_grad")]
    assert grads == ["fc_weight_grad", "fc_bias_grad", "bn_beta_grad"]
    plain = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    step = passes.gradient(Graph.from_json(mx.sym.SoftmaxOutput(plain).tojson()), {"data": (2, 5)})
    assert "FullyConnectedDgrad" not in step.operators()


# --- numerics ---


def mxnet_gradients(symbol, values):
    """From MXNet in float64: gradients of all parameters, running statistics after the step, probabilities."""
    arrays = {name: mx.nd.array(values[name], dtype="float64") for name in symbol.list_arguments()}
    aux = {name: mx.nd.array(values[name], dtype="float64") for name in symbol.list_auxiliary_states()}
    grads = {name: mx.nd.zeros_like(arrays[name]) for name in arrays.keys() - {"data", "softmax_label"}}
    executor = symbol.bind(mx.cpu(), arrays, args_grad=grads, aux_states=aux,
                           grad_req={name: "write" if name in grads else "null" for name in arrays})
    executor.forward(is_train=True)
    executor.backward()
    as_numpy = [{name: array.asnumpy() for name, array in arrays.items()} for arrays in (grads, aux)]
    return *as_numpy, executor.outputs[0].asnumpy()


def check_against_mxnet(graph, symbol, shapes, rng):
    """Gradients, running statistics, loss and counts of `graph` against MXNet's autograd on `symbol`.

    Both compute in float64, but MXNet keeps attributes such as eps and smooth_alpha in fp32, with a rounding error of
    6e-8. Errors are relative to the largest element of a tensor, or to a thousandth of the network's largest gradient:
    some are 0 except for rounding, such as that of a bias before a BatchNorm.
    """
    values = random_variables(graph, shapes, rng)
    grads, aux, probabilities = mxnet_gradients(symbol, values)
    results = reference.run(passes.gradient_add(passes.gradient(graph, shapes)), values)

    fixed = {node.inputs[1].node for node in graph if node.op.startswith("BatchNorm") and node["fix_gamma"]}
    assert not any(grads[name].any() for name in fixed)
    assert results.keys() == {f"{name}_grad" for name in grads.keys() - fixed} | {*aux, "loss", "top1", "top5"}
    floor = max(np.abs(grad).max() for grad in grads.values()) / 1e3
    for name in grads.keys() - fixed:
        error = np.abs(results[f"{name}_grad"] - grads[name]).max()
        assert error < 1e-6 * max(np.abs(grads[name]).max(), floor), name
    for name, value in aux.items():
        assert np.abs(results[name] - value).max() < 1e-6 * np.abs(value).max(), name

    label = values["softmax_label"].astype(int)
    own = probabilities[np.arange(len(label)), label][:, None]
    smoothing = graph[graph.outputs[0].node]["smooth_alpha"]
    target = np.full(probabilities.shape, smoothing / (probabilities.shape[1] - 1))
    target[np.arange(len(label)), label] = 1 - smoothing
    np.testing.assert_allclose(results["loss"], [-(target * np.log(probabilities)).sum()], rtol=1e-6)
    # among equal scores, such as 0 after a ReLU, the first ranks first
    equal = (probabilities == own) & (np.arange(probabilities.shape[1]) < label[:, None])
    rank = ((probabilities > own) | equal).sum(1)
    assert (results["top1"], results["top5"]) == ((rank < 1).sum(), (rank < 5).sum())


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_against_mxnet_autograd(bottleneck, fuse, rng):
    symbol = small_resnet(bottleneck, "NCHW")  # MXNet's CPU convolution does not support NHWC
    graph = fused(symbol) if fuse else Graph.from_json(symbol.tojson())
    check_against_mxnet(graph, symbol, {"data": (3, 3, 17, 13), "softmax_label": (3,)}, rng)


def zoo_network(name):
    """A network of MXNet's own zoo, NCHW, with a loss."""
    network = mx.gluon.model_zoo.vision.get_model(name, classes=7)
    return mx.sym.SoftmaxOutput(network(mx.sym.Variable("data")), name="softmax")


@pytest.mark.usefixtures("narrow_networks")
@pytest.mark.parametrize("name", ["resnet18_v2", "mobilenet0.25"])  # a ReLU with two readers; depthwise convolutions
def test_zoo_against_mxnet_autograd(name, rng):
    symbol = zoo_network(name)
    check_against_mxnet(fused(symbol), symbol, {"data": (2, 3, 37, 33), "softmax_label": (2,)}, rng)


# Basic blocks and bottlenecks (an eighth as wide; groups need a quarter), grouped convolutions, shortcuts with average
# pooling, BatchNorm before the convolutions
@pytest.mark.long(but=["resnet18*", "resnet50_v2*"])
@pytest.mark.parametrize("name, width", [
    ("resnet18", 8), ("resnet50", 8), ("resnext50_32x4d", 16), ("resnet50d", 8), ("resnet50_v2", 8)
])
def test_resnet_against_mxnet_autograd(name, width, rng, monkeypatch):
    monkeypatch.setattr("train.models.resnet.FIRST_WIDTH", width)
    graph = passes.layout(fused(models.create(name, 7, label_smoothing=0.1).symbol), "NCHW")
    symbol = mx.sym.load_json(passes.unfuse(graph).to_json())
    check_against_mxnet(graph, symbol, {"data": (2, 33, 35, 3), "softmax_label": (2,)}, rng)


@pytest.mark.parametrize("bottleneck", [False, True])
def test_fused_and_unfused_agree(bottleneck, rng):
    """float64, NHWC: the same sums in another order."""
    shapes = {"data": (3, 15, 11, 3), "softmax_label": (3,)}
    plain = Graph.from_json(small_resnet(bottleneck).tojson())
    graph = fused(small_resnet(bottleneck))
    values = random_variables(plain, shapes, rng)
    steps = [passes.gradient(plain, shapes), passes.gradient(graph, shapes)]
    results = [reference.run(step, values) for step in (*steps, *map(passes.gradient_add, steps))]
    for name in results[0]:
        scale = np.abs(results[0][name]).max() + 1e-3
        for other in results[1:]:
            assert np.abs(other[name] - results[0][name]).max() < 1e-11 * scale, name


@pytest.mark.parametrize("bottleneck", [False, True])
def test_against_finite_differences(bottleneck, rng):
    """Along a random direction for every parameter, float64: (loss(p + h d) - loss(p - h d)) / 2h = grad . d.

    Rounding adds 1e-8. Where a ReLU or a maximum turns within h, the two sides differ: values that are so near to a
    kink are drawn again. A direction that leads to one all the same is rare, and then another one decides.
    """
    shapes = {"data": (3, 13, 15, 3), "softmax_label": (3,)}
    symbol = small_resnet(bottleneck)
    graph = fused(symbol)
    step = passes.gradient_add(passes.gradient(graph, shapes))
    values = random_variables(graph, shapes, rng)
    while rounding_decides(Graph.from_json(symbol.tojson()), values, margin=1e-5):
        values = random_variables(graph, shapes, rng)
    results = reference.run(step, values)
    loss_only = Graph(step, [passes.output_names(step)["loss"]], {"output_names": ["list_str", ["loss"]]})
    h = 1e-7

    def agrees(name):
        direction = rng.standard_normal(values[name].shape)
        up, down = (
            reference.run(loss_only, {**values, name: values[name] + move * direction})["loss"][0]
            for move in (h, -h)
        )
        expected = (results[f"{name}_grad"] * direction).sum() * 3  # the gradient is of the mean over the batch of 3
        return abs((up - down) / (2 * h) - expected) < 1e-6 * max(1, abs(expected))

    names = [name.removesuffix("_grad") for name in results if name.endswith("_grad")]
    assert len(names) > 20
    wrong = [name for name in names if not agrees(name) and not agrees(name)]
    assert not wrong


@pytest.mark.parametrize("pool", [
    {"pool_type": "avg", "kernel": (3, 2), "stride": (2, 1), "pad": (1, 0)},
    {"pool_type": "avg", "kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "count_include_pad": False},
    {"pool_type": "sum", "kernel": (2, 2), "stride": (2, 2)},
    {"pool_type": "max", "kernel": (2, 3), "stride": (1, 2), "pad": (0, 1)},
    {"pool_type": "max", "kernel": (3, 3), "stride": (2, 2), "pooling_convention": "full"},
])
def test_shared_weights_groups_transposes_and_poolings(pool, rng):
    """Features that ResNets lack: a weight and a tensor read several times, groups, dilation, ReLU without
    BatchNorm."""
    weight = mx.sym.Variable("shared_weight")
    x = mx.sym.Variable("data")
    for i in range(2):
        x = mx.sym.Convolution(x, weight, num_filter=4, kernel=(3, 3), pad=(2, 2), dilate=(2, 2), num_group=2,
                               no_bias=True, name=f"conv{i}")
    y = mx.sym.Activation(mx.sym.elemwise_add(x, x), act_type="relu", name="act")
    y = mx.sym.Pooling(mx.sym.elemwise_add(mx.sym.elemwise_add(x, y), x), name="pooling", **pool)
    y = mx.sym.FullyConnected(mx.sym.transpose(y, axes=(0, 2, 3, 1)), num_hidden=7, name="fc")
    symbol = mx.sym.SoftmaxOutput(y, grad_scale=0.5, name="softmax")
    shapes = {"data": (2, 4, 9, 7), "softmax_label": (2,)}
    check_against_mxnet(passes.add_relu(Graph.from_json(symbol.tojson())), symbol, shapes, rng)


# --- what has no gradient ---


def softmax(x):
    return mx.sym.SoftmaxOutput(mx.sym.Flatten(x), name="softmax")


@pytest.mark.parametrize("build, message", [
    (lambda x: mx.sym.Flatten(x, name="flat"), "the graph ends in Flatten 'flat', not in one SoftmaxOutput"),
    (lambda x: softmax(mx.sym.smooth_l1(x, name="t")), "operator smooth_l1 of node 't' has no shape rule"),
    (lambda x: softmax(mx.sym.BatchNorm(x, use_global_stats=True, name="bn")), "BatchNorm 'bn' has use_global_stats"),
    (lambda x: softmax(mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), name="p")), r"Pooling 'p' \(pool_type=max"),
    (lambda x: mx.sym.SoftmaxOutput(mx.sym.Flatten(x), normalization="valid", name="s"), "SoftmaxOutput 's'"),
])
def test_what_has_no_gradient_is_named(build, message):
    x = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=2, kernel=(1, 1), name="conv")
    graph = Graph.from_json(build(x).tojson())
    with pytest.raises(GraphError, match=message):
        passes.gradient(graph, {"data": (1, 2, 4, 4)})


def test_unknown_operator_is_named():
    nodes = [Node("null", "data"), Node("null", "w"), Node("elemwise_sub", "less", (Ref("data"), Ref("w"))),
             Node("null", "label"), Node("SoftmaxOutput", "softmax", (Ref("less"), Ref("label")))]
    with pytest.raises(GraphError, match="elemwise_sub"):
        passes.gradient(Graph(nodes, [Ref("softmax")]), {"data": (2, 3)})
