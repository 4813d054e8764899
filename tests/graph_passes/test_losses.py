"""The losses: binary cross entropy, weighted classes, mixed targets; against finite differences, each other and
PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from step_networks import random_variables, small_resnet
from test_formula import focal, json_of

from common.mxnet_compat import mx
from graph_passes import VARIABLE, Graph, GraphError, Node, Ref, onnx_writer, passes, pipeline
from graph_passes.executors import Box, Draws, Executor, create_executor
from graph_passes.executors.reference import backward, evaluate, forward
from graph_passes.operators import LOSSES

CLASSES = 7
WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0, 0.125, 3.0)
STEP = 1e-6  # of central differences in float64
KINDS = ["mxnet", "reference"]


def loss_graph(op: str, **attrs: Any) -> Graph:
    """Scores and labels, and the loss operator that reads them."""
    variables = [Node(VARIABLE, name) for name in ("data", "softmax_label")]
    return Graph([*variables, Node(op, "softmax", (Ref("data"), Ref("softmax_label")), attrs)], [Ref("softmax")])


def written_out(op: str, scores: np.ndarray, targets: np.ndarray, threshold: float = 0.0,
                weights: Any = 1.0) -> np.ndarray:
    """The loss of each image, by its definition."""
    if op == "SigmoidOutput":
        targets = (targets > threshold).astype(float) if threshold else targets
        p = 1 / (1 + np.exp(-scores))
        return -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).mean(axis=1)
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    if op == "CustomOutput":  # focal
        return -(targets * (1 - p) ** 2 * np.log(p)).sum(axis=1)
    return -(weights * targets * np.log(p)).sum(axis=1)


def smoothed(label: np.ndarray, smoothing: float, share: float) -> np.ndarray:
    targets = np.full((len(label), CLASSES), smoothing / (CLASSES - 1))
    targets[np.arange(len(label)), label] = 1 - smoothing
    return share * targets + (1 - share) * targets[::-1]


@pytest.mark.parametrize("op, attrs", [
    ("SigmoidOutput", {}), ("SigmoidOutput", {"threshold": 0.2}), ("SoftmaxOutput", {"class_weights": WEIGHTS}),
    ("CustomOutput", {"loss": json_of(focal)}),
], ids=["sigmoid", "above 0.2", "weighted", "focal"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("normalization", ["batch", "null"])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.3])
def test_operators(op: str, attrs: dict[str, Any], smoothing: float, normalization: str, share: float,
                   rng: np.random.Generator) -> None:
    """Loss, hits and the two forms of the gradient, with a bias and a loss scale, odd and even batches."""
    n = int(rng.integers(4, 9))
    scores, bias = rng.normal(0, 2, (n, CLASSES)), rng.normal(0, 1, CLASSES)
    label = rng.integers(0, CLASSES, n)
    targets = smoothed(label, smoothing, share)
    given = label.astype(float) if share == 1 else targets
    node = loss_graph(op, smooth_alpha=smoothing, normalization=normalization, grad_scale=0.5, **attrs)["softmax"]
    training = node.replace(op=LOSSES[op]).with_attrs(no_bias=False, no_loss_scale=False)
    gradient, loss, top1, top5 = evaluate(training, [scores - bias, given, np.array([8.0]), bias])

    def total(at: np.ndarray) -> float:
        return written_out(op, at, targets, attrs.get("threshold", 0.0), attrs.get("class_weights", 1.0)).sum()

    scale = 0.5 / (n if normalization == "batch" else 1)
    rounding = 8 * np.finfo(float).eps * total(scores) / STEP  # of the difference: some last bits of the two totals
    assert loss.item() == pytest.approx(total(scores), rel=1e-12)
    for _ in range(3):
        direction = rng.standard_normal(scores.shape)
        difference = (total(scores + STEP * direction) - total(scores - STEP * direction)) / (2 * STEP)
        assert (gradient / 8 * direction).sum() == pytest.approx(scale * difference, rel=1e-6, abs=scale * rounding)
    ranked = label if share > 0.5 else label[::-1]
    order = np.argsort(-scores, axis=1)
    assert (top1, top5) == ((order[:, 0] == ranked).sum(), (order[:, :5] == ranked[:, None]).sum())
    graph = Graph([Node(VARIABLE, "data"), Node(VARIABLE, "softmax_label"), node], [Ref("softmax")])
    results = forward(graph, {Ref("data"): scores, Ref("softmax_label"): given}, True)
    np.testing.assert_allclose(backward(graph, results)[Ref("data")], gradient / 8, rtol=1e-12, atol=1e-15)


def one_layer(classes: int = CLASSES) -> Graph:
    x = mx.sym.FullyConnected(mx.sym.Flatten(mx.sym.Variable("data")), num_hidden=classes, no_bias=True, name="fc")
    return Graph.from_json(mx.sym.SoftmaxOutput(x, normalization="batch", smooth_alpha=0.1, name="softmax").tojson())


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_a_hundred_in_fp32(kind: str) -> None:
    """Loss and gradient are exact even if sigmoids are rounded to 0 or 1."""
    scores = np.array([[100, -100, 20, -20, 0, 50, -3]], np.float32)
    executor = create_executor(kind, passes.binary_cross_entropy(one_layer()),
                               {"data": (2, 1, 1, CLASSES), "softmax_label": (2,)})
    executor.set_params({"fc_weight": np.eye(CLASSES, dtype=np.float32)}, {})
    data = np.concatenate([scores, -scores]).reshape(2, 1, 1, CLASSES)
    executor.forward_backward(mx.nd.array(data), mx.nd.array([1, 1]))
    z = data.reshape(2, CLASSES).astype(np.float64)
    targets = smoothed(np.array([1, 1]), 0.1, 1.0)
    loss = (np.logaddexp(0, z) - z * targets).mean(axis=1).sum()
    metrics = executor.read_metrics()
    assert metrics.loss_sum == pytest.approx(loss, rel=1e-6)
    assert metrics[1:] == (1, 1, 2), "of the second image the label has the best score, of the first the worst"
    slope = (1 / (1 + np.exp(-z)) - targets) / CLASSES / 2
    grads = executor.to_canonical("fc_weight", executor.grads["fc_weight"])
    np.testing.assert_allclose(grads, slope.T @ z, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_answers_for_each_class_by_itself(kind: str, rng: np.random.Generator) -> None:
    graph, shapes = passes.binary_cross_entropy(one_layer(), 0.2), {"data": (5, 1, 1, CLASSES), "softmax_label": (5,)}
    executor = create_executor(kind, graph, shapes)
    weight = rng.standard_normal((CLASSES, CLASSES)).astype(np.float32)
    executor.set_params({"fc_weight": weight}, {})
    data, label = rng.standard_normal(shapes["data"]).astype(np.float32), rng.integers(0, CLASSES, 5)
    z = data.reshape(5, CLASSES) @ weight.T.astype(np.float64)
    answer = executor.forward(mx.nd.array(data), mx.nd.array(label))
    answer = answer.asnumpy() if kind == "mxnet" else answer
    np.testing.assert_allclose(answer, 1 / (1 + np.exp(-z)), rtol=1e-5)
    np.testing.assert_array_equal(executor.request_probabilities()(), answer)
    loss = written_out("SigmoidOutput", z, smoothed(label, 0.1, 1.0), threshold=0.2).sum()
    assert executor.read_metrics().loss_sum == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_class_weights_are_for_training_alone(kind: str, rng: np.random.Generator) -> None:
    shapes = {"data": (5, 1, 1, CLASSES), "softmax_label": (5,)}
    losses = []
    data, label = mx.nd.array(rng.standard_normal(shapes["data"])), mx.nd.array(rng.integers(0, CLASSES, 5))
    for graph in (one_layer(), passes.weigh_classes(one_layer(), WEIGHTS)):
        executor = create_executor(kind, graph, shapes)
        executor.set_params({"fc_weight": np.eye(CLASSES, dtype=np.float32)}, {})
        executor.infer(data, label, 4)
        losses.append(executor.read_metrics())
    assert losses[0] == losses[1] and losses[0].count == 4


LOSS = {
    "bce": lambda graph: passes.binary_cross_entropy(graph),
    "bce above 0.2": lambda graph: passes.binary_cross_entropy(graph, 0.2),
    "weighted": lambda graph: passes.weigh_classes(graph, WEIGHTS),
    "focal": lambda graph: passes.custom_loss(graph, json_of(focal)),
    "softmax": lambda graph: graph,
}
MIXED = {"plain": Draws(), "mixup": Draws(0.7), "a small box": Draws(cutmix=Box(3, 2, 9, 12)),
         "a large box": Draws(cutmix=Box(0, 1, 15, 17))}


def executors_of(loss: str, images: int, rng: np.random.Generator) -> tuple[list[Executor], np.ndarray, np.ndarray]:
    """The mxnet executor and the reference in float64, with the same parameters, and a batch."""
    graph = Graph.from_json(small_resnet(False, classes=CLASSES).tojson())
    shapes = {"data": (images, 17, 18, 3), "softmax_label": (images,)}
    values = random_variables(graph, shapes, rng, CLASSES, np.float32)
    made = [create_executor("mxnet", LOSS[loss](graph), shapes),
            create_executor("reference", LOSS[loss](graph), shapes, dtype="float64")]
    for executor in made:
        executor.set_params({name: values[name] for name in graph.arguments if name not in shapes},
                            {name: values[name] for name in graph.aux})
    return made, values["data"], rng.integers(0, CLASSES, images)


@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("loss", LOSS)
def test_steps_against_pytorch(loss: str, mixed: str, rng: np.random.Generator) -> None:
    """Gradients of the classifier, by PyTorch's losses on the network's features; mxnet and reference alike, odd and
    even batches, smoothed labels."""
    torch = pytest.importorskip("torch")
    draws = MIXED[mixed]
    for images in (4, 5):
        (stock, reference), data, label = executors_of(loss, images, rng)
        for executor in (stock, reference):
            executor.forward_backward(mx.nd.array(data), mx.nd.array(label), draws=draws)
        share = draws.own_share(17, 18)
        metrics = stock.read_metrics(), reference.read_metrics()
        features, bias = features_of(reference, data, draws)
        weight = torch.tensor(reference.get_params()[0]["fc_weight"], requires_grad=True)
        scores = torch.tensor(features) @ weight.T + torch.tensor(bias)
        targets = torch.tensor(smoothed(label, 0.1, share))
        if loss.startswith("bce"):
            targets = (targets > 0.2).double() if loss != "bce" else targets
            wanted = torch.nn.functional.binary_cross_entropy_with_logits(scores, targets)
        elif loss == "focal":
            log_p = torch.log_softmax(scores, dim=1)
            wanted = -(targets * (1 - log_p.exp()) ** 2 * log_p).sum(dim=1).mean()
        else:
            weights = torch.tensor(WEIGHTS, dtype=torch.float64) if loss == "weighted" else None
            wanted = torch.nn.functional.cross_entropy(scores, targets, weights)
        wanted.backward()
        for executor, tolerance in ((stock, 1e-4), (reference, 1e-9)):
            got = executor.to_canonical("fc_weight", executor.grads["fc_weight"])
            assert np.abs(got - weight.grad.numpy()).max() < tolerance * np.abs(weight.grad.numpy()).max()
        assert metrics[0].loss_sum == pytest.approx(images * wanted.item(), rel=1e-4)
        assert metrics[1].loss_sum == pytest.approx(images * wanted.item(), rel=1e-9)
        assert metrics[0][1:] == metrics[1][1:]


@pytest.mark.parametrize("mixed", MIXED)
def test_steps_of_a_custom_loss(mixed: str, rng: np.random.Generator) -> None:
    """The classifier's gradients (before it, a ReLU near 0 may be on the other side in fp32): MXNet differentiates the
    Symbol itself, the reference has the formula's in float64."""
    for images in (4, 5):
        made, data, label = executors_of("focal", images, rng)
        for executor in made:
            executor.forward_backward(mx.nd.array(data), mx.nd.array(label), draws=MIXED[mixed])
        for name in ("fc_weight", "fc_bias"):
            got, wanted = (executor.to_canonical(name, executor.grads[name]) for executor in made)
            assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max(), name
        metrics = [executor.read_metrics() for executor in made]
        assert metrics[0][1:] == metrics[1][1:] and metrics[0][0] == pytest.approx(metrics[1][0], rel=1e-5)


def features_of(reference: Executor, data: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """The classifier's input in a training pass, and its bias."""
    images = data.astype(np.float64)
    if draws.cutmix:
        top, left, bottom, right = draws.cutmix
        images[:, top:bottom, left:right] = data[::-1, top:bottom, left:right]
    elif draws.mixup < 1:
        images = draws.mixup * images + (1 - draws.mixup) * images[::-1]
    graph = pipeline.run(pipeline.FUSED, reference.graph)
    values = {Ref(name): array for name, array in (reference.params | reference.aux).items()}
    label = np.zeros(len(data))
    results = forward(graph, values | {Ref("data"): images, Ref("softmax_label"): label}, training=True)
    return results[graph["fc"].inputs[0]].reshape(len(data), -1), reference.params["fc_bias"]


# --- the passes, and files ---


def test_the_pass_keeps_what_the_network_says() -> None:
    before = one_layer()
    after = passes.binary_cross_entropy(before, 0.25)
    assert after["softmax"].op == "SigmoidOutput" and after["softmax"]["threshold"] == 0.25
    assert (after["softmax"]["smooth_alpha"], after["softmax"]["normalization"]) == (0.1, "batch")
    assert before["softmax"].op == "SoftmaxOutput" and after.arguments == before.arguments
    weighted = passes.weigh_classes(before, WEIGHTS)
    assert weighted["softmax"]["class_weights"] == WEIGHTS
    for graph in (after, weighted):
        assert Graph.from_json(graph.to_json()) == graph
    with pytest.raises(GraphError, match="the graph ends in SigmoidOutput 'softmax', not in a SoftmaxOutput, which"):
        passes.binary_cross_entropy(after)


def test_files_for_others_have_sigmoids(rng: np.random.Generator) -> None:
    graph = passes.binary_cross_entropy(one_layer(), 0.25)
    data, weight = rng.standard_normal((3, 1, 1, CLASSES)), rng.standard_normal((CLASSES, CLASSES))
    wanted = 1 / (1 + np.exp(-data.reshape(3, CLASSES) @ weight.T))
    symbol = mx.sym.load_json(passes.stock_loss(graph).to_json())
    arrays = {"data": mx.nd.array(data), "fc_weight": mx.nd.array(weight), "softmax_label": mx.nd.zeros((3, CLASSES))}
    (answer,) = symbol.bind(mx.cpu(), arrays).forward()
    np.testing.assert_allclose(answer.asnumpy(), wanted, rtol=1e-5)
    plain = one_layer()
    assert passes.stock_loss(plain) == plain
    model = onnx_writer.to_onnx(graph, {"fc_weight": weight}, (1, 1, CLASSES))
    assert [node.op_type for node in model.graph.node] == ["Flatten", "Gemm", "Sigmoid"]


@pytest.mark.parametrize("probabilities, stock, of_onnx", [
    ("softmax", "SoftmaxOutput", "Softmax"), ("sigmoid", "LogisticRegressionOutput", "Sigmoid")])
def test_a_custom_loss_and_files_for_others(probabilities: str, stock: str, of_onnx: str,
                                            rng: np.random.Generator) -> None:
    graph = passes.custom_loss(one_layer(), json_of(focal), probabilities)
    assert Graph.from_json(graph.to_json()) == graph and graph["softmax"]["smooth_alpha"] == 0.1
    assert passes.stock_loss(graph)["softmax"].op == stock
    model = onnx_writer.to_onnx(graph, {"fc_weight": rng.standard_normal((CLASSES, CLASSES))}, (1, 1, CLASSES))
    assert [node.op_type for node in model.graph.node] == ["Flatten", "Gemm", of_onnx]
    answers = []
    for kind in KINDS:
        executor = create_executor(kind, graph, {"data": (2, 1, 1, CLASSES), "softmax_label": (2,)})
        executor.set_params({"fc_weight": np.eye(CLASSES, dtype=np.float32)}, {})
        executor.infer(mx.nd.array(np.arange(2.0 * CLASSES).reshape(2, 1, 1, CLASSES) / 9), mx.nd.array([0, 3]), 1)
        answers.append(executor.request_probabilities()())
        metrics = executor.read_metrics()
        z = np.arange(CLASSES)[None] / 9
        assert metrics.loss_sum == pytest.approx(
            written_out("CustomOutput", z, smoothed(np.array([0]), 0.1, 1.0)).sum(), rel=1e-5)
    np.testing.assert_allclose(*answers, rtol=1e-5)
    assert (answers[0].sum(axis=1) == pytest.approx(1)) == (probabilities == "softmax")
    with pytest.raises(GraphError, match=r"^returns \(N, C\)"):
        passes.custom_loss(one_layer(), json_of(lambda s, t: s * t))


@pytest.mark.parametrize("threshold", [0.01, 0.9])
def test_thresholds_on_one_side_of_all_targets_are_refused(threshold: float) -> None:
    graph = passes.binary_cross_entropy(one_layer(), threshold)
    sentence = (f"the threshold {threshold:g} makes all targets equal: with 7 classes .* "
                "targets range from 0.0166667 to 0.9")
    with pytest.raises(GraphError, match=sentence):
        graph.infer_shapes({"data": (2, 1, 1, 5)})


def test_a_weight_for_each_class() -> None:
    graph = passes.weigh_classes(one_layer(), WEIGHTS[:-1])
    with pytest.raises(GraphError, match="class_weights of 6 classes, and scores of 7: give one weight for each"):
        graph.infer_shapes({"data": (2, 1, 1, 5)})
