"""Frozen layers and slower ones: the marks that the passes set, and steps of such networks."""

from __future__ import annotations

import numpy as np
import pytest
from step_networks import bottlenecks, random_variables, small_resnet
from test_fused_step import SAME, check_close

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, Ref, passes, pipeline, roles
from graph_passes.choice import fewest, plain
from graph_passes.executors import create_executor
from graph_passes.executors.reference import backward, forward, run
from graph_passes.optimizers import create, names
from train import models

NETWORKS = {
    "basic blocks": (lambda: small_resnet(False), (3, 17, 14, 3), ("stem", "a", "b_0", "c_1_conv", "backbone")),
    "bottlenecks": (lambda: bottlenecks(7, 7), (3, 22, 18, 4), ("stem", "a1", "b", "c2_conv", "backbone")),
}
CASES = [(name, prefix) for name, (_, _, prefixes) in NETWORKS.items() for prefix in prefixes]


def network(name):
    build, data, _ = NETWORKS[name]
    return Graph.from_json(build().tojson()), {"data": data, "softmax_label": data[:1]}


@pytest.mark.long(but=["basic*"])
@pytest.mark.parametrize("name, prefix", CASES)
def test_a_step_with_frozen_layers_against_the_network_as_it_is_given(name, prefix, rng):
    """In float64, with and without fusions: trained layers have the gradients and statistics of the given network.
    Frozen layers have none, and compute in the step what they compute in inference."""
    graph, shapes = network(name)
    graph = passes.freeze(graph, prefix)
    values, frozen = random_variables(graph, shapes, rng), roles.frozen(graph)
    wanted = forward(graph, {Ref(name): value for name, value in values.items()}, training=True)
    gradients = backward(graph, wanted)
    folded = passes.fold_bn_params(pipeline.run(pipeline.FUSED, graph), values, values, frozen_only=True)
    for price in (fewest, plain):
        step = pipeline.training_step(graph, shapes, "bfloat16", price)
        results = run(step, values | folded)
        trained = {name for name in graph.variables if name not in frozen | shapes.keys()}
        fixed = {node.inputs[1].node for node in graph if node.op == "BatchNorm" and node["fix_gamma"]}
        assert trained - set(graph.aux) - fixed == {
            name.removesuffix("_grad") for name in results if name.endswith("_grad")}
        assert trained & set(graph.aux) == results.keys() & set(graph.aux)
        largest = max(np.abs(gradients[Ref(name)]).max() for name in trained - set(graph.aux))
        for name in trained - set(graph.aux) - fixed:
            check_close(results[f"{name}_grad"], gradients[Ref(name)], SAME, name, largest / 1e3)
        convolutions = [node for node in step if node.op.startswith(("Conv", "StemPool")) and
                        "weight" in node.inputs[1].node]
        assert any(node.inputs[1].node in frozen for node in convolutions)
        readers = [node for node in step if any(ref.node in frozen for ref in node.inputs)]
        assert not [node.name for node in readers if "Norm" in node.op], "all are folded into convolutions"


@pytest.mark.long(but=["sgd*"])
@pytest.mark.parametrize("executor", ["mxnet", "reference"])
@pytest.mark.parametrize("optimizer", names())
def test_steps_leave_frozen_layers_as_they_are(executor, optimizer, rng):
    """Parameters, statistics and averages stay; trained parameters move by their gradient and factor."""
    graph, shapes = network("basic blocks")
    marked = passes.slow_backbone(passes.freeze(graph, "a"), 0.25)
    frozen, rule = roles.frozen(marked), create(optimizer, {"weight_decay": 0.01})
    assert 0 < len(frozen & set(graph.aux)) < len(graph.aux)
    data, label = rng.standard_normal(shapes["data"]), rng.integers(0, 7, shapes["softmax_label"])
    values = random_variables(graph, shapes, rng)
    params, aux = ({name: values[name].astype(np.float32) for name in own if name not in shapes}
                   for own in (graph.arguments, graph.aux))
    after = {}
    for name, factor in (("all", 1.0), ("slow", 0.25)):
        run_graph = marked if factor != 1 else passes.freeze(graph, "a")
        made = create_executor(executor, run_graph, shapes)
        made.set_params(params, aux)
        ema = made.create_optimizer(rule, ema=True)
        made.forward_backward(mx.nd.array(data), mx.nd.array(label))
        ema.step(0.1, ema_decay=0.0)
        after[name], moved = made.get_params()
        assert ema.state[rule.slots[0]].keys() == made.grads.keys() == params.keys() - frozen
        assert not ema.ema.keys() & frozen
        for key in frozen:
            np.testing.assert_array_equal({**after[name], **moved}[key], {**params, **aux}[key], err_msg=key)
        assert all((moved[key] != aux[key]).any() for key in aux if key not in frozen)
        ema.swap_ema()
        averaged = made.get_params()
        assert all(np.array_equal(averaged[0][key], after[name][key]) for key in params), "decay 0: the values now"
    for key in params.keys() - frozen:
        whole, slow = (after[name][key].astype(np.float64) - params[key] for name in ("all", "slow"))
        wanted = whole if key.startswith("fc") else 0.25 * whole
        np.testing.assert_allclose(slow, wanted, rtol=1e-4, atol=1e-6 * max(1, np.abs(params[key]).max()), err_msg=key)


def test_executors_agree_on_frozen_layers(rng):
    """Gradients and loss of MXNet in fp32 and of the reference in float64, relative to each tensor's largest element.
    If fp32 rounding decides a ReLU, some gradients differ: then the test repeats with other numbers."""
    graph, shapes = network("bottlenecks")
    graph = passes.freeze(graph, "a")
    ours, oracle = (create_executor("mxnet", graph, shapes),
                    create_executor("reference", graph, shapes, dtype="float64"))
    for _ in range(2):
        values = random_variables(graph, shapes, rng)
        data, label = values["data"], values["softmax_label"]
        own = [{name: values[name] for name in names if name not in shapes} for names in (graph.arguments, graph.aux)]
        for executor in (ours, oracle):
            executor.set_params(*own)
            executor.forward_backward(mx.nd.array(data), mx.nd.array(label))
        assert ours.read_metrics().loss_sum == pytest.approx(oracle.read_metrics().loss_sum, rel=1e-5)
        differ = [name for name, wanted in oracle.grads.items()
                  if not np.abs(ours.to_canonical(name, ours.grads[name]) - wanted).max()
                  <= 1e-3 * np.abs(wanted).max() + 1e-7]
        if not differ:
            break
    assert not differ


@pytest.mark.long(but=["resnet18"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet50d", "resnext50_32x4d", "resnet50_v2"])
def test_stages_of_a_network(name):
    """A later stage's name freezes more layers; the classifier is always trained."""
    graph = models.create(name, 10).graph
    shapes, sizes, operators = {"data": (2, 64, 64, 3), "softmax_label": (2,)}, [], []
    for prefix in ("stem", "stage1", "stage2_block1", "stage2", "stage3", "stage4", "backbone"):
        frozen = passes.freeze(graph, prefix)
        sizes.append(len(roles.frozen(frozen)))
        operators.append(len(pipeline.training_step(frozen, shapes, "float16", fewest)))
    assert sizes == sorted(sizes) and len(set(sizes)) >= 6
    assert operators == sorted(operators, reverse=True) and operators[0] > 2 * operators[-1]
    everything = roles.frozen(passes.freeze(graph, "backbone"))
    assert set(graph.variables) - everything == {"data", "softmax_label", "classifier_weight", "classifier_bias"}
    slow = roles.rate_factors(passes.slow_backbone(passes.freeze(graph, "stage1"), 0.1))
    assert set(slow.values()) == {0.0, 0.1} and not any(name.startswith("classifier") for name in slow)


def test_what_cannot_be_frozen():
    graph = models.create("resnet18", 10).graph
    with pytest.raises(GraphError, match=r"no layer with .* 'stage9': there are stem, stage1, .* and backbone"):
        passes.freeze(graph, "stage9")
    for prefix in ("classifier", "softmax", ""):
        with pytest.raises(GraphError, match="nothing would be left to train: freeze backbone"):
            passes.freeze(graph, prefix)
