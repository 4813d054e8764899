"""The executors `mxnet` and `reference` behind their common interface, and the production settings of oneDNN."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from step_networks import fused, random_variables, rounding_decides, small_resnet

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, passes
from graph_passes.executors import Box, Draws, Metrics, create_executor
from train.models import resnet, resnet_d

CLASSES = 7
KINDS = ["mxnet", "reference"]


@pytest.fixture
def problem(rng):
    return make_problem(rng, bottleneck=bool(rng.integers(2)), channels=int(rng.choice([3, 4])))


def make_problem(rng, bottleneck=True, channels=3):
    """A fused network, its input shapes, canonical values, and two batches."""
    symbol = small_resnet(bottleneck, classes=CLASSES)
    graph = fused(symbol)
    n, height, width = int(rng.integers(5, 8)), int(rng.integers(17, 24)), int(rng.integers(17, 24))
    shapes = {"data": (n, height, width, channels), "softmax_label": (n,)}
    values = random_variables(graph, shapes, rng, CLASSES, np.float32)
    params = {name: values[name] for name in graph.arguments if name not in shapes}
    aux = {name: values[name] for name in graph.aux}
    plain = Graph.from_json(symbol.tojson())
    batches = []
    while len(batches) < 2:
        batch = {"data": rng.standard_normal(shapes["data"]).astype("f"),
                 "softmax_label": rng.integers(0, CLASSES, n).astype("f")}
        if not rounding_decides(plain, {**values, **batch}):
            batches.append(tuple(batch.values()))
    return graph, shapes, params, aux, batches


def executors(problem, *kinds, **options):
    graph, shapes, params, aux, _ = problem
    made = [create_executor(kind, graph, shapes, **(options if kind == "reference" else {})) for kind in kinds]
    for executor in made:
        executor.set_params(params, aux)
    return made


def nd(batch):
    return tuple(mx.nd.array(array) for array in batch)


@pytest.mark.parametrize("kernel, refused", [((16, 16), ()), ((17, 16), ("reference",))])
def test_windows_of_more_places_than_a_byte_counts(kernel, refused, rng):
    """The position of a maximum is kept in a byte, except by MXNet; if a byte is too small, a sentence says so."""
    x = mx.sym.BatchNorm(mx.sym.Variable("data"), axis=3, fix_gamma=False, name="bn")  # this needs its gradient
    x = mx.sym.Pooling(x, kernel=kernel, pool_type="max", layout="NHWC", name="large")
    graph = Graph.from_json(mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=4, name="fc"), name="softmax").tojson())
    shapes = {"data": (3, 20, 20, 8), "softmax_label": (3,)}
    for kind in ("mxnet", "reference"):
        executor = create_executor(kind, graph, shapes)
        sentence = r"Pooling 'large' has kernel=\(17, 16\), but .*: use a kernel of at most 256 elements$"
        with pytest.raises(GraphError, match=sentence) if kind in refused else contextlib.nullcontext():
            executor.forward_backward(*nd((rng.standard_normal(shapes["data"]), np.zeros(3))))


@pytest.mark.parametrize("kind, rounding", [("mxnet", 1e-5), ("reference", 1e-7)])
@pytest.mark.parametrize("ratio", [100, 1000])
def test_statistics_far_from_zero(kind, rounding, ratio, rng):
    """With a mean of `ratio` deviations, the variance loses no more than the square of the mean's rounding error: 1e-4
    of it at most, where E[x^2] - E[x]^2 in fp32 would be 6 % off. tests/graph_passes/cuda tests this for the kernels.

    MXNet adds a mean's 9,216 numbers one after another in fp32, which leaves it 1.4e-6 off (one standard deviation; the
    worst of 3,200 was 5.7e-6). The reference adds in float64 and rounds once.
    """
    x = mx.sym.BatchNorm(mx.sym.Variable("data"), axis=3, momentum=0.0, fix_gamma=False, name="bn")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=4, name="fc")
    graph = Graph.from_json(mx.sym.SoftmaxOutput(x, name="softmax").tojson())
    executor = create_executor(kind, graph, {"data": (16, 24, 24, 8), "softmax_label": (16,)})
    data = rng.normal(ratio, 1, (16, 24, 24, 8)).astype("f")
    executor.forward_backward(*nd((data, np.zeros(16))))
    aux = executor.get_params()[1]
    mean, var = (getattr(data.astype(np.float64), name)((0, 1, 2)) for name in ("mean", "var"))
    np.testing.assert_allclose(aux["bn_moving_mean"], mean, rtol=rounding)
    np.testing.assert_allclose(aux["bn_moving_var"], var, rtol=rounding + (rounding * ratio) ** 2)


def canonical_grads(executor):
    return {name: executor.to_canonical(name, array) for name, array in executor.grads.items()}


def assert_close(results, expected, tolerance):
    """Relative to each tensor's largest element, or to a hundredth of the largest of all if that is larger. The
    gradient of a bias before a BatchNorm is 0, as a sum of terms as large as those of the weight's gradient: it is
    compared relative to that."""
    floor = 1e-2 * max(np.abs(array).max() for array in expected.values())
    for name, array in expected.items():
        of = expected["stem_weight"] if name == "stem_bias" else array
        np.testing.assert_allclose(results[name], array, rtol=0, atol=tolerance * max(np.abs(of).max(), floor),
                                   err_msg=name)


def test_mxnet_equals_the_reference(problem):
    """Two training passes: gradients, running statistics, metrics and inference, fp32 against float64."""
    stock, reference = executors(problem, *KINDS, dtype="float64")
    for batch in problem[4]:
        for executor in (stock, reference):
            executor.forward_backward(*nd(batch))
        assert_close(canonical_grads(stock), canonical_grads(reference), 1e-4)
    assert_close(stock.get_params()[1], reference.get_params()[1], 1e-5)
    metrics, expected = stock.read_metrics(), reference.read_metrics()
    assert metrics[1:] == expected[1:]
    assert metrics.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
    data = problem[4][0][0]
    np.testing.assert_allclose(stock.forward(mx.nd.array(data)).asnumpy(), reference.forward(data), rtol=1e-4)


@pytest.mark.parametrize("size", [(16, 16), (17, 15)])
def test_groups_and_average_pooling(size, rng, capfd):
    """fp32 against float64. For even sizes oneDNN does the pooling, without a message."""
    x = resnet.batch_norm(resnet.conv(mx.sym.Variable("data"), "first", 12, 3), "first_bn")
    x = resnet.relu(resnet.batch_norm(resnet.conv(x, "grouped", 24, 3, stride=1, groups=4), "grouped_bn"), "relu")
    x = mx.sym.FullyConnected(resnet_d.projection(x, "shortcut", 8, 2), num_hidden=CLASSES, name="fc")
    graph = fused(mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax"))
    shapes = {"data": (4, *size, 3), "softmax_label": (4,)}
    values = random_variables(graph, shapes, rng, CLASSES, np.float32)
    batch = rng.standard_normal(shapes["data"]).astype("f"), rng.integers(0, CLASSES, 4).astype("f")
    params = {name: values[name] for name in graph.arguments if name not in shapes}
    problem = graph, shapes, params, {name: values[name] for name in graph.aux}, [batch]
    stock, reference = executors(problem, *KINDS, dtype="float64")
    for executor in (stock, reference):
        executor.forward_backward(*nd(batch))
        executor.forward_backward(*nd(batch), accumulate=True)
    assert_close(canonical_grads(stock), canonical_grads(reference), 1e-4)
    assert stock.read_metrics().loss_sum == pytest.approx(reference.read_metrics().loss_sum, rel=1e-5)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_come_back_as_they_were_given(kind, problem):
    (executor,) = executors(problem, kind)
    params, aux = executor.get_params()
    for given, returned in ((problem[2], params), (problem[3], aux)):
        assert given.keys() == returned.keys()
        for name in given:
            np.testing.assert_array_equal(given[name], returned[name])
    shape = problem[2]["a_1_conv_weight"].shape
    own = executor.from_canonical("a_1_conv_weight", problem[2]["a_1_conv_weight"])
    assert own.shape == executor.params["a_1_conv_weight"].shape
    assert executor.to_canonical("a_1_conv_weight", executor.grads["a_1_conv_weight"]).shape == shape
    params["fc_bias"][:] = 99  # a copy
    assert 99 not in executor.get_params()[0]["fc_bias"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_accumulate(kind, problem):
    (executor,) = executors(problem, kind)
    separate = []
    for batch in problem[4]:
        executor.forward_backward(*nd(batch))
        separate.append(canonical_grads(executor))
    for number, batch in enumerate(problem[4]):
        executor.forward_backward(*nd(batch), accumulate=number > 0)
    assert_close(canonical_grads(executor), {n: separate[0][n] + separate[1][n] for n in separate[0]}, 1e-6)
    executor.forward_backward(*nd(problem[4][1]))  # and without it they start again
    assert_close(canonical_grads(executor), separate[1], 1e-6)


def mixed_by_hand(data, draws):
    """Images mixed one by one by the definitions of mixup and CutMix, and the share of an image's own label."""
    images, partners = data.copy(), data[::-1]
    if not draws.cutmix:
        return (draws.mixup * data + (1 - draws.mixup) * partners).astype(np.float32), draws.mixup
    top, left, bottom, right = draws.cutmix
    _, height, width, _ = data.shape
    inside = np.zeros((height, width, 1), bool)
    for y in range(top, bottom):
        for x in range(left, right):
            inside[y, x] = True
    return np.where(inside, partners, images), 1 - inside.mean()


@pytest.mark.long(but=["*mixup=0.5, cutmix=None*"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", [Draws(mixup=0.5), Draws(mixup=0.7), Draws(cutmix=Box(0, 3, 9, 17)),
                                   Draws(cutmix=Box(1, 0, 18, 16)), Draws(cutmix=Box(5, 5, 5, 9)),
                                   Draws(cutmix=Box(0, 0, 18, 9)), Draws(cutmix=Box(0, 0, 18, 18))], ids=str)
def test_mixing_is_the_mean_of_two_plain_passes(kind, draws, rng):
    """Cross entropy is linear in its targets: a pass with mixup or CutMix is a weighted mean of two plain passes over
    the mixed images, one with their own labels and one with their partners'. fp32: rounding only."""
    graph, shapes, params, aux, _ = make_problem(rng)
    shapes["data"] = (shapes["data"][0], 18, 18, 3)
    n = shapes["data"][0]  # odd or even
    problem = graph, shapes, params, aux, None
    executor, plain = executors(problem, kind, kind)
    data, label = rng.standard_normal(shapes["data"]).astype("f"), rng.integers(0, CLASSES, n).astype("f")
    mixed, share = mixed_by_hand(data, draws)
    smaller = np.minimum(label, label[::-1])
    grads, metrics = [], []
    for labels in (label, label[::-1].copy(), smaller):
        plain.forward_backward(*nd((mixed, labels)))
        grads.append(canonical_grads(plain))
        metrics.append(plain.read_metrics())
    executor.forward_backward(*nd((data, label)), draws=draws)
    expected = {name: share * grads[0][name] + (1 - share) * grads[1][name] for name in grads[0]}
    assert_close(canonical_grads(executor), expected, 1e-4)
    got = executor.read_metrics()
    counted = metrics[0] if share > 0.5 else metrics[1] if share < 0.5 else metrics[2]
    assert got[1:] == counted[1:], "hits are those of the labels with the larger share"
    assert got.loss_sum == pytest.approx(share * metrics[0].loss_sum + (1 - share) * metrics[1].loss_sum, rel=1e-5)
    executor.forward_backward(*nd((data, label)))  # and the next pass is a plain one again
    plain.set_params(*executor.get_params())
    plain.forward_backward(*nd((data, label)))
    assert_close(canonical_grads(executor), canonical_grads(plain), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", [Draws(cutmix=Box(0, 0, 5, 40)), Draws(cutmix=Box(3, 4, 2, 9)),
                                   Draws(0.7, Box(0, 0, 5, 5))], ids=str)
def test_a_box_that_cannot_be_is_refused(kind, draws, problem):
    (executor,) = executors(problem, kind)
    height, width = problem[1]["data"][1:3]
    with pytest.raises(GraphError, match=f"for images of {height}x{width}: give a box inside the image"):
        executor.forward_backward(*nd(problem[4][0]), draws=draws)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_count_what_they_should(kind, problem, rng):
    """Loss with label smoothing 0.1, top-1 and top-5 computed independently; images beyond num_valid do not count."""
    (executor,) = executors(problem, kind)
    loss, top1, top5, count = 0.0, 0, 0, 0
    for data, label in problem[4]:
        num_valid = int(rng.integers(0, len(label) + 1))
        executor.infer(*nd((data, label)), num_valid)
        evaluated = executor.request_probabilities()
        output = executor.forward(mx.nd.array(data))
        probabilities = output.asnumpy() if kind == "mxnet" else output
        executor.forward(mx.nd.zeros(data.shape))  # calls in between do not change the requested results
        np.testing.assert_array_equal(evaluated(), probabilities)
        for p, target in zip(probabilities[:num_valid], label[:num_valid].astype(int), strict=True):
            loss -= 0.9 * np.log(p[target]) + sum(0.1 / 6 * np.log(p[k]) for k in range(CLASSES) if k != target)
            rank = sum(p > p[target])
            top1, top5, count = top1 + (rank < 1), top5 + (rank < 5), count + 1
    metrics = executor.read_metrics()
    assert metrics[1:] == (top1, top5, count)
    assert metrics.loss_sum == pytest.approx(loss, rel=1e-5)
    assert executor.read_metrics() == Metrics(0.0, 0, 0, 0)


def test_two_runs_give_equal_bits(problem):
    results = []
    for _ in range(2):
        (executor,) = executors(problem, "mxnet")
        for batch in problem[4]:
            executor.forward_backward(*nd(batch))
        results.append((canonical_grads(executor), executor.get_params()[1], executor.read_metrics()))
    for first, second in zip(*(result[:2] for result in results), strict=True):
        for name in first:
            assert first[name].tobytes() == second[name].tobytes(), name
    assert results[0][2] == results[1][2]


def test_half_precision_batches_are_taken(problem):
    (executor,) = executors(problem, "mxnet")
    data = mx.nd.array(problem[4][0][0])
    expected = executor.forward(data.astype("float16").astype("float32")).asnumpy()
    np.testing.assert_array_equal(executor.forward(data.astype("float16")).asnumpy(), expected)


def test_a_network_without_a_loss_infers_only(problem):
    """A network that ends in class scores, like an exported one."""
    scores = fused(small_resnet(True).get_internals()["fc_output"])
    executor = create_executor("mxnet", scores, {"data": (2, 19, 19, 3)})
    assert executor.forward(mx.nd.zeros((2, 19, 19, 3))).shape == (2, CLASSES)
    with pytest.raises(GraphError, match="does not end in SoftmaxOutput"):
        executor.forward_backward(mx.nd.zeros((2, 19, 19, 3)), mx.nd.zeros(2))
    with pytest.raises(GraphError, match="made without a shape for 'softmax_label': it has data"):
        executor.infer(mx.nd.zeros((2, 19, 19, 3)), mx.nd.zeros(2), 2)


# --- other image sizes ---


@pytest.mark.long(but=["mxnet"])
@pytest.mark.parametrize("kind", KINDS)
def test_images_of_another_size(kind, problem, rng):
    """Training changes sizes, with inference at a further size in between. The results have the bits of an executor
    that was made for that size and given the parameters."""
    graph, shapes, *_ = problem
    (executor,) = executors(problem, kind)
    n, _, _, channels = shapes["data"]
    for height, width in [(33, 30), (18, 18), (33, 30)]:
        train_shape, larger = (n, height, width, channels), (n, height + 5, width + 3, channels)
        data, label = rng.standard_normal(train_shape).astype("f"), rng.integers(0, CLASSES, n).astype("f")
        images = rng.standard_normal(larger).astype("f")
        (fresh,) = executors((graph, shapes | {"data": train_shape}, *executor.get_params(), None), kind)
        (inferring,) = executors((graph, shapes | {"data": larger}, *executor.get_params(), None), kind)
        for one, other in ((executor, executor), (fresh, inferring)):
            other.infer(mx.nd.array(images), mx.nd.array(label), n - 1)
            one.forward_backward(*nd((data, label)))
            one.forward_backward(*nd((data, label)), accumulate=True)
        together, alone = executor.read_metrics(), [fresh.read_metrics(), inferring.read_metrics()]
        np.testing.assert_allclose(together, np.sum(alone, axis=0), rtol=1e-6)  # summed in another order
        assert together.count == 3 * n - 1
        for name, gradient in canonical_grads(fresh).items():
            np.testing.assert_array_equal(canonical_grads(executor)[name], gradient, name)
        for name, array in executor.params.items():
            array[:] = array - 0.01 * executor.grads[name]  # the next size starts from other parameters


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_that_works_at_one_size_only(kind, rng):
    data = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    graph = Graph.from_json(mx.sym.SoftmaxOutput(data, name="softmax").tojson())
    executor = create_executor(kind, graph, {"data": (2, 5, 5, 3), "softmax_label": (2,)})
    with pytest.raises(GraphError, match=r"'fc_weight' would need another shape: .* images of 5x5 only"):
        executor.forward(mx.nd.zeros((2, 6, 5, 3)))


# --- bad input ---


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_batches_are_refused(kind, problem):
    (executor,) = executors(problem, kind)
    data, label = problem[4][0]
    with pytest.raises(GraphError, match=r"'data' has the shape .* but the executor was made for"):
        executor.forward_backward(mx.nd.array(data[:-1]), mx.nd.array(label))
    with pytest.raises(GraphError, match="'softmax_label' has the shape"):
        executor.infer(mx.nd.array(data), mx.nd.array(label[:-1]), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("stem_weight"), "parameter 'stem_weight' is missing"),
        (lambda p: p.update(extra=np.zeros(3)), "parameter 'extra' does not belong"),
        (lambda p: p.update(fc_bias=np.zeros(9)), r"'fc_bias' has shape \(9,\), this network needs \(7,\)"),
        (lambda p: p.update(stem_weight=np.zeros((6, 3, 3, 5))), r"'stem_weight' has shape \(6, 3, 3, 5\)"),
    ],
)
def test_values_of_another_network_are_refused(kind, change, message, problem):
    (executor,) = executors(problem, kind)
    params = dict(problem[2])
    change(params)
    params["fc_weight"] = params["fc_weight"] + 1
    with pytest.raises(GraphError, match=message):
        executor.set_params(params, problem[3])
    np.testing.assert_array_equal(executor.get_params()[0]["fc_weight"], problem[2]["fc_weight"])  # nothing was set


@pytest.mark.parametrize(
    ("name", "shapes", "device", "message"),
    [
        ("mxnett", {"data": (2, 19, 19, 3)}, "cpu(0)", "no executor 'mxnett'"),
        ("mxnet", {"data": (2, 19, 19, 3)}, "tpu(0)", r"no device 'tpu\(0\)'"),
        ("mxnet", {"data": (2, 19, 19, 3)}, "gpu(99)", "GPUs here"),
        ("reference", {"data": (2, 19, 19, 3)}, "gpu(0)", r"cannot run on the device 'gpu\(0\)': give cpu"),
        ("mxnet", {"image": (2, 19, 19, 3)}, "cpu(0)", "no input 'image'"),
        ("mxnet", {"data": (0, 19, 19, 3)}, "cpu(0)", "every dimension must be at least 1"),
        ("mxnet", {"data": (2, 19, 3)}, "cpu(0)", r"do not fit the graph|4 dimensions"),
        ("mxnet", {"softmax_label": (3,)}, "cpu(0)", "the shape of 'data'.* is not known: give it"),
        ("reference", {"data": (2, 19, 3)}, "cpu(0)", "needs a batch of images"),
    ],
)
def test_what_cannot_be_run_is_refused(name, shapes, device, message):
    with pytest.raises(GraphError, match=message) as error:
        create_executor(name, fused(small_resnet(True)), shapes, device)
    assert "\n" not in str(error.value)


# --- oneDNN, which production uses on the CPU and this process does not ---


def one_dnn_run(seed: int) -> dict:
    """Train, infer, set parameters after inference, train, infer: gradients, outputs and running statistics."""
    problem = make_problem(np.random.default_rng(seed), bottleneck=seed % 2 == 0, channels=4)
    (executor,) = executors(problem, "mxnet")
    executor.forward_backward(*nd(problem[4][0]))
    outputs = [executor.forward(mx.nd.array(problem[4][1][0])).asnumpy()]  # reorders weights in place
    executor.set_params(problem[2], problem[3])
    for name, array in executor.params.items():
        array[:] = 0.5 * mx.nd.array(executor.from_canonical(name, problem[2][name]))
    executor.forward_backward(*nd(problem[4][1]))
    outputs.append(executor.forward(mx.nd.array(problem[4][0][0])).asnumpy())
    results = canonical_grads(executor) | dict(zip(("first", "second"), outputs, strict=True))
    return {name: array.astype(float).tolist() for name, array in (results | executor.get_params()[1]).items()}


@pytest.mark.long
def test_training_with_onednn_equals_training_without():
    """Training with oneDNN differs from MXNet's native kernels by rounding only, also after inference, which leaves the
    weights in oneDNN's own layout. Nothing waits between training and inference, so they must not disturb each other
    (one bound Symbol for both gave wrong running statistics and gradients here).
    """
    seed = int.from_bytes(os.urandom(2), "little")
    print(f"seed {seed}")
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    environment = {**os.environ, "MXNET_MKLDNN_ENABLED": "1", "PYTHONPATH": path}
    seeds = (seed, seed + 1)
    code = (f"import json, test_executors as t; one, two = ([t.one_dnn_run(s) for s in {seeds}] for _ in range(2)); "
            "assert one == two, 'not deterministic'; print(json.dumps(one))")
    run = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr
    for s, result in zip(seeds, json.loads(run.stdout), strict=True):
        with_onednn = {name: np.array(value) for name, value in result.items()}
        expected = {name: np.array(value) for name, value in one_dnn_run(s).items()}
        assert_close(with_onednn, expected, 1e-4)


def test_layout_of_what_is_run():
    """On the CPU the executor runs NCHW with one transpose, whatever the layout of the given graph."""
    executor = create_executor("mxnet", fused(small_resnet(True)), {"data": (2, 19, 19, 3)})
    assert executor.graph.operators()["transpose"] == 1
    assert set(passes.weight_layouts(executor.graph).values()) == {"OIHW"}
