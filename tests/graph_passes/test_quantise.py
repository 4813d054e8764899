"""INT8: the operators' results, to the bit, and the pass's effect on networks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from graph_passes import VARIABLE, Graph, GraphError, Node, Ref, passes, pipeline
from graph_passes.executors import reference
from graph_passes.operators.quantised import LARGEST, dequantised, int8_convolution, quantised, requantised
from graph_passes.passes.quantise import Kept, in_floats, layers, quantise, quantise_params, weight_scales
from train import models
from train.models import blocks

CLASSES, SIZE = 7, 40
UNIT = dict.fromkeys  # a scale for each tensor, for tests that do not depend on values


def int8(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-127, 128, shape, np.int8)


def convolution(**attrs: object) -> Node:
    return Node("QuantisedConvolution", "y", (), {"layout": "NHWC", "kernel": (1, 1), "num_filter": 1, "scale": 1.0,
                                                  **attrs})


# --- the operators ---


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("groups", [1, 3])
def test_convolution_sums_exactly(layout: str, groups: int, rng: np.random.Generator) -> None:
    node = convolution(kernel=(3, 2), num_filter=6, num_group=groups, stride=(2, 1), pad=(1, 0), dilate=(1, 2),
                       layout=layout)
    x, weight = int8(rng, 2, 7, 9, 9), int8(rng, 6, 3, 2, 9 // groups)
    padded = np.pad(x.astype(np.int64), ((0, 0), (1, 1), (0, 0), (0, 0)))
    want = np.zeros((2, 4, 7, 6), np.int64)
    for row, column, k in np.ndindex(4, 7, 6):
        channels = slice(k // (6 // groups) * (9 // groups), (k // (6 // groups) + 1) * (9 // groups))
        window = padded[:, 2 * row : 2 * row + 3, column : column + 3 : 2, channels]
        want[:, row, column, k] = (window * weight[k].astype(np.int64)).sum(axis=(1, 2, 3))
    if layout == "NCHW":
        x, weight, want = (array.transpose(0, 3, 1, 2) for array in (x, weight, want))
    found = int8_convolution(node, x, weight)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, want)


def test_sums_beyond_24_bits_are_exact() -> None:
    """5,000 products of 127 * 127 and one of 1: 80,645,001, which fp32 does not hold."""
    node = convolution(num_filter=1)
    x = np.full((1, 1, 1, 5001), 127, np.int8)
    weight = np.full((1, 1, 1, 5001), 127, np.int8)
    x[..., 7] = weight[..., 7] = 1
    assert int8_convolution(node, x, weight).item() == 5000 * 127**2 + 1


def fp32(x: Fraction) -> Fraction:
    """A positive or negative number of moderate size to the nearest fp32, ties to even."""
    if not x:
        return x
    exponent = 0
    while abs(x) / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    while abs(x) / Fraction(2) ** exponent < 2**23:
        exponent -= 1
    return round(x / Fraction(2) ** exponent) * Fraction(2) ** exponent  # Python rounds ties to even


@pytest.mark.long(but=["*-True"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_the_epilogue_rounds_in_the_order_that_is_written(relu: bool, dtype: str, rng: np.random.Generator) -> None:
    """Against rational numbers, rounded to fp32 after each operation: no fma, no double rounding."""
    node = convolution(relu=relu, no_addend=False, addend_scale=0.031, scale=0.047, dtype=dtype)
    accumulator = rng.integers(-(2**26), 2**26, 400, np.int32)
    accumulator[:100] //= 2**12
    multiplier = rng.uniform(1e-6, 1e-5, 400).astype(np.float32)
    addend = int8(rng, 400)
    found = requantised(node, accumulator, multiplier, addend)
    share = Fraction(float(np.float32(0.031 / 0.047)))
    for i, value in enumerate(found):
        product = fp32(fp32(Fraction(int(accumulator[i]))) * Fraction(float(multiplier[i])))
        v = fp32(product + fp32(int(addend[i]) * share))
        v = max(v, Fraction(0)) if relu else v
        assert Fraction(float(value)) == (min(max(round(v), -127), 127) if dtype == "int8" else v)
    assert found.dtype == dtype and (found < 0).any() != relu


def test_ties_go_to_the_even_integer_and_what_is_too_large_to_127() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 128, 1e9, -127.6, -1e9, np.float32(0.5) - 2**-25])
    want = [0, 2, 2, 0, -2, 126, 127, 127, 127, -127, -127, 0]
    assert quantised(x * 0.25, 0.25).tolist() == want
    assert quantised(x * 0.25, 0.25).dtype == np.int8
    assert dequantised(np.array([-127, 3], np.int8), 0.25).tolist() == [-31.75, 0.75]


def pooling(**attrs: object) -> Node:
    return Node("QuantisedPooling", "y", (), {"layout": "NHWC", "data_scale": 0.5, "scale": 0.25, **attrs})


def test_pooling_of_integers(rng: np.random.Generator) -> None:
    x = int8(rng, 2, 5, 5, 3)
    window = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}
    (largest,) = reference.evaluate(pooling(pool_type="max", **window), [x])
    assert largest.dtype == np.int8 and largest[0, 0, 0, 0] == x[0, :2, :2, 0].max()
    mean = pooling(pool_type="avg", count_include_pad=False, **window)
    (found,) = reference.evaluate(mean, [x])
    corner = np.float32(x[0, :2, :2, 0].sum(dtype=np.int32)) * np.float32(2 / 4)  # 4 pixels are in the image
    inner = np.float32(x[1, 1:4, 1:4, 2].sum(dtype=np.int32)) * np.float32(2 / 9)
    for value, v in ((found[0, 0, 0, 0], corner), (found[1, 1, 1, 2], inner)):
        assert value == min(max(np.rint(v), -127), 127)
    (floats,) = reference.evaluate(pooling(pool_type="avg", global_pool=True, dtype="float32", scale=1.0), [x])
    np.testing.assert_array_equal(floats[:, 0, 0], x.sum(axis=(1, 2)).astype(np.float32) * np.float32(0.02))


# --- the pass ---


def network(name: str) -> tuple[Graph, dict[str, np.ndarray]]:
    """A graph and its folded parameters, with BatchNorms that are not the identity."""
    made = models.create(name, CLASSES)
    params, aux = made.initial_values(3, zero_init_residual=False)
    rng = np.random.default_rng(5)
    for key, array in params.items():
        if key.endswith(("_beta", "_bias")):
            params[key] = rng.uniform(-0.5, 0.5, array.shape).astype(np.float32)
    params["classifier_weight"] = 0.3 * rng.standard_normal(params["classifier_weight"].shape, np.float32)
    aux = {key: rng.uniform(0.5, 1.5, value.shape).astype(np.float32) * key.endswith("_var") + 0.1
           for key, value in aux.items()}
    return made.graph, passes.fold_bn_params(pipeline.run(pipeline.FUSED, made.graph), params, aux) | aux


def before(graph: Graph) -> Graph:
    """The input of `quantise`."""
    listed = pipeline.quantised_passes("float32", {})
    return pipeline.run({name: each for name, each in listed.items() if name != "quantise"}, graph)


def values(graph: Graph, params: dict[str, np.ndarray], images: np.ndarray) -> dict[str, np.ndarray]:
    """All tensors of a graph, by the names of their nodes."""
    variables = {**params, "data": images, "softmax_label": np.zeros(len(images))}
    found = reference.forward(graph, {Ref(name): variables[name] for name in graph.variables}, training=False)
    return {ref.node: array for ref, array in found.items() if not ref.output}


def scales_of(tensors: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(np.abs(array).max()) / 127 for name, array in tensors.items()}


@pytest.mark.parametrize(("name", "convolutions", "pools"), [("resnet18", 20, 2), ("resnet50", 53, 2),
                                                             ("resnext50_32x4d", 53, 2), ("resnet50d", 55, 5)])
def test_all_of_a_residual_network_but_its_classifier_is_int8(name: str, convolutions: int, pools: int) -> None:
    graph = models.create(name, CLASSES).graph
    folded = before(graph)
    result = quantise(folded, UNIT(folded.nodes, 0.1))
    found = result.operators()
    assert (found["QuantisedConvolution"], found["QuantisedPooling"], found["Quantise"]) == (convolutions, pools, 1)
    assert [node.op for node in in_floats(result) if node.op != "Flatten"] == ["FullyConnected", "SoftmaxOutput"]
    assert not found["Dequantise"]  # the mean before the classifier outputs floats itself
    assert sum(node.get("no_addend") is False for node in result) == sum(n.op == "ConvolutionAddRelu" for n in folded)
    shapes = result.infer_shapes({"data": (2, SIZE, SIZE, 3)})
    dtypes = passes.tensor_dtypes(result)
    for layer in layers(result):
        kinds = [dtypes[Ref(each)] for each in (layer.weight, layer.multiplier, layer.bias)]
        assert kinds == ["int8", "float32", "int32"] and shapes[Ref(layer.multiplier)] == shapes[Ref(layer.bias)]
    assert Graph.from_json(result.to_json()) == result


def test_what_is_to_stay_in_floats_does() -> None:
    folded = before(models.create("resnet18", CLASSES).graph)
    scales = UNIT(folded.nodes, 0.1)
    first = quantise(folded, scales, Kept(first=True))
    assert first["stem_bn_relu"].op == "ConvolutionRelu" and first["stem_pool"].op == "Pooling"
    assert first["stem_pool_int8"].inputs == (Ref("stem_pool"),)
    whole = quantise(folded, scales, Kept(classifier=False))
    assert whole["classifier"].op == "QuantisedFullyConnected" and whole["classifier"]["dtype"] == "float32"


def test_operators_without_int8_form_stay_and_are_listed() -> None:
    folded = before(models.create("resnet50_v2", CLASSES).graph)
    result = quantise(folded, UNIT(folded.nodes, 0.1))
    kept = [node.op for node in in_floats(result)]
    assert kept.count("BatchNormRelu") == folded.operators()["BatchNormRelu"] > 10
    assert kept.count("elemwise_add") == folded.operators()["elemwise_add"] == 16
    # A convolution outputs floats if only a sum or a BatchNorm reads it: nothing is rounded to 8 bits in vain.
    assert result.operators()["Dequantise"] <= 1


def test_relu6_is_a_part_of_its_convolution() -> None:
    """Convolutions read what it ends, and the mean before the classifier."""
    graph = models.create("tf_efficientnet_lite0", CLASSES).graph
    folded = before(graph)
    assert "clip" not in folded.operators()
    result = quantise(folded, UNIT(folded.nodes, 0.04))
    assert result.operators()["QuantisedConvolution"] == graph.operators()["Convolution"] == 49
    assert sum(node.get("relu") is True for node in result) == graph.operators()["clip"] == 33
    assert {node.op for node in in_floats(result)} == {"reverse", "elemwise_add", "Flatten", "FullyConnected",
                                                       "SoftmaxOutput"}


@pytest.mark.parametrize("limit", [6.0, 4.5])
def test_integers_end_where_relu6_and_its_limit_do(limit: float, rng: np.random.Generator) -> None:
    x = blocks.conv(blocks.mx.sym.Variable("data"), "first", 8, 3, bias=True)
    x = blocks.conv(blocks.activation(x, "act", "relu6"), "second", 8, 1, bias=True)
    graph = Graph.from_json(blocks.head(x, CLASSES, 0.0).tojson())
    shapes = graph.infer_shapes({"data": (2, 9, 9, 3)})
    params = {name: rng.standard_normal(shapes[Ref(name)]).astype(np.float32) for name in graph.arguments
              if name not in ("data", "softmax_label")}
    exact = values(before(graph), params, rng.standard_normal((2, 9, 9, 3), np.float32))
    scales = scales_of(exact) | {"act": limit / LARGEST}
    result = quantise(before(graph), scales)
    found = values(result, quantise_params(before(graph), params, scales), exact["data"])["act"]
    assert found.dtype == np.int8 and (found == LARGEST).any() and not found.min()
    noise = found * (limit / LARGEST) - exact["act"].clip(0, limit)
    weight, data = params["first_weight"], exact["data"]
    # Rounding by steps has a variance of step^2 / 12; each sum has 27 products of a rounded weight and a rounded pixel.
    steps = {"data": scales["data"], "weight": np.abs(weight).max() / LARGEST}
    variance = 27 * ((steps["data"] * weight.std()) ** 2 + (steps["weight"] * data.std()) ** 2) / 12
    assert np.abs(noise).max() < 7 * np.sqrt(variance) + limit / LARGEST  # seven deviations, and the output's own step


def decibel(exact: np.ndarray, found: np.ndarray) -> float:
    """Signal-to-noise ratio in dB."""
    return float(10 * np.log10((exact**2).sum() / ((found - exact) ** 2).sum()))


@pytest.mark.long(but=["*resnet18", "kept0-resnet50_v2"])
@pytest.mark.usefixtures("narrow_networks")
@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d", "resnet50d", "resnet50_v2"])
@pytest.mark.parametrize("kept", [Kept(), Kept(first=True, classifier=False)])
def test_a_quantised_network_computes_the_same_but_for_noise(name: str, kept: Kept) -> None:
    """With one drawing of weights and images. 8 bits alone give about 40 dB, and noise adds up over the layers."""
    graph, params = network(name)
    folded = before(graph)
    exact = values(folded, params, np.random.default_rng(7).standard_normal((4, SIZE, SIZE, 3), np.float32))
    scales = scales_of(exact)
    result = quantise(folded, scales, kept)
    found = values(result, quantise_params(folded, params, scales, kept), exact["data"])
    for node in result:
        if node.op.startswith("Quantised"):
            assert decibel(exact[node.name], found[node.name] * np.float32(node["scale"])) > 16, node.name
            assert found[node.name].dtype == node["dtype"]
    assert decibel(exact["classifier"], found["classifier"]) > 16


@pytest.mark.usefixtures("narrow_networks")
@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d"])
def test_a_layer_errs_by_no_more_than_its_roundings(name: str, rng: np.random.Generator) -> None:
    """Half an integer each from its weights, its bias and its output, given equal integers at its input."""
    graph, params = network(name)
    folded = before(graph)
    exact = values(folded, params, rng.standard_normal((2, SIZE, SIZE, 3), np.float32))
    scales = scales_of(exact)
    result = quantise(folded, scales)
    integers = quantise_params(folded, params, scales)
    found = values(result, integers, exact["data"])
    checked = 0
    for layer in layers(result):
        before_it = [found[ref.node] * np.float32(result[ref.node]["scale"])
                     for ref in (layer.node.inputs[0], *layer.node.inputs[4:])]
        node, scale = folded[layer.node.name], layer.node["scale"]
        weight, bias = params[layer.weight], params[layer.bias]
        (want,) = reference.evaluate(node, [before_it[0], weight, bias, *before_it[1:]])
        of_weight = weight_scales(weight, bias, layer.data_scale)
        half = np.broadcast_to(of_weight.reshape(-1, 1, 1, 1) / 2, weight.shape).astype(np.float32)
        addend = [np.zeros_like(each) for each in before_it[1:]]
        (bound,) = reference.evaluate(node, [np.abs(before_it[0]), half, of_weight * layer.data_scale / 2, *addend])
        error = np.abs(found[node.name] * np.float32(scale) - want.clip(-LARGEST * scale, LARGEST * scale))
        assert (error <= bound + scale / 2 + 1e-3 * scale).all(), node.name  # fp32 sums: 1e-3 of an integer
        checked += 1
    assert checked >= 20


def test_bias_of_a_channel_without_weights_fits_its_integer() -> None:
    weight, bias = np.array([[127.0], [0.0], [1e-30]]), np.array([1.0, 2.0, -3.0])
    scale = weight_scales(weight, bias, data_scale=1e-3)
    assert scale[0] == 1
    assert (np.abs(bias / (1e-3 * scale)) <= 2**30 * (1 + 1e-12)).all()
    assert weight_scales(np.zeros((2, 3)), None, 1.0).tolist() == [1, 1]


def test_a_graph_that_is_not_folded_is_refused() -> None:
    graph = pipeline.run(pipeline.FUSED, models.create("resnet18", CLASSES).graph)
    with pytest.raises(GraphError, match="not folded: BatchNorm 'stem_bn_relu' .* run fold_bn before quantise"):
        quantise(graph, {})


def test_a_tensor_without_scale_is_named() -> None:
    folded = before(models.create("resnet18", CLASSES).graph)
    scales = UNIT(folded.nodes, 0.1)
    del scales["stem_bn_relu"]
    with pytest.raises(GraphError, match="no scale for the tensor 'stem_bn_relu', which is to be int8: calibrate"):
        quantise(folded, scales)


@pytest.mark.parametrize("scale", [0, -1, "nan", "inf"])
def test_a_scale_that_is_none_is_refused(scale: object) -> None:
    with pytest.raises(GraphError, match="Quantise 'y' has scale="):
        Graph([Node(VARIABLE, "x"), Node("Quantise", "y", (Ref("x"),), {"scale": scale})], [Ref("y")])
