"""Networks other than ResNets: all families of MXNet's zoo, and small ones with parts of current networks, against
MXNet's autograd; in both layouts, and on the executors that need no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from step_networks import convnext, efficient, elements, mobile, random_variables
from test_gradient import check_against_mxnet

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, Ref, onnx_writer, passes
from graph_passes.executors import create_executor, reference
from train.models import blocks, inverted_residual, regnet, se_resnet
from train.models import convnext as convnext_family

# Name -> the smallest image size, in pixels, for which its poolings leave at least one pixel.
ZOO = {"alexnet": 67, "densenet121": 33, "inceptionv3": 79, "mobilenet0.25": 33, "mobilenetv2_0.25": 33,
       "resnet18_v1": 33, "resnet18_v2": 33, "squeezenet1.0": 35, "squeezenet1.1": 35, "vgg11": 33, "vgg11_bn": 33}
SLOW = ("densenet121", "inceptionv3")


OWN = {"efficient": efficient, "mobile": mobile, "convnext": convnext}


def zoo_graph(name: str) -> Graph:
    """The network with a loss, and without dropout, for which MXNet draws its own random numbers. The last pooling
    covers all pixels, so small images suffice."""
    zoo = mx.gluon.model_zoo.vision
    network = (zoo.DenseNet(8, 4, [2, 3, 2, 2], classes=7) if name == "densenet121" else  # with few channels
               zoo.get_model(name, classes=7))
    symbol = mx.sym.SoftmaxOutput(network(mx.sym.Variable("data")), normalization="batch", name="softmax")
    graph = passes.remove_dropout(Graph.from_json(symbol.tojson()))
    return graph.rewrite(lambda node: node.with_attrs(global_pool=True) if node.op == "Pooling" and node["pool_type"]
                         == "avg" and min(node["kernel"]) > 6 else None)


def shapes_of(name: str, layout: str) -> dict[str, tuple[int, ...]]:
    pixels = ZOO.get(name, 9), ZOO.get(name, 9) + 2
    return {"data": (2, *pixels, 3) if layout == "NHWC" else (2, 3, *pixels), "softmax_label": (2,)}


@pytest.mark.long(but=["mobilenetv2*", "vgg11_bn"])
@pytest.mark.parametrize("name", ZOO)
def test_zoo_against_mxnet(name: str, rng: np.random.Generator) -> None:
    """Gradients of all parameters."""
    graph = zoo_graph(name)
    check_against_mxnet(graph, mx.sym.load_json(graph.to_json()), shapes_of(name, "NCHW"), rng)


@pytest.mark.parametrize("name", OWN)
def test_parts_against_mxnet(name: str, rng: np.random.Generator) -> None:
    symbol = OWN[name]("NCHW")
    check_against_mxnet(Graph.from_json(symbol.tojson()), symbol, shapes_of(name, "NCHW"), rng)


def of_stages(act: str, blocks: list[tuple[Any, ...]], **settings: Any) -> Any:
    """A network of inverted residual blocks, each (channels, expansion, kernel, stride, squeeze, fused)."""
    made, inputs = [], 8
    for number, (filters, expansion, kernel, stride, squeeze, fused) in enumerate(blocks, start=1):
        made.append(inverted_residual.Block(f"stage1_block{number}", inputs, inputs * expansion, filters, kernel,
                                            stride, act, squeeze, fused))
        inputs = filters
    return inverted_residual.network(inverted_residual.Plan([made], 8, 16, act, **settings), 7)


SQUEEZE = blocks.SqueezeExcitation(3, "silu")
FAMILIES = {
    "efficientnet": lambda: of_stages("silu", [(8, 1, 3, 1, SQUEEZE, False), (8, 4, 5, 2, SQUEEZE, False),
                                               (8, 2, 3, 1, SQUEEZE, False)]),
    "efficientnet_v2": lambda: of_stages("silu", [(8, 1, 3, 1, None, True), (12, 4, 3, 2, None, True),
                                                  (12, 4, 3, 1, SQUEEZE, False)], norm=blocks.Norm(eps=1e-3)),
    "tf_efficientnet_lite": lambda: of_stages("relu6", [(8, 1, 3, 1, None, False), (12, 6, 5, 2, None, False)],
                                              is_reversed=True),
    "mobilenet_v3": lambda: of_stages("hard_swish", [
        (8, 2, 5, 1, blocks.SqueezeExcitation(8, gate="hard_sigmoid"), False)], hidden=12),
    "regnet": lambda: regnet.regnet("regnet_y_400mf", 7),
    "convnext": lambda: convnext_family.convnext("convnext_tiny", 7),
    "seresnet": lambda: se_resnet.MODELS["seresnet18"](7),
    "resnetrs": lambda: se_resnet.MODELS["resnetrs50"](7),
}


@pytest.mark.long(but=["efficientnet", "tf_efficientnet_lite", "mobilenet_v3", "convnext"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_against_mxnet(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all parameters, in narrow networks."""
    monkeypatch.setitem(regnet.DESIGNS, "regnet_y_400mf", regnet.Design(4, 8, 8.0, 2.0, 8))
    monkeypatch.setitem(convnext_family.SIZES, "convnext_tiny", (8, (1, 2), 0))
    monkeypatch.setattr("train.models.resnet.FIRST_WIDTH", 4)
    graph = passes.layout(Graph.from_json(FAMILIES[name]().tojson()), "NCHW", inputs=["data"])
    turned = [graph[node.inputs[0].node].op for node in graph if node.op == "transpose"]
    assert set(turned) <= {"Reshape"}, "only layer scale's factors are turned"
    shapes = {"data": (2, 3, 27, 34), "softmax_label": (2,)}
    check_against_mxnet(graph, mx.sym.load_json(graph.to_json()), shapes, rng)


def in_nhwc(name: str) -> tuple[Graph, Graph]:
    """The network in NCHW, and the result of the pass `layout`."""
    nchw = Graph.from_json(OWN[name]("NCHW").tojson()) if name in OWN else zoo_graph(name)
    return nchw, passes.layout(nchw, "NHWC", inputs=["data"])


@pytest.mark.parametrize("name", [*OWN, *(name for name in ZOO if name not in SLOW)])
def test_in_the_other_layout(name: str, rng: np.random.Generator) -> None:
    """The probabilities are equal, and there are no transposes except before a classifier that reads several pixels."""
    nchw, nhwc = in_nhwc(name)
    assert nhwc.operators()["transpose"] == (name in ("alexnet", "vgg11", "vgg11_bn"))
    values = random_variables(nchw, shapes_of(name, "NCHW"), rng)
    weights = passes.weight_layouts(nchw).keys() | {"data"}
    moved = {each: value.transpose(0, 2, 3, 1) if each in weights else value for each, value in values.items()}
    results = [reference.forward(graph, {Ref(each): value for each, value in given.items()}, training=False)
               for graph, given in ((nchw, values), (nhwc, moved))]
    wanted, found = (result[graph.outputs[0]] for result, graph in zip(results, (nchw, nhwc), strict=True))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", OWN)
def test_executors_agree(name: str, rng: np.random.Generator) -> None:
    """A training step of NHWC images in fp32: probabilities, gradients, running statistics."""
    graph = Graph.from_json(OWN[name]("NHWC").tojson())
    shapes = shapes_of(name, "NHWC")
    values = {each: value.astype("f") for each, value in random_variables(graph, shapes, rng).items()}
    made = [create_executor(kind, graph, shapes) for kind in ("mxnet", "reference")]
    results = []
    for executor in made:
        params = {each: values[each] for each in executor.params}
        executor.set_params(params, {each: values[each] for each in graph.aux})
        data, label = (mx.nd.array(values[each]) for each in ("data", "softmax_label"))
        executor.forward_backward(data, label)
        gradients = {each: executor.to_canonical(each, array) for each, array in executor.grads.items()}
        results.append((gradients, executor.read_metrics()))
    (one, metrics), (other, others) = results
    assert metrics.count == others.count == 2 and metrics.loss_sum == pytest.approx(others.loss_sum, rel=1e-5)
    largest = max(np.abs(each).max() for each in other.values())
    for each in other:
        np.testing.assert_allclose(one[each], other[each], rtol=0, atol=1e-5 * largest, err_msg=each)


@pytest.mark.long(but=["efficient", "mobile", "convnext", "elements", "mobilenetv2*"])
@pytest.mark.parametrize("name", [*OWN, "elements", *(name for name in ZOO if name != "densenet121")])
def test_onnx(name: str, rng: np.random.Generator) -> None:
    """ONNX Runtime gives the same probabilities."""
    onnxruntime = pytest.importorskip("onnxruntime")
    networks = {**OWN, "elements": elements}
    graph = Graph.from_json(networks[name]("NCHW").tojson()) if name in networks else zoo_graph(name)
    values = {each: value.astype("f") for each, value in random_variables(graph, shapes_of(name, "NCHW"), rng).items()}
    wanted = reference.forward(graph, {Ref(each): value for each, value in values.items()}, training=False)
    arrays = {each: value for each, value in values.items() if each not in ("data", "softmax_label")}
    model = onnx_writer.to_onnx(graph, arrays, values["data"].shape[1:])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"data": values["data"]})
    np.testing.assert_allclose(found, wanted[graph.outputs[0]], rtol=0, atol=1e-4)  # fp32 in another order


@pytest.mark.parametrize("symbol, sentence", [
    (lambda x: mx.sym.Concat(x, mx.sym.slice_axis(x, axis=2, begin=0, end=2), dim=1, name="y"),
     r"Concat 'y' joins the shapes \(1, 2, 4, 4\) and \(1, 2, 2, 4\) along dimension 1"),
    (lambda x: mx.sym.slice_axis(x, axis=1, begin=1, end=5, name="y"), "slice_axis 'y' takes 1 to 5 of 2 along"),
    (lambda x: mx.sym.broadcast_mul(x, mx.sym.slice_axis(x, axis=3, begin=0, end=3), name="y"),
     r"broadcast_mul 'y' has inputs of the shapes \(1, 2, 4, 4\) and \(1, 2, 4, 3\), which do not fit"),
    (lambda x: mx.sym.mean(x, axis=1, exclude=True, name="y"), "mean 'y' has axis=.1,., exclude=True: leave out"),
    (lambda x: mx.sym.LayerNorm(x, axis=4, name="y"), "LayerNorm 'y' has axis=4, but its data has 4 dimensions"),
    (lambda x: mx.sym.LeakyReLU(x, act_type="rrelu", name="y"), "LeakyReLU with act_type='rrelu' draws its slopes"),
])
def test_mistakes(symbol: Any, sentence: str) -> None:
    made = symbol(mx.sym.var("data"))
    with pytest.raises(GraphError, match=sentence):
        Graph.from_json(made.tojson()).infer_shapes({"data": (1, 2, 4, 4)})
