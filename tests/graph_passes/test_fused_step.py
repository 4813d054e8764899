"""The graphs that run, with every fused operator, forward and backward: whole small networks in float64 against the
original network without passes, and against MXNet."""

from collections import Counter

import numpy as np
import pytest
from step_networks import (
    bottlenecks,
    convnext,
    dropping,
    efficient,
    elements,
    flattened,
    gradients_alone,
    mobile,
    own_forms,
    own_kernels,
    pre_activation,
    preferring,
    random_network,
    random_variables,
    refusing,
    repriced,
    small_resnet,
    strided,
    words,
)

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, Node, Ref, passes, pipeline
from graph_passes.choice import fewest, plain
from graph_passes.executors import Box, Draws, create_executor
from graph_passes.executors.reference import backward, evaluate, forward, run
from graph_passes.operators import OPERATORS
from graph_passes.operators.dropout import SEED
from train.models.resnet import resnet

# Bound for equal sums in another order, in float64, relative to a tensor's largest element. A variance is a difference
# of two means here, which costs digits if it is small.
SAME = 1e-6


def biased(classes=7):
    """Convolutions with a bias: alone, read by ReLU, by a sum and ReLU, and by a BatchNorm."""
    def conv(x, name):
        return mx.sym.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), layout="NHWC", name=name)

    x = conv(mx.sym.Variable("data"), "a")
    y = mx.sym.relu(mx.sym.BatchNorm(conv(x, "b"), axis=3, fix_gamma=False, name="bn"))
    x = mx.sym.relu(mx.sym.elemwise_add(conv(y, "c"), x))
    x = mx.sym.FullyConnected(mx.sym.Flatten(mx.sym.relu(conv(x, "d"))), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


def projections(classes=7):
    """Two blocks with strides as in ResNet: in a pair of BatchNorms, one reads a 1x1 convolution of stride 1, the other
    one of stride 2."""
    def conv_bn(x, name, filters, kernel, stride=1):
        x = mx.sym.Convolution(x, num_filter=filters, kernel=(kernel, kernel), pad=(kernel // 2,) * 2, no_bias=True,
                               stride=(stride, stride), layout="NHWC", name=f"{name}_conv")
        return mx.sym.BatchNorm(x, axis=3, eps=1e-5, fix_gamma=False, name=f"{name}_bn")

    x = mx.sym.relu(conv_bn(mx.sym.Variable("data"), "stem", 32, 3))
    for block, width in (("a", 64), ("b", 128)):
        y = mx.sym.relu(conv_bn(x, f"{block}1", width, 3, stride=2))
        y = conv_bn(y, f"{block}2", 128, 1)
        x = mx.sym.relu(mx.sym.elemwise_add(y, conv_bn(x, f"{block}3", 128, 1, stride=2), name=block))
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


NETWORKS = {
    "basic blocks": (lambda: small_resnet(False), (3, 17, 14, 3)),
    "bottlenecks": (lambda: bottlenecks(7, 7), (3, 22, 18, 4)),
    "bottlenecks after another stem": (lambda: bottlenecks(3, 7), (2, 9, 11, 3)),
    "wide bottlenecks": (lambda: bottlenecks(3, 7, 128), (3, 7, 6, 3)),
    "wider bottlenecks": (lambda: bottlenecks(3, 7, 256), (3, 5, 4, 3)),
    "strided bottlenecks": (strided, (3, 13, 11, 3)),
    "strided bottlenecks that drop": (lambda: dropping(strided()), (5, 10, 9, 3)),
    "projections that drop": (lambda: dropping(projections()), (4, 9, 11, 3)),
    "biases": (biased, (3, 7, 6, 3)),
    "BatchNorm first": (pre_activation, (3, 9, 7, 3)),
    "flattened convolution": (lambda: flattened("Convolution"), (5, 12, 9, 3)),
    "flattened pooling": (lambda: flattened("Pooling"), (5, 11, 8, 4)),
    "basic blocks that drop": (lambda: dropping(small_resnet(False)), (4, 17, 14, 3)),
    "bottlenecks that drop": (lambda: dropping(bottlenecks(7, 7)), (5, 22, 18, 4)),
    "bottlenecks that drop batches": (lambda: dropping(bottlenecks(7, 7), "block"), (3, 22, 18, 4)),
    "BatchNorm first that drops": (lambda: dropping(pre_activation()), (4, 9, 7, 3)),
    "words": (words, (12, 1, 1, 1)),
    "binary cross entropy": (lambda: small_resnet(False), (3, 9, 8, 3)),
    "weighted classes": (lambda: small_resnet(False), (3, 9, 8, 3)),
}
LOSSES = {
    "binary cross entropy": lambda graph: passes.binary_cross_entropy(graph, 0.1),
    "weighted classes": lambda graph: passes.weigh_classes(graph, [0.25, 0.5, 1, 2, 4, 0.1, 3]),
}
PAIR = ("BatchNormPairApply", "BatchNormPairBackwardReduce", "BatchNormPairBackwardApply")
PRICES = {"fewest": fewest, "plain": plain, "own": own_forms, "gradients alone": gradients_alone}


def network(name):
    build, data = NETWORKS[name]
    build, data = NETWORKS[name]
    built = build()
    graph = built if isinstance(built, Graph) else Graph.from_json(built.tojson())
    return LOSSES.get(name, lambda same: same)(graph), {"data": data, "softmax_label": data[:1]}


def check_close(got, wanted, tolerance, name, floor=0.0):
    assert got.shape == wanted.shape, name
    assert np.abs(got - wanted).max() <= tolerance * max(np.abs(wanted).max(), floor), name


def check_step(graph, shapes, values, price, grouped=False, dtype="bfloat16"):
    """Check a training step with all its passes against the original network; returns the operators that ran."""
    step = pipeline.training_step(graph, shapes, dtype, price, grouped)
    values = {**values, SEED: values["data"].view(np.uint32).ravel()[:2]}
    graph = passes.draw_masks(graph, shapes["data"][0])
    given = dict(values) if dtype != "float16" else {**values, "loss_scale": np.array([8.0])}
    results = run(step, given)
    wanted = forward(graph, {Ref(name): value for name, value in values.items()}, training=True)
    gradients = backward(graph, wanted)
    largest = max(np.abs(gradients[Ref(name)]).max() for name in graph.arguments if name not in {*shapes, SEED})
    for name in graph.arguments:
        if f"{name}_grad" in results:  # otherwise it belongs to a fixed gamma
            scale = 8.0 if dtype == "float16" else 1.0
            check_close(results[f"{name}_grad"] / scale, gradients[Ref(name)], SAME, name, largest / 1e3)
    for node in graph:
        if node.op == "BatchNorm":
            for index, (old, new) in enumerate(zip(node.inputs[3:5], node.refs()[1:], strict=True)):
                moved = node["momentum"] * values[old.node] + (1 - node["momentum"]) * wanted[new]
                check_close(results[old.node], moved, SAME, (node.name, index))
    probabilities, label = wanted[graph.outputs[0]], values["softmax_label"].astype(int)
    assert results["top1"] == (probabilities.argmax(axis=1) == label).sum()
    return step.operators().keys()


@pytest.mark.long(but=["*-fewest", "basic blocks-own", "biases-own", "words-own", "bottlenecks-own"])
@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_against_the_network_as_it_is_given(name, price, rng):
    graph, shapes = network(name)
    values = random_variables(graph, shapes, rng)
    dtype = str(rng.choice(["bfloat16", "float16"]))
    check_step(graph, shapes, values, PRICES[price], grouped=bool(rng.integers(2)), dtype=dtype)


@pytest.mark.long(but=["basic blocks*", "wide*", "words", "biases", "flattened*"])
@pytest.mark.parametrize("name", NETWORKS)
def test_inference_against_the_network_as_it_is_given(name, rng):
    graph, shapes = network(name)
    values = random_variables(graph, shapes, rng)
    wanted = forward(graph, {Ref(name): value for name, value in values.items()}, training=False)
    aux = {name: values[name] for name in graph.aux}
    folded = passes.fold_bn_params(graph, values, aux)
    for price in PRICES.values():
        network_graph = pipeline.inference(graph, "bfloat16", price)
        tensors = {Ref(name): {**values, **folded}[name] for name in network_graph.variables}
        for node in network_graph:
            if not node.is_variable:
                tensors.update(zip(node.refs(), evaluate(node, [tensors[ref] for ref in node.inputs]), strict=True))
        check_close(tensors[network_graph.outputs[0]], wanted[graph.outputs[0]], SAME, name)


def test_pairs_of_convolutions_in_inference(rng):
    """Each block ends with a pair, except the last block and blocks with a projection shortcut, whose last convolution
    is in a sum. The tensor between the two convolutions keeps its readers."""
    graph = Graph.from_json(resnet(50).tojson())
    network_graph = pipeline.inference(graph, "float16", preferring(own_forms, "Conv1x1ForwardSumRelu"))
    pairs = [node for node in network_graph if node.op == "Conv1x1Pair"]
    assert len(pairs) == 15 - 4
    for pair in pairs:
        first, second = (network_graph.consumers[ref] for ref in pair.refs())
        assert len(first) == 1 and len(second) == 1
    assert "Conv1x1Pair" not in pipeline.inference(graph, "float32", own_forms).operators()


@pytest.mark.parametrize("depth, convolutions, behind_norms, with_relu", [(18, 4, 2, 2), (50, 3, 3, 3)])
def test_3x3_convolutions_of_our_own(depth, convolutions, behind_norms, with_relu):
    """If they are priced below cuDNN's, in 16 bits: the forward pass in stage 1; the data gradients there, alone or
    with the sums of the preceding BatchNorm + ReLU; the weight gradients of all convolutions with stride 1."""
    graph, shapes = Graph.from_json(resnet(depth).tojson()), {"data": (2, 64, 64, 3)}
    step = pipeline.training_step(graph, shapes, "bfloat16", own_forms)
    assert step.operators()["Conv3x3Weights"] == 13
    wanted = {"NormConv3x3": behind_norms, "Conv3x3ForwardStatistics": convolutions - behind_norms,
              "Conv3x3DgradReduce": behind_norms, "Conv3x3Dgrad": convolutions - behind_norms}
    own = [node for node in step if node.op in wanted]
    assert all(node.name.startswith("stage1") for node in own)
    assert Counter(node.op for node in own) == Counter(wanted)
    assert pipeline.inference(graph, "float16", own_forms).operators()["Conv3x3ForwardRelu"] == with_relu
    for dtype, price in (("float32", own_forms), ("float16", plain), ("float16", fewest)):
        operators = {*pipeline.training_step(graph, shapes, dtype, price).operators(),
                     *pipeline.inference(graph, dtype, price).operators()}
        found = {op for op in operators if op.startswith("Conv3x3")}
        assert found == ({"Conv3x3DgradReduce"} if price is fewest else set())


def test_sums_of_convolutions_in_inference():
    """Each projection shortcut is fused into a sum of two convolutions; only the first shortcut has stride 1."""
    graph = Graph.from_json(resnet(50).tojson())
    network_graph = pipeline.inference(graph, "float16", preferring(own_forms, "Conv1x1ForwardSumRelu"))
    sums = [node for node in network_graph if node.op == "Conv1x1ForwardSumRelu"]
    assert [node["stride"] for node in sums] == [(1, 1), (2, 2), (2, 2), (2, 2)]
    assert not any("shortcut" in node.name for node in network_graph if not node.is_variable)
    for dtype, price in (("float32", own_forms), ("float16", plain)):
        assert "Conv1x1ForwardSumRelu" not in pipeline.inference(graph, dtype, price).operators()


@pytest.mark.parametrize("last_is_shortcut", [False, True])
def test_a_sum_is_two_convolutions_beside_one_another(last_is_shortcut, rng):
    """The sum equals two separate convolutions, with stride 2 in either of them."""
    values = {"x": (2, 6, 10, 16), "w": (24, 1, 1, 16), "b": (24,),
              "x2": (2, 3, 5, 8), "w2": (24, 1, 1, 8), "b2": (24,)}
    arrays = {name: rng.standard_normal(shape) for name, shape in values.items()}
    attrs = {"kernel": (1, 1), "layout": "NHWC", "dtype": "float16", "num_filter": 24}
    operands = [(("x", "w", "b"), (2, 2)), (("x2", "w2", "b2"), (1, 1))]
    (of_addend, stride), (of_last, last_stride) = reversed(operands) if last_is_shortcut else operands
    addend = Node("Convolution", "addend", tuple(map(Ref, of_addend)), {**attrs, "stride": stride})
    last = Node("ConvolutionAddRelu", "last", tuple(map(Ref, (*of_last, "addend"))), {**attrs, "stride": last_stride})
    graph = Graph([*(Node("null", name) for name in values), addend, last], [Ref("last")])
    summed = pipeline.cover(graph, fewest)
    assert summed.operators() == {"Conv1x1ForwardSumRelu": 1}
    assert summed.infer_shapes({"x": values["x"], "x2": values["x2"]})[Ref("last")] == (2, 3, 5, 24)
    (node,) = (node for node in summed if not node.is_variable)
    (got,) = evaluate(node, [arrays[ref.node] for ref in node.inputs])
    (first,) = evaluate(addend, [arrays[name] for name in of_addend])
    (wanted,) = evaluate(last, [*(arrays[name] for name in of_last), first])
    check_close(got, wanted, SAME, "last")
    read_twice = Graph(graph, [Ref("last"), Ref("addend")])
    assert pipeline.cover(read_twice, lambda table: repriced(table, fewest, Conv1x1ForwardSumRelu=1.1)) == read_twice, (
        "the addend is to be written anyway")


def test_a_pair_is_two_convolutions_after_one_another(rng):
    """Equal bits in float16: the tensor in between is rounded as it would be when stored."""
    values = {"x": (2, 3, 5, 16), "w": (24, 1, 1, 16), "b": (24,), "a": (2, 3, 5, 24), "w2": (8, 1, 1, 24), "b2": (8,)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32 if name in ("b", "b2") else np.float16)
              for name, shape in values.items()}
    attrs = {"kernel": (1, 1), "layout": "NHWC", "dtype": "float16"}
    first = Node("ConvolutionAddRelu", "first", tuple(map(Ref, ("x", "w", "b", "a"))), {**attrs, "num_filter": 24})
    second = Node("ConvolutionRelu", "second", (Ref("first"), Ref("w2"), Ref("b2")), {**attrs, "num_filter": 8})
    variables = [Node("null", name) for name in values]
    graph = Graph([*variables, first, second], [Ref("first"), Ref("second")])
    paired = pipeline.cover(graph, fewest)
    assert paired.operators() == {"Conv1x1Pair": 1} and paired.outputs == (Ref("first"), Ref("first", 1))
    (pair,) = (node for node in paired if not node.is_variable)
    y, z = evaluate(pair, [arrays[ref.node] for ref in pair.inputs])
    (wanted,) = evaluate(first, [arrays[name] for name in ("x", "w", "b", "a")])
    wanted = wanted.astype(np.float16)
    assert np.array_equal(y, wanted)
    assert np.array_equal(z, evaluate(second, [wanted, arrays["w2"], arrays["b2"]])[0])


SUMS = {"own": "Conv1x1Statistics", "cudnn": "ConvolutionStatistics", "separate": "BatchNormStatistics"}
ENDS = ("NormConv1x1", "NormConv1x1Pair")
WITHIN = ("NormReluConv1x1", "NormReluConv1x1 without output")


def with_sums(kind):
    """Prices by which the sums of a convolution come from one of these fusions wherever possible."""
    others = [label for label in SUMS.values() if label not in (SUMS[kind], "BatchNormStatistics")]
    others += ["Conv3x3ForwardStatistics"] if kind == "separate" else []
    return refusing(preferring(fewest, SUMS[kind]), *others)


def check_same(graph, shapes, values, grouped, prices):
    """Check that steps by either price have equal results; returns both steps."""
    steps = [pipeline.training_step(graph, shapes, "bfloat16", price, grouped) for price in prices]
    one, other = (run(step, values) for step in steps)
    for name, wanted in other.items():
        check_close(one[name], wanted, SAME, name, np.abs(other["fc_weight_grad"]).max() / 1e3)
    return steps


@pytest.mark.long(but=["False-own"])
@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_end_of_a_block_with_the_convolution_that_follows(sums, grouped, rng):
    """Each block that another block follows ends with one fused operator, whichever operator computes the convolution's
    sums. The results are those of the unfused step, including all outputs that other nodes read."""
    without = refusing(with_sums(sums), *WITHIN, *ENDS, "NormConv3x3")
    with_it = preferring(without, *ENDS)
    graph, shapes = network("bottlenecks")
    values = random_variables(graph, shapes, rng)
    assert {*ENDS} <= check_step(graph, shapes, values, with_it, grouped)
    fused, separate = check_same(graph, shapes, values, grouped, (with_it, without))
    assert fused.operators().total() == separate.operators().total() - (4 if sums == "separate" else 2)


@pytest.mark.long(but=["False"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_batch_norm_with_the_3x3_convolution_that_follows(grouped, rng):
    """BatchNorm and 3x3 convolution give equal results in one operator and in two."""
    without = preferring(refusing(fewest, *WITHIN, *ENDS, "NormConv3x3"), "Conv3x3ForwardStatistics")
    with_it = preferring(without, "NormConv3x3")
    graph, shapes = network("bottlenecks")
    values = random_variables(graph, shapes, rng)
    assert "NormConv3x3" in check_step(graph, shapes, values, with_it, grouped)
    fused, separate = check_same(graph, shapes, values, grouped, (with_it, without))
    blocks = fused.operators()["NormConv3x3"]
    assert blocks == 3 and separate.operators()["Conv3x3ForwardStatistics"] == blocks
    assert fused.operators().total() == separate.operators().total() - blocks


@pytest.mark.long(but=["False-cudnn"])
@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_batch_norm_with_the_1x1_convolution_that_follows(sums, grouped, rng):
    """Each block has one fused operator before its last convolution, whichever operator computes that convolution's
    sums. The results are those of the unfused step. The BatchNorm's output is written only if another node reads it,
    and not if the gradients recompute it."""
    again = ("NormBackward", "NormBackwardReduce", "NormDgrad")
    without = preferring(refusing(with_sums(sums), *WITHIN, *ENDS, "NormConv3x3", *again[::2]), again[1])
    with_it = preferring(without, *WITHIN)
    graph, shapes = network("bottlenecks")
    values = random_variables(graph, shapes, rng)
    assert "NormReluConv1x1" in check_step(graph, shapes, values, with_it, grouped)
    fused, separate = check_same(graph, shapes, values, grouped, (with_it, without))
    blocks = fused.operators()["NormReluConv1x1"]
    assert blocks == 3 and "NormReluConv1x1" not in separate.operators()
    saved = 2 * blocks if sums == "separate" else blocks
    assert fused.operators().total() == separate.operators().total() - saved
    for price in (with_it, refusing(with_it, *again)):
        step = pipeline.training_step(graph, shapes, "bfloat16", price, grouped)
        found = [node for node in step if node.op == "NormReluConv1x1"]
        assert len(found) == blocks
        assert all(node["no_output"] <= (not step.consumers.get(Ref(node.name))) for node in found)
        assert any(not step.consumers.get(Ref(node.name)) for node in found) == (price is with_it)


def test_an_output_that_nobody_reads_is_left_out_where_that_is_cheaper():
    """Each set of outputs has its own price."""
    graph, shapes = network("bottlenecks")
    for cheaper, left_out in ((WITHIN[1], True), (WITHIN[0], False)):
        price = preferring(own_kernels, "NormBackwardReduce")

        def cheapest(table, price=price, cheaper=cheaper):
            return repriced(table, price, **{cheaper: 0.3})

        step = pipeline.training_step(graph, shapes, "bfloat16", cheapest)
        found = [node["no_output"] for node in step if node.op == "NormReluConv1x1"]
        assert found == [left_out] * 3


def test_where_a_block_and_the_next_convolution_are_left_alone():
    """There is no fusion with stochastic depth, in fp32, if the convolution is not a matrix product, or if nobody needs
    its sums."""
    def norms(name, dtype="float16"):
        graph, shapes = network(name) if isinstance(name, str) else name
        listed = pipeline.training_passes(shapes, dtype, fewest)
        before = pipeline.run({each: run for each, run in listed.items() if each != "cover"}, graph)
        table = pipeline.candidates(before, before.infer_shapes(shapes))
        places = {(each.op, each.node.name) for each in table if each.op in ("NormReluConv1x1", *ENDS)}
        return Counter(op for op, _ in places)

    within = {"NormReluConv1x1": 3}  # before the last convolution of a block
    # After a projection there are two candidates: the pair of BatchNorms, and one BatchNorm that adds the other's
    # output.
    assert norms("bottlenecks") == {**within, "NormConv1x1Pair": 1, "NormConv1x1": 2}
    assert norms("bottlenecks", "float32") == norms("basic blocks") == {}
    assert norms("bottlenecks that drop") == {**within, "NormConv1x1Pair": 1, "NormConv1x1": 1}
    assert norms("BatchNorm first") == {"NormReluConv1x1": 2}  # before the first
    whole = Graph.from_json(resnet(50).tojson()), {"data": (2, 64, 64, 3)}
    assert norms(whole) == {"NormConv1x1": 15, "NormConv1x1Pair": 4, "NormReluConv1x1": 16}


@pytest.mark.parametrize("build, alone", [(projections, ["a2", "b2"]), (lambda: bottlenecks(3, 7, 256), ["a4"])])
def test_one_of_a_pair_of_batch_norms_goes_its_own_way(build, alone, rng):
    """The convolution of only one of the two BatchNorms supports the fusion. That one is fused, and the other
    BatchNorm's gradient is computed separately from the same gradient of the sum."""
    graph = passes.bn_relu(passes.bn_add_relu(Graph.from_json(build().tojson())))
    shapes = {"data": (3, 5, 7, 3), "softmax_label": (3,)}
    check_step(graph, shapes, random_variables(graph, shapes, rng), fewest)
    step = pipeline.training_step(graph, shapes, "float16", fewest)
    assert "BatchNormPairBackwardApply" not in step.operators()
    for name in alone:
        others = [node.op for node in step if node.inputs and node.inputs[0] == step[f"{name}_conv_wgrad"].inputs[0]]
        assert sum(op in ("BatchNormBackwardApply", "NormDgrad") for op in others) == 1 and len(others) == 2


@pytest.mark.long
def test_random_networks(rng):
    """Operators in any order, fused or not: the gradients equal those of the original network."""
    shapes = {"data": (3, 18, 22, 4), "softmax_label": (3,)}
    for number in range(12):
        graph = Graph.from_json(random_network(rng).tojson())
        values = random_variables(graph, shapes, rng)
        check_step(graph, shapes, values, PRICES["fewest" if number % 3 else "plain"], grouped=bool(number % 2))


@pytest.mark.long
def test_every_operator_is_in_one_of_these_graphs():
    """All operators of the table, except those that no pass writes, those that only some executors know, and those of
    other tests: INT8 (test_quantise.py), custom losses (test_losses.py), `reverse` (test_convnets.py)."""
    seen = set()
    others = [(Graph.from_json(build("NHWC").tojson()), {"data": (2, 9, 11, 3), "softmax_label": (2,)})
              for build in (convnext, efficient, elements, mobile)]
    for graph, shapes in [*map(network, NETWORKS), *others]:
        seen |= graph.operators().keys()
        for price in PRICES.values():
            steps = [pipeline.training_passes(shapes, "float16", price, grouped=True),
                     pipeline.inference_passes("float16", price)]
            for listed in steps:
                after = graph
                for each in listed.values():
                    after = each(after)
                    seen |= after.operators().keys()
                assert Graph.from_json(after.to_json()) == after
    in_int8 = {op for op in OPERATORS if op.startswith("Quantise")}
    elsewhere = {"CustomOutput", "CustomLoss", "reverse"}
    assert set(OPERATORS) - seen == {"softmax", "Dequantise"} | in_int8 | elsewhere


@pytest.mark.long(but=["basic*", "biases", "weighted classes"])
@pytest.mark.parametrize("name", ["basic blocks", "bottlenecks", "biases", "BatchNorm first", "basic blocks that drop",
                                  "bottlenecks that drop batches", "BatchNorm first that drops", *LOSSES])
def test_the_executor_against_mxnet(name, rng):
    """Three steps, one of them with mixup, one with CutMix, and inference. MXNet has fp32 and stock operators. If fp32
    rounding decides a ReLU near the end, all gradients before it change: then other numbers are used, up to 4 times."""
    graph, shapes = network(name)
    own = create_executor("reference", graph, shapes, dtype="float64", network_dtype="bfloat16")
    other = create_executor("mxnet", graph, shapes)
    for _ in range(4):
        values = random_variables(graph, shapes, rng)
        for name in graph.arguments:
            if name.endswith("weight"):
                values[name] *= 0.7  # so that a ReLU near 0 is rare
        params = {name: values[name].astype(np.float32) for name in graph.arguments if name not in shapes}
        aux = {name: values[name].astype(np.float32) for name in graph.aux}
        data, label = values["data"].astype(np.float32), values["softmax_label"].astype(np.float32)
        for executor in (own, other):
            executor.read_metrics()
            executor.set_params(params, aux)
            executor.forward_backward(mx.nd.array(data), mx.nd.array(label), draws=Draws(seed=2**63 + 1))
            for draws in (Draws(mixup=0.75, seed=7), Draws(cutmix=Box(1, 0, 7, 5))):
                executor.forward_backward(mx.nd.array(data), mx.nd.array(label), accumulate=True, draws=draws)
        canonical = {name: (own.to_canonical(name, own.grads[name]), other.to_canonical(name, other.grads[name]))
                     for name in params}
        norms = [np.linalg.norm(one - two) / max(np.linalg.norm(two), 1e-3) for one, two in canonical.values()]
        if np.median(norms) < 1e-4:
            break
    assert np.median(norms) < 1e-4 and max(norms) < 5e-2, "a ReLU may flip"
    fused = own.step_graph(shapes["data"]).operators()
    assert any(OPERATORS[op].fused for op in fused)
    for name in aux:
        check_close(own.to_canonical(name, own.aux[name]), other.to_canonical(name, other.aux[name]), 1e-4, name)
    check_close(own.forward(data, label), other.forward(*map(mx.nd.array, (data, label))).asnumpy(), 1e-3, "answers")
    metrics = own.read_metrics(), other.read_metrics()
    assert metrics[0].loss_sum == pytest.approx(metrics[1].loss_sum, rel=1e-4)
    assert metrics[0][1:] == metrics[1][1:]


def test_the_executor_follows_the_size_of_the_images(rng):
    graph, shapes = network("bottlenecks")
    values = random_variables(graph, shapes, rng)
    executor = create_executor("reference", graph, shapes, dtype="float64", network_dtype="bfloat16")
    executor.set_params({name: values[name] for name in executor.params}, {name: values[name] for name in executor.aux})
    larger = rng.standard_normal((3, 26, 28, 4))
    executor.forward_backward(larger, values["softmax_label"])
    assert np.isfinite(executor.grads["stem_conv_weight"]).all() and executor.forward(larger).shape == (3, 7)
    with pytest.raises(GraphError, match="the reference executor has no network dtype 'float16'"):
        create_executor("reference", graph, shapes, network_dtype="float16")


def test_a_cpu_network_in_nchw_runs_unfused_where_kernels_are_for_nhwc(rng):
    """The passes do not fuse graphs that the fused operators do not support."""
    graph = passes.layout(network("bottlenecks")[0], "NCHW", inputs=["data"])
    shapes = {"data": (2, 4, 22, 18), "softmax_label": (2,)}
    values = random_variables(graph, shapes, rng)
    operators = check_step(graph, shapes, values, fewest)
    assert not operators & {"StemFprop", "BatchNormReluMaxPool", "DgradReduce", "NormBackward"}
    assert "BatchNormPairApply" in operators


@pytest.mark.parametrize("dtype, wanted", [("float32", {"ConvolutionStatistics", *PAIR}), ("float16", {
    "ConvolutionStatistics", "Conv1x1Statistics", "Conv3x3ForwardStatistics", "StemFprop",
    "StemForward", "StemWgrad", "StemWeights", *PAIR, *ENDS, *WITHIN,
    "NormConv3x3", "DgradReduce", "DgradStream", "NormBackward", "NormBackwardReduce",
    "NormDgrad", "BatchNormBackwardApply", "Conv3x3Dgrad", "Conv3x3DgradReduce", "Conv3x3Weights"})])
def test_what_can_be_fused(dtype, wanted):
    """In fp32 there are only two fusions: a convolution with its sums, and pairs of BatchNorms."""
    graph, shapes = Graph.from_json(resnet(50).tojson()), {"data": (2, 64, 64, 3)}
    listed = pipeline.training_passes(shapes, dtype, fewest)
    before = pipeline.run({each: run for each, run in listed.items() if each != "cover"}, graph)
    table = pipeline.candidates(before, before.infer_shapes(shapes))
    assert {each.label for each in table if each.is_fused} == wanted
