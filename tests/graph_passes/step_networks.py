"""Small training graphs, and values for their variables, for the tests of the passes gradient, precision and memory."""

import math

import numpy as np

from common.mxnet_compat import mx
from graph_passes import Graph, Ref, passes
from graph_passes.choice import fewest, repeatable
from graph_passes.executors import reference

# Our kernels that replace others of ours, or cuDNN's 3x3 convolutions.
NEWEST = ("Conv1x1Pair", "Conv1x1ForwardSumRelu", "Conv3x3DgradReduce", "Conv3x3Dgrad", "Conv3x3ForwardStatistics",
          "Conv3x3ForwardRelu", "Conv3x3Weights", "DepthwiseDgrad", "DepthwiseForward", "DepthwiseStatistics",
          "DepthwiseWgrad", "DgradStream", "NormConv1x1", "NormConv1x1Pair", "NormReluConv1x1",
          "NormReluConv1x1 without output", "NormConv3x3", "NormDgrad", "QuantisedStemPool", "StemForward",
          "StemWeights")
OWN_FORMS = ("Conv1x1Forward", "Conv1x1ForwardRelu", "Conv1x1ForwardAddRelu", "Conv1x1Statistics")


def fused(symbol) -> Graph:
    return passes.bn_relu(passes.bn_add_relu(Graph.from_json(symbol.tojson())))


def rounding_decides(graph: Graph, values, margin=1e-6) -> bool:
    """Whether fp32's rounding may turn a ReLU, or choose the winner of a max pooling after one. Gradients then change
    by any amount. `margin`: distance from 0, or between the two largest values, over the tensor's largest value."""
    variables = {Ref(name): np.asarray(array, np.float64) for name, array in values.items()}
    results = reference.forward(graph, variables, training=True)

    def closest(node, x):
        if node.op != "Pooling":
            return np.abs(x).min()
        edges = [(pad, pad + size) for pad, size in zip(node["pad"], node["kernel"], strict=True)]
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), *edges, (0, 0))), node["kernel"], (1, 2))
        down, right = node["stride"]
        windows = windows[:, ::down, ::right].reshape(-1, math.prod(node["kernel"]))
        second, first = np.sort(windows[windows.max(1) > 0])[:, -2:].T  # where all are 0, so is the gradient
        return (first - second).min()

    deciding = [(node, results[node.inputs[0]]) for node in graph
                if node.op in ("relu", "Activation") or (node.op == "Pooling" and node["pool_type"] == "max")]
    return any(closest(node, x) < margin * np.abs(x).max() for node, x in deciding)


def dropping(symbol, mode="image", depth=0.6, p=0.25) -> Graph:
    """The network with stochastic depth from its second block on, and dropout before the classifier."""
    return passes.dropout(passes.stochastic_depth(Graph.from_json(symbol.tojson()), depth, mode), p)


def block(x, name, width, stride, bottleneck, project, layout="NHWC"):
    """A residual block with few channels, written independently of train/models/."""
    axis = layout.index("C")

    def conv_bn(x, name, filters, kernel, stride):
        pad = (kernel // 2,) * 2
        x = mx.sym.Convolution(x, num_filter=filters, kernel=(kernel, kernel), stride=(stride, stride), pad=pad,
                               no_bias=True, layout=layout, name=f"{name}_conv")
        return mx.sym.BatchNorm(x, axis=axis, eps=1e-5, momentum=0.8, fix_gamma=False, name=f"{name}_bn")

    convs = [(width, 3, stride), (width, 3, 1)]
    if bottleneck:
        convs = [(width, 1, 1), (width, 3, stride), (2 * width, 1, 1)]
    y = x
    for i, (filters, kernel, conv_stride) in enumerate(convs):
        y = conv_bn(y if i == 0 else mx.sym.relu(y), f"{name}_{i}", filters, kernel, conv_stride)
    shortcut = conv_bn(x, f"{name}_s", convs[-1][0], 1, stride) if project else x
    return mx.sym.Activation(mx.sym.elemwise_add(y, shortcut, name=f"{name}_add"), act_type="relu", name=f"{name}_out")


def small_resnet(bottleneck, layout="NHWC", classes=7):
    """Stem with max pooling, an identity and two projection blocks, average pooling, classifier."""
    window = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "layout": layout}
    x = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=6, name="stem", **window)  # with a bias
    x = mx.sym.BatchNorm(x, axis=layout.index("C"), eps=1e-5, fix_gamma=True, name="stem_bn")
    x = mx.sym.Pooling(mx.sym.relu(x), pool_type="max", name="pool", **window)
    x = block(x, "a", 5, 1, bottleneck, project=True, layout=layout)
    x = block(x, "b", 5, 1, bottleneck, project=False, layout=layout)
    x = block(x, "c", 7, 2, bottleneck, project=True, layout=layout)
    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout=layout, name="mean")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", smooth_alpha=0.1, name="softmax")


def plain_convolution(x, name, filters, layout, kernel=3, groups=1):
    return mx.sym.Convolution(x, num_filter=filters, kernel=(kernel,) * 2, pad=(kernel // 2,) * 2, num_group=groups,
                              no_bias=True, layout=layout, name=name)


def squeezed(x, name, channels, layout, squeeze):
    """Squeeze-and-excitation."""
    y = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout=layout, name=f"{name}_pool")
    y = mx.sym.relu(plain_convolution(y, f"{name}_down", squeeze, layout, 1), name=f"{name}_relu")
    y = mx.sym.sigmoid(plain_convolution(y, f"{name}_up", channels, layout, 1), name=f"{name}_gate")
    return mx.sym.broadcast_mul(x, y, name=f"{name}_scaled")


def efficient(layout="NHWC", classes=7, squeeze=2):
    """Depthwise convolutions, SiLU, squeeze-and-excitation with this many channels, a residual sum."""
    axis = layout.index("C")
    x = plain_convolution(mx.sym.Variable("data"), "stem", 8, layout)
    for name in "ab":
        y = mx.sym.BatchNorm(plain_convolution(x, f"{name}_depthwise", 8, layout, 5, 8), axis=axis, fix_gamma=False,
                             name=f"{name}_norm")
        y = mx.sym.elemwise_mul(y, mx.sym.sigmoid(y, name=f"{name}_sigmoid"), name=f"{name}_silu")
        x = mx.sym.elemwise_add(x, squeezed(y, f"{name}_se", 8, layout, squeeze), name=f"{name}_sum")
    return classified(x, layout, classes)


def mobile(layout="NHWC", classes=7):
    """Hard swish and hard sigmoid as in MobileNetV3, leaky ReLUs, a slice of the channels, means."""
    axis = layout.index("C")
    x = plain_convolution(mx.sym.Variable("data"), "stem", 8, layout)
    x = x * mx.sym.clip(x + 3, 0, 6, name="hard") / 6
    parts = [mx.sym.slice_axis(x, axis=axis, begin=begin, end=end, name=f"part{begin}") for begin, end in
             ((0, 3), (3, None))]
    x = mx.sym.Concat(mx.sym.LeakyReLU(parts[0], act_type="elu", slope=1.0, name="elu"),
                      mx.sym.LeakyReLU(parts[1], act_type="leaky", slope=0.1, name="leaky"), dim=axis, name="joined")
    means = mx.sym.mean(x, axis=tuple({1, 2, 3} - {axis}), keepdims=True, name="means")
    x = mx.sym.broadcast_mul(x, mx.sym.hard_sigmoid(means, name="gate"), name="gated")
    x = mx.sym.broadcast_add(x, plain_convolution(means, "shift", 8, layout, 1), name="shifted")
    return classified(x, layout, classes)


def convnext(layout="NHWC", classes=7):
    """A 7x7 depthwise convolution, LayerNorm over the channels, GELU between two products, layer scale."""
    x = plain_convolution(mx.sym.Variable("data"), "stem", 8, layout)
    y = plain_convolution(x, "depthwise", 8, layout, 7, 8)
    y = mx.sym.LayerNorm(y, axis=layout.index("C"), eps=1e-6, name="norm")
    y = mx.sym.LeakyReLU(plain_convolution(y, "wide", 32, layout, 1), act_type="gelu", name="gelu")
    factors = mx.sym.Reshape(mx.sym.Variable("scale_gamma", shape=(8,)), name="factors",
                             shape=[-1 if axis == "C" else 1 for axis in layout])
    y = mx.sym.broadcast_mul(plain_convolution(y, "narrow", 8, layout, 1), factors, name="scale")
    return classified(mx.sym.elemwise_add(x, y, name="sum"), layout, classes)


def classified(x, layout, classes):
    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout=layout, name="pool")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


def elements(layout="NHWC", classes=7, prelu=True):
    """Every elementwise function, one after the other; a ReLU of a sum."""
    x = plain_convolution(mx.sym.Variable("data"), "stem", 8, layout)
    for kind in ("sigmoid", "tanh", "softrelu", "softsign"):
        x = x + mx.sym.Activation(x, act_type=kind, name=kind)
    for kind in ("leaky", "elu", "selu", "gelu"):
        x = x - 0.5 + mx.sym.LeakyReLU(x, act_type=kind, slope=0.2, name=kind)
    x = mx.sym.relu(x + plain_convolution(x, "other", 8, layout, 1), name="sum_relu")
    if prelu:
        x = mx.sym.LeakyReLU(x, mx.sym.Variable("slopes_gamma"), act_type="prelu", name="prelu")
    x = mx.sym.tanh(x) + mx.sym.sigmoid(x) + mx.sym.softsign(x)
    x = mx.sym.transpose(mx.sym.transpose(x, axes=(0, 2, 3, 1)), axes=(0, 3, 1, 2))
    return classified(x * 2, layout, classes)


def narrow(classes=7):
    """Channels that are no multiples of 8 in every operator: BatchNorm, depthwise convolution, squeeze-and-excitation,
    functions that make something else of 0, a Concat, a slice, poolings, convolutions with bias, one in groups."""
    def norm(x, name):
        return mx.sym.BatchNorm(x, axis=3, eps=1e-5, momentum=0.8, fix_gamma=False, name=f"{name}_bn")

    def conv(x, name, filters, kernel=1, groups=1, bias=False):
        return mx.sym.Convolution(x, num_filter=filters, kernel=(kernel,) * 2, pad=(kernel // 2,) * 2, layout="NHWC",
                                  num_group=groups, no_bias=not bias, name=name)

    window = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "layout": "NHWC"}
    x = mx.sym.relu(norm(conv(mx.sym.reverse(mx.sym.Variable("data"), axis=(1, 2)), "stem", 10, 3), "stem"))
    y = mx.sym.clip(norm(conv(x, "depthwise", 10, 3, 10), "depthwise"), 0, 6)
    y = norm(conv(squeezed(y, "se", 10, "NHWC", 3), "project", 13), "project")
    x = mx.sym.relu(mx.sym.elemwise_add(y, norm(conv(x, "shortcut", 13), "shortcut"), name="sum"))
    x = mx.sym.Concat(mx.sym.Pooling(x, pool_type="max", name="max", **window),
                      mx.sym.Pooling(mx.sym.softsign(x), pool_type="avg", name="mean", **window),
                      mx.sym.Pooling(conv(mx.sym.sigmoid(conv(x, "bias", 5, 3, bias=True)), "gates", 6),
                                     pool_type="avg", name="gate_means", **window), dim=3, name="joined")
    y = mx.sym.relu(conv(x, "grouped", 12, 1, 1, bias=True)) + 0.25
    y = mx.sym.Activation(conv(y, "groups", 9, 3, 3, bias=True), act_type="softrelu", name="softrelu")
    y = mx.sym.broadcast_add(y, conv(mx.sym.mean(y, axis=(1, 2), keepdims=True), "shift", 9), name="shifted")
    x = mx.sym.slice_axis(conv(y, "last", 11), axis=3, begin=2, end=9, name="part")
    return classified(mx.sym.LeakyReLU(x, act_type="gelu", name="gelu"), "NHWC", classes)


def hidden_layers(classes=7, channels=5):
    """Fully connected layers before the classifier, as in AlexNet and VGG, with Dropout; the first one reads all
    pixels of images, in MXNet's order of NCHW; another has no ReLU."""
    x = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=channels, kernel=(3, 3), name="stem")
    x = mx.sym.Pooling(mx.sym.relu(x), kernel=(2, 2), stride=(2, 2), pool_type="max", name="pool")
    for number, hidden in enumerate((24, 13)):
        x = mx.sym.relu(mx.sym.FullyConnected(x, num_hidden=hidden, name=f"hidden{number}"))
        x = mx.sym.Dropout(x, p=0.4, name=f"dropout{number}")
    x = mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=9, name="hidden2"))
    x = mx.sym.FullyConnected(mx.sym.FullyConnected(x, num_hidden=16, no_bias=True, name="hidden3"), num_hidden=classes,
                              name="fc")
    return passes.layout(Graph.from_json(mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax").tojson()),
                         "NHWC", inputs=["data"])


def flattened(last, classes=7):
    """A convolution or a max pooling of several pixels right before the classifier."""
    x = mx.sym.Variable("data")
    x = mx.sym.Convolution(x, num_filter=16, kernel=(3, 3), no_bias=True, layout="NHWC", name="conv")
    x = mx.sym.relu(mx.sym.BatchNorm(x, axis=3, fix_gamma=False, name="bn"))
    if last == "Convolution":
        x = mx.sym.Convolution(x, num_filter=8, kernel=(3, 3), stride=(2, 2), no_bias=True, layout="NHWC", name="last")
    else:
        x = mx.sym.Pooling(x, kernel=(3, 2), stride=(2, 1), pad=(1, 0), pool_type="max", layout="NHWC", name="last")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


def bottlenecks(stem=3, classes=10, width=64):
    """Blocks of 1x1, 3x3 and 1x1 convolutions, wide enough for all fused kernels: one projected and two plain blocks.
    `stem`: kernel size of the first convolution; with 7 it is ResNet's. `width`: channels between the convolutions."""

    def conv_bn(x, name, filters, kernel, stride=1):
        x = mx.sym.Convolution(x, num_filter=filters, kernel=(kernel, kernel), pad=(kernel // 2,) * 2, no_bias=True,
                               stride=(stride, stride), layout="NHWC", name=f"{name}_conv")
        return mx.sym.BatchNorm(x, axis=3, eps=1e-5, momentum=0.8, fix_gamma=False, name=f"{name}_bn")

    x = mx.sym.relu(conv_bn(mx.sym.Variable("data"), "stem", 64, stem, stride=2 if stem == 7 else 1))
    x = mx.sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max", layout="NHWC", name="pool")
    for block in ("a", "b", "c"):
        y = mx.sym.relu(conv_bn(x, f"{block}1", width, 1))
        y = conv_bn(mx.sym.relu(conv_bn(y, f"{block}2", width, 3)), f"{block}3", 128, 1)
        shortcut = conv_bn(x, f"{block}4", 128, 1) if block == "a" else x
        x = mx.sym.relu(mx.sym.elemwise_add(y, shortcut, name=block))
    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout="NHWC", name="mean")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", smooth_alpha=0.1, name="softmax")


def strided(classes=7, width=64):
    """A plain block of 1x1, 3x3 and 1x1 convolutions, and three projected blocks with other strides. `width`: channels
    between the convolutions."""
    def conv_bn(x, name, filters, kernel, stride=(1, 1)):
        x = mx.sym.Convolution(x, num_filter=filters, kernel=(kernel, kernel), pad=(kernel // 2,) * 2, no_bias=True,
                               stride=stride, layout="NHWC", name=f"{name}_conv")
        return mx.sym.BatchNorm(x, axis=3, eps=1e-5, momentum=0.8, fix_gamma=False, name=f"{name}_bn")

    x = mx.sym.relu(conv_bn(mx.sym.Variable("data"), "stem", 128, 3))
    for block, stride in {"a": (2, 2), "b": (1, 1), "c": (2, 1), "d": (1, 3)}.items():
        y = mx.sym.relu(conv_bn(x, f"{block}1", width, 1))
        y = conv_bn(mx.sym.relu(conv_bn(y, f"{block}2", width, 3, stride)), f"{block}3", 128, 1)
        shortcut = x if block == "b" else conv_bn(x, f"{block}4", 128, 1, stride)
        x = mx.sym.relu(mx.sym.elemwise_add(y, shortcut, name=block))
    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout="NHWC", name="mean")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


def pre_activation(classes=7):
    """Three blocks that begin with BatchNorm, as in ResNet v2: a projected one, a plain one, and one without the first
    ReLU. In the last one, a BatchNorm and the shortcut read the same tensor."""
    def conv(x, name, filters, kernel=1):
        return mx.sym.Convolution(x, num_filter=filters, kernel=(kernel, kernel), pad=(kernel // 2,) * 2, no_bias=True,
                                  layout="NHWC", name=f"{name}_conv")

    def norm(x, name):
        return mx.sym.BatchNorm(x, axis=3, eps=1e-5, momentum=0.8, fix_gamma=False, name=f"{name}_bn")

    x = conv(mx.sym.Variable("data"), "stem", 16, kernel=3)
    for block, filters in {"a": 24, "b": 24, "c": 24}.items():
        y = norm(x, f"{block}1")
        y = y if block == "c" else mx.sym.relu(y)
        shortcut = conv(y, f"{block}3", filters) if block == "a" else x
        y = mx.sym.relu(norm(conv(y, f"{block}1", 16), f"{block}2"))
        x = mx.sym.elemwise_add(conv(y, f"{block}2", filters, kernel=3), shortcut, name=block)
    x = mx.sym.Pooling(mx.sym.relu(norm(x, "last")), global_pool=True, kernel=(1, 1), pool_type="avg", layout="NHWC")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


def single_convolutions(classes=7, width=256):
    """Two blocks of one 1x1 convolution, whose input is also the addend, after a BatchNorm and without one."""
    x = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=width, kernel=(3, 3), pad=(1, 1), no_bias=True,
                           layout="NHWC", name="stem")
    x = mx.sym.relu(mx.sym.BatchNorm(x, axis=3, fix_gamma=False, name="stem_bn"))
    one = {"num_filter": width, "kernel": (1, 1), "no_bias": True, "layout": "NHWC"}
    y = mx.sym.BatchNorm(mx.sym.Convolution(x, name="a", **one), axis=3, fix_gamma=False, name="a_bn")
    x = mx.sym.relu(mx.sym.elemwise_add(y, x, name="a_sum"))
    x = mx.sym.elemwise_add(mx.sym.Convolution(x, name="b", **one), x, name="b_sum")
    x = mx.sym.relu(mx.sym.BatchNorm(x, axis=3, fix_gamma=False, name="b_bn"))
    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout="NHWC", name="mean")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


def words(classes=7, steps=3, sequences=4):
    """A language model: an embedding, two recurrent layers from states of 0, scores by the embedding's matrix."""
    weight = mx.sym.var("embedding_weight")
    x = mx.sym.Embedding(mx.sym.var("data"), weight, input_dim=classes, output_dim=5, name="embedding")
    x = mx.sym.Reshape(x, shape=(steps, sequences, -1))
    states = [mx.sym.zeros(shape=(2, sequences, 5)) for _ in range(2)]
    x = mx.sym.RNN(x, mx.sym.var("rnn_parameters"), *states, mode="lstm", state_size=5, num_layers=2, name="rnn")
    x = mx.sym.FullyConnected(mx.sym.Reshape(x, shape=(-1, 5)), weight, num_hidden=classes, name="scores")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


def random_network(rng):
    """Convolutions, BatchNorms, sums of any of these, ReLUs after BatchNorms and max poolings, in any order. Summands
    may have stochastic depth."""
    def conv(x, filters, stride=1, sizes=(1, 1, 3)):
        size = int(rng.choice(sizes))
        return mx.sym.Convolution(x, num_filter=filters, kernel=(size, size), stride=(stride, stride),
                                  pad=(size // 2, size // 2), no_bias=bool(rng.integers(4)), layout="NHWC")

    def norm(x):
        return mx.sym.BatchNorm(x, axis=3, eps=float(rng.choice([1e-3, 1e-5])), fix_gamma=False)

    def dropped(x, kinds):
        axes = [(1, 2, 3), (0, 1, 2, 3), ()][rng.integers(kinds)]
        return x if rng.integers(2) else mx.sym.Dropout(x, p=float(rng.uniform(0.1, 0.6)), axes=axes)

    width = 64
    x = conv(mx.sym.Variable("data"), width, *((2, (7,)) if rng.integers(2) else ()))
    for kind in rng.integers(6, size=rng.integers(1, 8)):
        if kind == 0:
            x = mx.sym.relu(norm(x))
        elif kind == 1:
            shortcut = x if rng.integers(2) else norm(conv(x, width))
            # On a GPU, a ReLU is only supported after a BatchNorm, with stochastic depth at most in between.
            terms = [dropped(norm(conv(x, width)), 2), dropped(shortcut, 3)]
            x = mx.sym.elemwise_add(*(terms[i] for i in rng.permutation(2)))
            x = mx.sym.relu(x) if rng.integers(4) else x
        elif kind == 2:
            width = int(rng.choice([32, 64, 128]))
            x = conv(x, width, stride=int(rng.integers(1, 3)))
        elif kind == 3:
            x = mx.sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max", layout="NHWC")
        elif kind == 4:
            x = norm(x)
        else:
            x = mx.sym.elemwise_add(x, x)
    if rng.integers(2):
        x = mx.sym.Pooling(x, kernel=(1, 1), global_pool=True, pool_type="avg", layout="NHWC")
    x = mx.sym.Flatten(x) if rng.integers(2) else x
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=7), name="softmax")


def random_variables(graph, shapes, rng, classes=7, dtype=np.float64):
    """A value for every variable of a training graph, scaled so that no ReLU is entirely on or off."""
    values, inferred = {}, graph.infer_shapes(shapes)
    for name in graph.variables:
        shape = inferred[Ref(name)]
        values[name] = rng.standard_normal(shape)
        if name == "softmax_label" or (name == "data" and "Embedding" in graph.operators()):
            values[name] = rng.integers(0, classes, shape).astype(float)
        elif name.endswith(("_gamma", "_var")):
            values[name] = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("weight"):
            values[name] /= np.sqrt(np.prod(shape[1:]))
        values[name] = values[name].astype(dtype)
    return values


# Our own prices, for covers without timing. If two fusions could include the gradient of a convolution's data, the one
# with the sums after it is taken.
OWN_FUSIONS = {"DgradReduce": 1.0, "NormBackward": 2.5, "NormBackwardReduce": 2.5, "BatchNormBackwardApply": 1.0,
               "StemPool": 1.0}
PREFERRED, REFUSED = 0.4, math.inf  # prices: less than half a node; not available


def repriced(table, price, **prices_by_label):
    """The prices of `price`, except for some kernels."""
    return [prices_by_label.get(each.label, of_each) for each, of_each in zip(table, price(table), strict=True)]


def preferring(price, *labels):
    """Prices by which these kernels are taken wherever possible."""
    return lambda table: repriced(table, price, **dict.fromkeys(labels, PREFERRED))


def refusing(price, *labels):
    """Prices by which these kernels are not available."""
    return lambda table: repriced(table, price, **dict.fromkeys(labels, REFUSED))


def repeatable_fusions(table):
    """Prices by which every fusion is taken except cuDNN's own (which sum in a varying order or compile slowly) and the
    `NEWEST`, so that the kernels they would replace run."""
    return repriced(table, repeatable, **OWN_FUSIONS)


def streamed_gradients(table):
    """`repeatable_fusions`, with the gradients of 1x1 convolutions by dgrad_stream.cu where possible."""
    return preferring(repeatable_fusions, "DgradStream")(table)


def own_kernels(table):
    """`repeatable_fusions`, with every kernel of ours that has rivals."""
    return preferring(repeatable_fusions, *NEWEST, *OWN_FORMS, "StemPool")(table)


def gradients_alone(table):
    """`own_kernels`, with the gradients of 3x3 convolutions by conv3x3.cu without the sums of the preceding
    BatchNorm."""
    return refusing(own_kernels, "Conv3x3DgradReduce")(table)


def own_forms(table):
    """Prices by which the fewest nodes are taken, with our own kernels where cuDNN has equivalent ones."""
    return repriced(table, fewest, **dict.fromkeys((*OWN_FORMS, *NEWEST), 0.9))
