"""Every operator of the reference executor, forward and backward: against MXNet's autograd in fp32, and its gradients
against finite differences in float64."""

import numpy as np
import pytest

from common.mxnet_compat import mx
from graph_passes import VARIABLE, Graph, GraphError, Node, Ref, passes
from graph_passes.executors.reference import backward, forward
from graph_passes.operators import OPERATORS

# Bound relative to the largest element of a tensor. fp32 rounds to 6e-8; the sums here have up to a few hundred terms.
FP32_TOLERANCE = 2e-5
# A central difference with step h errs by h^2 times the third derivative and by rounding, 1e-16 / h.
STEP, DIFFERENCE_TOLERANCE = 1e-6, 1e-7


def size(rng, low=3, high=9):
    return int(rng.integers(low, high))


def batch(rng, layout, channels):
    n, h, w = size(rng, 1, 4), size(rng, 5, 12), size(rng, 5, 12)
    return (n, h, w, channels) if layout == "NHWC" else (n, channels, h, w)


def single(op, data_shape, rng, num_data=1, **attrs):
    """A graph of one operator; its inputs are variables of suitable shapes."""
    node = Node(op, "y", (), attrs)
    names = OPERATORS[op].input_names(node)
    graph = Graph([*(Node(VARIABLE, name) for name in names), node.replace(inputs=tuple(map(Ref, names)))], [Ref("y")])
    data_names = [name for name in names if name in ("data", "lhs", "rhs", "addend")]
    return graph, dict.fromkeys(data_names, data_shape)


def convolution(rng, layout):
    groups = int(rng.choice([1, 1, 2, 3]))
    kernel = (size(rng, 1, 4), size(rng, 1, 4))
    return single("Convolution", batch(rng, layout, 6), rng, layout=layout, kernel=kernel, num_filter=2 * 3,
                  num_group=groups, stride=(size(rng, 1, 4), size(rng, 1, 3)), pad=(size(rng, 0, 3), size(rng, 0, 3)),
                  dilate=(size(rng, 1, 3), 1), no_bias=bool(rng.integers(2)))


def pooling(rng, layout, kind):
    kernel, pad = (size(rng, 2, 4), size(rng, 2, 4)), (size(rng, 0, 2), size(rng, 0, 2))
    stride = tuple(size(rng, 1, k - p + 1) for k, p in zip(kernel, pad, strict=True))  # no window of padding alone
    return single("Pooling", batch(rng, layout, 3), rng, layout=layout, pool_type=kind, kernel=kernel, stride=stride,
                  pad=pad, pooling_convention=str(rng.choice(["valid", "full"])),
                  count_include_pad=bool(rng.integers(2)))


def global_pooling(rng, layout, kind):
    return single("Pooling", batch(rng, layout, 3), rng, layout=layout, pool_type=kind, kernel=(1, 1), global_pool=True)


def batch_norm(rng, layout, op, **attrs):
    settings = {"eps": 1e-3, "momentum": 0.7, "fix_gamma": bool(rng.integers(2)), **attrs}
    return single(op, batch(rng, layout, 3), rng, axis=layout.index("C"), **settings)


def recurrent(rng, mode):
    return single("RNN", (size(rng, 1), size(rng, 1), size(rng, 1)), rng, mode=mode, state_size=size(rng, 1),
                  num_layers=size(rng, 1, 4), bidirectional=bool(rng.integers(2)))


def of_elements(rng, op, **attrs):
    return single(op, batch(rng, "NHWC", 3), rng, **attrs)


def of_two(rng, op, one, other):
    """Inputs of different shapes, which are broadcast to each other."""
    graph, _ = single(op, (), rng)
    return graph, {"lhs": one, "rhs": other}


def broadcast(rng, op):
    n, h, w = size(rng, 2, 4), size(rng), size(rng)
    shapes = [((n, h, w, 5), (n, 1, 1, 5)), ((n, 1, 1, 5), (n, h, w, 5)), ((n, h), (1, h)), ((n, h, w), (n, h, w)),
              ((n, 1, w), (1, h, 1))]
    return of_two(rng, op, *shapes[rng.integers(len(shapes))])


def concat(rng):
    axis, num = int(rng.integers(4)), size(rng, 1, 5)
    shape = [size(rng, 1, 5) for _ in range(4)]
    graph, _ = single("Concat", (), rng, dim=axis - 4 * int(rng.integers(2)), num_args=num)
    return graph, {f"arg{each}": (*shape[:axis], size(rng, 1, 5), *shape[axis + 1:]) for each in range(num)}


def part(rng):
    axis, shape = int(rng.integers(3)), [size(rng) for _ in range(3)]
    begin = int(rng.integers(shape[axis]))
    end = int(rng.choice([begin + 1, shape[axis]]))
    return single("slice_axis", tuple(shape), rng, axis=axis - 3 * int(rng.integers(2)),
                  begin=begin - shape[axis] * int(rng.integers(2)), end=None if end == shape[axis] else end)


def layer_norm(rng):
    shape = batch(rng, "NHWC", size(rng))
    return single("LayerNorm", shape, rng, axis=[-1, 3, 1][rng.integers(3)], eps=1e-3)


CASES = {
    **{f"Activation {kind}": lambda rng, k=kind: of_elements(rng, "Activation", act_type=k)
       for kind in ("sigmoid", "tanh", "softrelu", "softsign")},
    **{op: lambda rng, o=op: of_elements(rng, o) for op in ("sigmoid", "tanh", "softsign", "hard_sigmoid")},
    **{f"LeakyReLU {kind}": lambda rng, k=kind: of_elements(rng, "LeakyReLU", act_type=k, slope=0.1)
       for kind in ("leaky", "elu", "selu", "gelu")},
    "LeakyReLU prelu": lambda rng: of_elements(rng, "LeakyReLU", act_type="prelu"),
    "hard_sigmoid with constants": lambda rng: of_elements(rng, "hard_sigmoid", alpha=0.5, beta=0.3),
    "clip": lambda rng: of_elements(rng, "clip", a_min=-0.5, a_max=1.0),
    "elemwise_mul": lambda rng: of_elements(rng, "elemwise_mul"),
    **{op: lambda rng, o=op: broadcast(rng, o) for op in ("broadcast_mul", "broadcast_add")},
    **{op: lambda rng, o=op: of_elements(rng, o, scalar=float(rng.uniform(0.5, 3)))
       for op in ("_plus_scalar", "_minus_scalar", "_mul_scalar", "_div_scalar")},
    "mean": lambda rng: of_elements(rng, "mean", axis=[(1, 2), (), (-1,), (0, 3)][rng.integers(4)],
                                    keepdims=bool(rng.integers(2))),
    "Concat": concat,
    "slice_axis": part,
    "LayerNorm": layer_norm,
    **{f"Convolution {layout}": lambda rng, k=layout: convolution(rng, k) for layout in ("NHWC", "NCHW")},
    **{f"Pooling {kind} {layout}": lambda rng, k=kind, la=layout: pooling(rng, la, k)
       for kind in ("max", "avg", "sum") for layout in ("NHWC", "NCHW")},
    **{f"Pooling global {kind}": lambda rng, k=kind: global_pooling(rng, "NHWC", k) for kind in ("max", "avg")},
    **{f"{op} {layout}": lambda rng, o=op, la=layout: batch_norm(rng, la, o)
       for op in ("BatchNorm", "BatchNormRelu", "BatchNormAddRelu") for layout in ("NHWC", "NCHW")},
    "BatchNorm with running statistics": lambda rng: batch_norm(rng, "NHWC", "BatchNormRelu", use_global_stats=True),
    "BatchNorm of vectors": lambda rng: single("BatchNorm", (size(rng), size(rng)), rng, axis=1, fix_gamma=False),
    "AddRelu": lambda rng: single("AddRelu", batch(rng, "NHWC", 3), rng),
    "elemwise_add": lambda rng: single("elemwise_add", batch(rng, "NHWC", 3), rng),
    "relu": lambda rng: single("relu", (size(rng), size(rng)), rng),
    "Activation": lambda rng: single("Activation", batch(rng, "NHWC", 2), rng, act_type="relu"),
    "FullyConnected": lambda rng: single("FullyConnected", batch(rng, "NHWC", 2), rng, num_hidden=size(rng),
                                         no_bias=bool(rng.integers(2))),
    "FullyConnected of rows": lambda rng: single("FullyConnected", (size(rng), size(rng), size(rng)), rng,
                                                 num_hidden=size(rng), flatten=False),
    **{f"RNN {mode}": lambda rng, mode=mode: recurrent(rng, mode) for mode in ("rnn_relu", "rnn_tanh", "lstm", "gru")},
    "Reshape": lambda rng: single("Reshape", (3, 4, size(rng)), rng,
                                  shape=[(2, -1), (0, 2, -1), (-1,)][rng.integers(3)]),
    "Flatten": lambda rng: single("Flatten", batch(rng, "NHWC", 2), rng),
    "transpose": lambda rng: single("transpose", batch(rng, "NHWC", 2), rng, axes=(0, 3, 1, 2)),
    "reverse": lambda rng: single("reverse", batch(rng, "NHWC", 2), rng, axis=(1, 2)),
    "transpose of all": lambda rng: single("transpose", (2, size(rng), size(rng)), rng),
    "ScaleChannels": lambda rng: single("ScaleChannels", batch(rng, "NHWC", 2), rng),
    "softmax": lambda rng: single("softmax", (size(rng), size(rng), size(rng)), rng, axis=int(rng.integers(3))),
}


# RNN is tested in test_rnn.py; MXNet has no ScaleChannels.
WITH_MXNET = [case for case in CASES if not case.startswith(("RNN", "ScaleChannels"))]


def test_every_operator_has_a_case():
    elsewhere = {"SoftmaxOutput", "SigmoidOutput", "CustomOutput", "Dropout", "DropoutImages", "DropoutElements",
                 "Embedding", "_zeros"}
    with_gradient = {name for name, operator in OPERATORS.items() if operator.numpy_gradient}
    assert {name.split()[0] for name in CASES} | elsewhere == with_gradient


def random_values(graph, shapes, rng):
    inferred = graph.infer_shapes(shapes)
    return {
        Ref(name): rng.uniform(0.5, 1.5, inferred[Ref(name)]) if name.endswith(("gamma", "var"))
        # for an RNN: small enough not to be chaotic
        else rng.standard_normal(inferred[Ref(name)]) * (0.4 if name == "parameters" else 1)
        for name in graph.variables
    }


def with_mxnet(graph, values, head, training):
    """Output and gradients of a graph in MXNet's fp32, which needs NCHW and stock operators."""
    nchw = passes.layout(passes.unfuse(graph), "NCHW")
    to_nchw = [name for name, kind in passes.weight_layouts(graph).items() if kind == "OHWI"]
    arrays = {r.node: mx.nd.array(v.transpose(0, 3, 1, 2) if r.node in to_nchw else v) for r, v in values.items()}
    symbol = mx.sym.load_json(nchw.to_json())
    grads = {name: mx.nd.zeros(arrays[name].shape) for name in symbol.list_arguments()}
    aux = {name: arrays[name] for name in symbol.list_auxiliary_states()}
    executor = symbol.bind(mx.cpu(), {name: arrays[name] for name in grads}, grads, aux_states=aux)
    (output,) = executor.forward(is_train=training)
    if training:
        executor.backward(mx.nd.array(head))
    gradients = {
        Ref(name): grad.asnumpy().transpose(0, 2, 3, 1) if name in to_nchw else grad.asnumpy()
        for name, grad in grads.items()
    }
    return output.asnumpy(), gradients


def close(result, expected, tolerance, scale=None):
    scale = np.abs(expected).max() if scale is None else scale
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("case", WITH_MXNET)
def test_against_mxnet(case, rng):
    for _ in range(4):
        graph, shapes = CASES[case](rng)
        values = {ref: v.astype(np.float32) for ref, v in random_values(graph, shapes, rng).items()}
        results = forward(graph, values, training=True)
        output = results[Ref("y")]
        assert output.dtype == np.float32
        head = rng.standard_normal(output.shape).astype(np.float32)
        expected, gradients = with_mxnet(graph, values, head, training=True)
        close(output, expected, FP32_TOLERANCE)
        own = backward(graph, results, True, head)
        assert {gradient.dtype for gradient in own.values()} == {np.dtype(np.float32)}
        scale = max(np.abs(g).max() for g in gradients.values())
        for ref, gradient in gradients.items():
            close(own.get(ref, np.zeros(())) + np.zeros_like(gradient), gradient, FP32_TOLERANCE, scale)
        close(forward(graph, values, False)[Ref("y")], with_mxnet(graph, values, head, False)[0], FP32_TOLERANCE)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_against_finite_differences(case, training, rng):
    """A difference across a kink (of ReLU, or of two equal values in a max pooling) is wrong, so a failure is tried
    once more: a step does not meet a kink twice in a row."""
    assert not wrong_gradients(case, training, rng) or not wrong_gradients(case, training, rng)


def wrong_gradients(case, training, rng):
    """The variables for which (f(v + h d) - f(v - h d)) / 2 h differs from gradient . d along a random direction d,
    with f = head . output."""
    graph, shapes = CASES[case](rng)
    values = random_values(graph, shapes, rng)
    results = forward(graph, values, training)
    head = rng.standard_normal(results[Ref("y")].shape)
    gradients = backward(graph, results, training, head)
    assert not [ref for ref in gradients if ref.node in graph.aux]
    wrong = []
    for ref in values:
        if ref.node in graph.aux:
            continue
        direction = rng.standard_normal(values[ref].shape)
        ahead, behind = (
            (forward(graph, {**values, ref: values[ref] + step * direction}, training)[Ref("y")] * head).sum()
            for step in (STEP, -STEP)
        )
        expected = (ahead - behind) / (2 * STEP)
        scale = np.linalg.norm(gradients[ref]) * np.linalg.norm(direction) + np.abs(results[Ref("y")] * head).sum()
        if abs((gradients[ref] * direction).sum() - expected) >= DIFFERENCE_TOLERANCE * scale:
            wrong.append(ref)
    return wrong


@pytest.mark.parametrize("normalization", ["batch", "null", "valid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_output(normalization, smoothing, rng):
    """Against MXNet, and the gradient against differences of the smoothed cross entropy written out."""
    n, classes = size(rng), size(rng)
    data, label = rng.standard_normal((n, classes)), rng.integers(0, classes, n)
    attrs = {"normalization": normalization, "smooth_alpha": smoothing, "grad_scale": 0.5}
    nodes = [Node(VARIABLE, "data"), Node(VARIABLE, "label"),
             Node("SoftmaxOutput", "y", (Ref("data"), Ref("label")), attrs)]
    graph = Graph(nodes, [Ref("y")])
    results = forward(graph, {Ref("data"): data, Ref("label"): label.astype(float)}, True)
    gradient = backward(graph, results)[Ref("data")]
    arrays = {Ref("data"): data.astype("f"), Ref("label"): label.astype("f")}
    expected, gradients = with_mxnet(graph, arrays, np.ones((n, classes)), True)
    close(results[Ref("y")], expected, FP32_TOLERANCE)
    close(gradient, gradients[Ref("data")], FP32_TOLERANCE)

    def loss(scores):
        log_p = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        targets = np.where(np.arange(classes) == label[:, None], 1 - smoothing, smoothing / (classes - 1))
        return -(targets * log_p).sum() * 0.5 / (1 if normalization == "null" else n)

    direction = rng.standard_normal(data.shape)
    difference = (loss(data + STEP * direction) - loss(data - STEP * direction)) / (2 * STEP)
    assert abs((gradient * direction).sum() - difference) < DIFFERENCE_TOLERANCE * n * classes


@pytest.mark.parametrize("symbol", [
    mx.sym.Pooling(mx.sym.var("data"), kernel=(2, 2), pool_type="lp", p_value=2, name="y"),
    mx.sym.smooth_l1(mx.sym.var("data"), name="y"),
], ids=["lp", "smooth_l1"])
def test_what_it_does_not_have_is_named(symbol, rng):
    with pytest.raises(GraphError, match="'y'.*reference executor has|reference executor has .*'y'"):
        forward(Graph.from_json(symbol.tojson()), {Ref("data"): rng.standard_normal((1, 2, 4, 4))}, True)
