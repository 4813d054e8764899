"""Which tensors are 16-bit, and the effect on the gradients (16-bit tensors rounded, arithmetic in fp32)."""

import numpy as np
import pytest
from step_networks import fused, random_variables, small_resnet

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, Ref, passes
from graph_passes.executors.reference import evaluate, run
from train.models.resnet import resnet

SHAPES = {"data": (4, 33, 31, 3), "softmax_label": (4,)}


def rounded(array, dtype):
    """fp32 values rounded to `dtype`, to nearest with ties to even."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = array.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    return array


def run_rounded(step, variables):
    """The step's values, with every tensor rounded to its own dtype once it is written."""
    dtypes = passes.tensor_dtypes(step)
    values = {Ref(name): rounded(array, dtypes[Ref(name)]) for name, array in variables.items()}
    for node in step:
        if not node.is_variable:
            for index, output in enumerate(evaluate(node, [values[ref] for ref in node.inputs])):
                ref = Ref(node.name, index)
                assert output.dtype in (np.float32, np.uint8, np.int32), "the oracle must not compute in another dtype"
                values[ref] = rounded(output, dtypes[ref])
    return {name: values[ref] for name, ref in passes.output_names(step).items()}


def training_step(graph):
    return passes.gradient_add(passes.gradient(graph, SHAPES))


def test_float32_is_the_identity():
    step = training_step(fused(small_resnet(True)))
    assert passes.precision(step, "float32") is step
    assert set(passes.tensor_dtypes(step).values()) == {"float32", "int32", "uint8"}


@pytest.mark.long(but=["float16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype_of_every_kind_of_tensor(dtype):
    graph = fused(resnet(50))
    step = passes.precision(passes.gradient_add(passes.gradient(graph, {"data": (2, 64, 64, 4)})), dtype)
    dtypes, outputs = passes.tensor_dtypes(step), passes.output_names(step)
    half = [name for name in graph.variables if dtypes[Ref(name)] == dtype]
    assert half == ["data", *(name for name in graph.variables if name.endswith("_weight"))]
    assert all(dtypes[Ref(name)] == "float32" for name in graph.variables if name not in half)
    for name in graph.arguments:
        if f"{name}_grad" in outputs:
            assert dtypes[outputs[f"{name}_grad"]] == dtypes[Ref(name)], name
    assert all(dtypes[outputs[name]] == "float32" for name in ("loss", *graph.aux))
    assert dtypes[Ref("classifier")] == dtypes[Ref("softmax")] == dtype, "logits and their gradient"
    assert dtypes[Ref("stem_pool", 1)] == dtypes[Ref("stage1_block1_bn3_add_relu", 4)] == "uint8"
    assert dtypes[Ref("stem_bn_relu", 1)] == "float32"
    # No tensor as large as an activation is fp32.
    shapes = step.infer_shapes({"data": (2, 64, 64, 4), **({"loss_scale": (1,)} if dtype == "float16" else {})})
    large = {dtypes[ref] for ref, shape in shapes.items() if len(shape) == 4}
    assert large == {dtype, "uint8"}


def test_only_fp16_has_a_loss_scale():
    step = training_step(fused(small_resnet(False)))
    assert "loss_scale" in passes.precision(step, "float16").variables
    assert passes.precision(step, "bfloat16").variables == step.variables


def test_inference_graph():
    graph = fused(small_resnet(False))
    dtypes = passes.tensor_dtypes(passes.precision(graph, "float16"))
    assert dtypes[Ref("fc")] == "float16" and dtypes[Ref("softmax")] == "float32", "probabilities"


def without_relu():
    """Four residual blocks without a ReLU, whose flips would change gradients by more."""
    x = mx.sym.Variable("data")
    for i in range(4):
        y = mx.sym.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), no_bias=True, layout="NHWC", name=f"conv{i}")
        y = mx.sym.BatchNorm(y, axis=3, fix_gamma=False, name=f"bn{i}")
        x = mx.sym.elemwise_add(y, x) if i else y
    x = mx.sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type="avg", layout="NHWC", name="pool")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=7, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


@pytest.mark.parametrize("dtype, tolerance", [("float16", 0.01), ("bfloat16", 0.08)])
def test_gradients_stay_close_to_float64(dtype, tolerance, rng):
    """Relative error of each gradient in the Euclidean norm: a few times the rounding of one value, 2^-11 or 2^-8."""
    graph = fused(without_relu())
    step = training_step(graph)
    variables = random_variables(graph, SHAPES, rng, dtype=np.float32)
    exact = run(step, {name: array.astype(np.float64) for name, array in variables.items()})
    scale = np.float32(1024 if dtype == "float16" else 1)
    inputs = {**variables, "loss_scale": scale.reshape(1)} if dtype == "float16" else variables
    results = run_rounded(passes.precision(step, dtype), inputs)
    for name, expected in exact.items():
        if name.endswith("_grad"):
            error = np.linalg.norm(results[name] / scale - expected) / np.linalg.norm(expected)
            assert 0 < error < tolerance, name
    np.testing.assert_allclose(results["loss"], exact["loss"], rtol=tolerance)


def test_loss_scale_multiplies_every_gradient_and_nothing_else(rng):
    graph = fused(small_resnet(True))
    step = training_step(graph)
    variables = random_variables(graph, SHAPES, rng)
    plain = run(step, variables)
    scaled = run(passes.precision(step, "float16"), {**variables, "loss_scale": np.array([256.0])})
    assert plain.keys() == scaled.keys()
    for name in plain:
        np.testing.assert_array_equal(scaled[name], plain[name] * (256 if name.endswith("_grad") else 1), err_msg=name)


def test_without_a_loss_scale_small_gradients_vanish_in_fp16(rng):
    """With grad_scale 2^-20 most activation gradients are below 2^-24; a loss scale of 2^20 brings them back."""
    graph = fused(without_relu())
    graph = graph.rewrite(lambda node: node.with_attrs(grad_scale=2.0**-20) if node.op == "SoftmaxOutput" else None)
    step = training_step(graph)
    variables = random_variables(graph, SHAPES, rng, dtype=np.float32)
    exact = run(step, {name: array.astype(np.float64) for name, array in variables.items()})["conv0_weight_grad"]

    def error(loss_scale):
        inputs = {**variables, "loss_scale": np.array([loss_scale], np.float32)}
        result = run_rounded(passes.precision(step, "float16"), inputs)["conv0_weight_grad"]
        return np.linalg.norm(result / loss_scale - exact) / np.linalg.norm(exact)

    assert error(1.0) > 0.5
    assert error(2.0**20) < 0.01


def test_unknown_precision():
    with pytest.raises(GraphError, match="no precision 'int8': choose one of float16, bfloat16, float32"):
        passes.precision(Graph.from_json(small_resnet(False).tojson()), "int8")
