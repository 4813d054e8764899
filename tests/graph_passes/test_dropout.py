"""Dropout and stochastic depth: the random bits, the passes, and the training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from step_networks import bottlenecks, dropping, flattened, pre_activation, random_variables, small_resnet

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, Node, Ref, passes, pipeline
from graph_passes.choice import fewest
from graph_passes.drawing import draw_svg
from graph_passes.executors import Draws, Executor, create_executor
from graph_passes.executors.reference import evaluate, run
from graph_passes.operators.dropout import SEED, keep_factors, philox, words_of
from train import models


@pytest.mark.parametrize("counter, key, wanted", [
    ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
])
def test_philox_against_its_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], wanted: str) -> None:
    """kat_vectors of the authors' Random123."""
    words = philox([np.array([word]) for word in counter], key)
    assert " ".join(f"{int(word[0]):08x}" for word in words) == wanted


@pytest.mark.parametrize("p", [0.05, 0.2, 0.9])
def test_the_right_part_is_dropped_and_the_mean_stays(p: float, rng: np.random.Generator) -> None:
    """Over 100,000 draws; five standard errors are allowed."""
    count = 100_000
    factors = keep_factors(p, 3, np.arange(count), words_of(int(rng.integers(2**63))))
    assert set(np.unique(factors)) == {np.float32(0), np.float32(1 / (1 - p))}
    assert np.mean(factors == 0) == pytest.approx(p, abs=5 * np.sqrt(p * (1 - p) / count))
    neighbours = np.corrcoef(factors[:-1], factors[1:])[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(count), "neighbours are independent"


def masks(graph: Graph, images: int, seed: int) -> np.ndarray:
    """The masks (Dropouts, images) of a network with stochastic depth."""
    (node,) = (node for node in passes.draw_masks(graph, images) if node.op == "DropoutFactors")
    return evaluate(node, [words_of(seed)])[0]


def test_images_blocks_and_seeds_are_independent() -> None:
    graph = passes.stochastic_depth(models.create("resnet50", 10).graph, 0.9)
    drawn = np.array([masks(graph, 400, seed) > 0 for seed in (0, 1, 2**32, 2**63)]).reshape(4 * 15, 400)
    deviating = drawn - drawn.mean(axis=1, keepdims=True)
    correlation = np.corrcoef(deviating)[np.triu_indices(len(drawn), 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(400), "1,770 pairs of rows"
    assert len({row.tobytes() for row in drawn}) == len(drawn)
    assert np.array_equal(masks(graph, 400, 5)[:, :100], masks(graph, 100, 5)), "of any size of batch"


def test_rates_rise_from_the_first_block_to_the_last() -> None:
    """timm's rates: drop_path_rate * block / (blocks - 1)."""
    network = models.create("resnet50", 10)
    graph = passes.stochastic_depth(network.graph, 0.3)
    drops = [node for node in graph if node.op == "Dropout"]
    assert [node["p"] for node in drops] == pytest.approx([0.3 * number / 15 for number in range(1, 16)])
    assert {node["axes"] for node in drops} == {(1, 2, 3)}
    for node in drops:
        assert graph[node.inputs[0].node].op == "BatchNorm" and node.inputs[0].node.endswith("_bn3")
        assert graph.sole_reader(Ref(node.name), "elemwise_add")
    assert passes.stochastic_depth(network.graph, 0.0) == network.graph == passes.dropout(network.graph, 0.0)
    assert passes.remove_dropout(graph) == network.graph


@pytest.mark.parametrize("name, ends", [("resnet18", "_bn2"), ("resnet50d", "_bn3"), ("resnet50_v2", "_conv3"),
                                        ("resnext50_32x4d", "_bn3")])
def test_branches_are_found_in_every_family(name: str, ends: str) -> None:
    graph = passes.stochastic_depth(models.create(name, 10).graph, 0.2, "block")
    drops = [node for node in graph if node.op == "Dropout"]
    assert len(drops) == (7 if name == "resnet18" else 15)
    assert all(node.inputs[0].node.endswith(ends) and "shortcut" not in node.inputs[0].node for node in drops)
    assert {node["axes"] for node in drops} == {(0, 1, 2, 3)}


def test_what_cannot_be_dropped_is_refused_in_a_sentence() -> None:
    graph = models.create("resnet18", 10).graph
    for rate in (1.0, -0.1, float("nan")):
        with pytest.raises(GraphError, match=r"cannot be dropped.*: give at least 0 and less than 1$"):
            passes.stochastic_depth(graph, rate)
        with pytest.raises(GraphError, match=r"cannot drop .*: give at least 0 and less than 1$"):
            passes.dropout(graph, rate)
    with pytest.raises(GraphError, match="^the network has no residual branches to drop: use another"):
        passes.stochastic_depth(Graph.from_json(flattened("Pooling").tojson()), 0.1)
    with pytest.raises(GraphError, match="^all residual branches are frozen, so none can be dropped: freeze fewer"):
        passes.stochastic_depth(passes.freeze(graph, "backbone"), 0.1)
    for p, axes, sentence in ((1.0, (), "has p=1.0, which is not a valid"), (0.5, (1, 2), r"has axes=\(1, 2\): give")):
        with pytest.raises(GraphError, match=rf"^Dropout 'd' {sentence}"):
            passes.draw_masks(Graph([Node("null", "x"), Node("Dropout", "d", (Ref("x"),), {"p": p, "axes": axes})],
                                    [Ref("d")]), 2)


def test_frozen_branches_are_not_dropped_but_counted() -> None:
    graph = passes.freeze(models.create("resnet18", 10).graph, "stage2")
    drops = [node for node in passes.stochastic_depth(graph, 0.7) if node.op == "Dropout"]
    assert [node["p"] for node in drops] == pytest.approx([0.4, 0.5, 0.6, 0.7])
    step = pipeline.training_step(passes.dropout(passes.freeze(graph, "backbone"), 0.5), {"data": (2, 32, 32, 3)},
                                  "float16", fewest)
    assert step.operators()["DropoutElements"] == 1, "what the classifier reads, though all before it is frozen"


NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "basic blocks": (lambda: small_resnet(False), (4, 17, 14, 3)),
    "bottlenecks": (lambda: bottlenecks(7, 7), (4, 22, 18, 4)),
    "BatchNorm first": (pre_activation, (4, 9, 7, 3)),
}


@pytest.mark.long(but=["basic*"])
@pytest.mark.parametrize("mode", ["image", "block"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_against_finite_differences(name: str, mode: str, rng: np.random.Generator) -> None:
    """Gradients of the loss of the fused step, in float64, along random directions of all parameters. In about one of a
    hundred draws a ReLU changes sides, so one of two draws must agree: with a wrong gradient neither would. The second
    one has other values too, since an input very near 0 changes sides in every direction."""
    build, data = NETWORKS[name]
    graph, shapes = dropping(build(), mode), {"data": data, "softmax_label": data[:1]}
    step = pipeline.training_step(graph, shapes, "bfloat16", fewest)
    assert ("BatchNormAddReluApply" in step.operators()) == (name != "BatchNorm first")
    names = [name for name in graph.arguments if name not in shapes]
    width = 1e-9

    def slopes() -> tuple[float, float]:
        """The slope along a direction, from the loss and from the gradients."""
        values = random_variables(graph, shapes, rng) | {SEED: words_of(1 if mode == "block" else 2)}
        results = run(step, values)
        direction = {name: rng.standard_normal(values[name].shape) for name in names}
        ahead, behind = (run(step, values | {name: values[name] + sign * width * direction[name] for name in names})
                         for sign in (1, -1))
        by_gradients = sum((results[f"{name}_grad"] * direction[name]).sum() for name in names
                           if f"{name}_grad" in results)
        return (ahead["loss"] - behind["loss"]).item() / (2 * width * data[0]), by_gradients

    found, by_gradients = slopes()
    if found != pytest.approx(by_gradients, rel=2e-5, abs=1e-7):
        found, by_gradients = slopes()
    assert found == pytest.approx(by_gradients, rel=2e-5, abs=1e-7)


def trained(executor: Executor, values: dict[str, np.ndarray], *draws: Draws) -> dict[str, np.ndarray]:
    data, label = (mx.nd.array(values[name]) for name in ("data", "softmax_label"))
    for number, each in enumerate(draws):
        executor.forward_backward(data, label, accumulate=number > 0, draws=each)
    return {name: executor.to_canonical(name, grad) for name, grad in executor.grads.items()}


@pytest.mark.long(but=["mxnet"])
@pytest.mark.parametrize("name", ["reference", "mxnet"])
def test_a_seed_decides_what_is_dropped(name: str, rng: np.random.Generator) -> None:
    """Equal seeds give equal bits, other seeds other gradients, also among the passes of one step. Inference drops
    nothing."""
    build, data = NETWORKS["bottlenecks"]
    plain, graph = Graph.from_json(build().tojson()), dropping(build())
    shapes = {"data": data, "softmax_label": data[:1]}
    values = random_variables(graph, shapes, rng, dtype=np.float32)
    executors = [create_executor(name, each, shapes) for each in (graph, graph, plain)]
    for executor in executors:
        executor.set_params({key: values[key] for key in executor.params}, {key: values[key] for key in executor.aux})
    of = [Draws(seed=seed) for seed in (5, 6)]
    first, second = (trained(executors[0], values, draws) for draws in of)
    again, both = trained(executors[1], values, of[0]), trained(executors[1], values, *of)
    for key in first:
        assert np.array_equal(first[key], again[key])
        size = max(np.abs(both[key]).max(), 1e-3)
        assert np.abs(first[key] + second[key] - both[key]).max() < 1e-5 * size, key
    assert not np.allclose(first["fc_weight"], second["fc_weight"], rtol=0.1)
    params, aux = executors[1].get_params()
    executors[2].set_params(params, aux)
    answers = [np.array(executor.forward(mx.nd.array(values["data"])).asnumpy() if name == "mxnet"
                        else executor.forward(values["data"])) for executor in executors[1:]]
    assert np.array_equal(*answers)


def test_images_of_another_size_and_a_dropout_of_pixels(rng: np.random.Generator) -> None:
    """MXNet's masks are made for the images' size; a Dropout of single elements may be anywhere."""
    x = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=8, kernel=(3, 3), layout="NHWC", name="conv")
    x = mx.sym.Pooling(mx.sym.Dropout(x, p=0.4, name="drop"), global_pool=True, kernel=(1, 1), pool_type="avg",
                       layout="NHWC")
    x = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=7, name="fc"), name="softmax")
    graph, shapes = Graph.from_json(x.tojson()), {"data": (3, 9, 8, 3), "softmax_label": (3,)}
    values = random_variables(graph, shapes, rng, dtype=np.float32)
    executors = [create_executor(name, graph, shapes) for name in ("reference", "mxnet")]
    for size in ((3, 9, 8, 3), (3, 12, 11, 3)):
        values["data"] = rng.standard_normal(size).astype(np.float32)
        for executor in executors:
            executor.set_params({key: values[key] for key in executor.params}, {})
        one, other = (trained(executor, values, Draws(seed=9)) for executor in executors)
        for key in one:
            assert np.abs(one[key] - other[key]).max() < 1e-5 * np.abs(one[key]).max(), key


def test_networks_that_drop_are_drawn_and_planned() -> None:
    graph, shapes = dropping(bottlenecks(7, 7)), {"data": (4, 64, 64, 4), "softmax_label": (4,)}
    step = pipeline.training_step(graph, shapes, "float16", fewest)
    svg = draw_svg(step, "step", step.infer_shapes(shapes))
    assert all(op in svg for op in ("DropoutFactors", "DropoutElements", "NormConv1x1Pair"))
    plan = passes.memory(step, shapes)
    kept = passes.memory(pipeline.training_step(Graph.from_json(bottlenecks(7, 7).tojson()), shapes, "float16",
                                                fewest), shapes)
    factors = 3 * 256  # bytes, aligned: (2, 4) factors, and the classifier's input and its gradient
    assert plan.arena_bytes <= kept.arena_bytes + factors + 2 * 4 * 128 * 2
    assert passes.tensor_dtypes(step)[Ref(SEED)] == "uint32"
    assert Graph.from_json(step.to_json()) == step


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_whole_step_against_timm(name: str, rng: np.random.Generator) -> None:
    """In float64, with our seed's masks in place of timm's: timm's rates, its places of Dropout, and all gradients."""
    torch, timm = pytest.importorskip("torch"), pytest.importorskip("timm")
    images, depth, p, draws = 5, 0.5, 0.3, Draws(seed=int(rng.integers(2**63)))
    network = models.create(name, 10)
    graph = passes.dropout(passes.stochastic_depth(network.graph, depth), p)
    shapes = {"data": (images, 64, 64, 3), "softmax_label": (images,)}
    params, aux = network.initial_values(3, zero_init_residual=False)
    data, label = rng.standard_normal(shapes["data"]), rng.integers(0, 10, images)
    own = create_executor("reference", graph, shapes, dtype="float64", network_dtype="bfloat16")
    own.set_params(params, aux)
    own.forward_backward(data, label, draws=draws)

    class Product(torch.nn.Module):
        def __init__(self, factors: np.ndarray) -> None:
            super().__init__()
            self.factors = torch.from_numpy(factors.astype(np.float64))

        def forward(self, x: Any) -> Any:
            return x * self.factors

    theirs = timm.create_model(name, num_classes=10, drop_path_rate=depth, drop_rate=p).double().train()
    published = models.published(name)[0]
    state = {published.name(key): value.transpose(0, 3, 1, 2) if value.ndim == 4 else value
             for key, value in {**params, **aux}.items()}
    theirs.load_state_dict({key: torch.from_numpy(np.ascontiguousarray(value, np.float64))
                            for key, value in state.items()}, strict=False)
    steps = passes.draw_masks(graph, images)
    blocks = [block for layer in (theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4) for block in layer]
    (factors,) = (node for node in steps if node.op == "DropoutFactors")
    assert [block.drop_path.drop_prob for block in blocks[1:]] == pytest.approx(factors["rates"])
    assert blocks[0].drop_path is None and theirs.drop_rate == p
    for block, row in zip(blocks[1:], masks(graph, images, draws.seed), strict=True):
        block.drop_path = Product(row.reshape(-1, 1, 1, 1))
    (of_elements,) = (node for node in steps if node.op == "DropoutElements")
    kept = evaluate(of_elements, [np.ones((images, theirs.num_features)), words_of(draws.seed)])[0]
    theirs.drop_rate, theirs.fc = 0.0, torch.nn.Sequential(Product(kept), theirs.fc)
    answers = theirs(torch.from_numpy(data.transpose(0, 3, 1, 2).copy()))
    loss = torch.nn.functional.cross_entropy(answers, torch.from_numpy(label))
    loss.backward()
    assert own.read_metrics().loss_sum / images == pytest.approx(loss.item(), rel=1e-9)
    gradients = {key.replace("fc.1.", "fc."): value.grad.numpy() for key, value in theirs.named_parameters()}
    for key in params:
        gradient = own.to_canonical(key, own.grads[key])
        wanted = gradients[published.name(key)]
        gradient = gradient.transpose(0, 3, 1, 2) if gradient.ndim == 4 else gradient
        assert np.linalg.norm(gradient - wanted) < 1e-7 * np.linalg.norm(wanted), key
