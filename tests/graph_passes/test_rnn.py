"""MXNet's RNN: shapes, results against formulas for single numbers and against MXNet, and errors. Its gradients against
finite differences are in test_reference_operators.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.mxnet_compat import mx
from graph_passes import VARIABLE, Graph, GraphError, Node, Ref, pipeline
from graph_passes.choice import fewest
from graph_passes.executors import create_executor
from graph_passes.executors.reference import backward, forward, run
from graph_passes.operators.rnn import GATES, num_parameters

# fp32 rounds to 6e-8; states go through up to eight steps and three layers, which add a few hundred terms each.
FP32_TOLERANCE = 1e-5
SAME = 1e-12  # equal sums in float64, in another order


def layer(mode, features=4, state_size=3, **attrs):
    names = ["data", "parameters", "state", *["state_cell"] * (mode == "lstm")]
    attrs = {"num_layers": 2, "bidirectional": True, "state_outputs": True, **attrs}
    node = Node("RNN", "y", tuple(map(Ref, names)), {"mode": mode, "state_size": state_size, **attrs})
    return Graph([*(Node(VARIABLE, name) for name in names), node], node.refs())


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def one_direction(mode, xs, w, r, b, b2, h, c):
    """The states of a sequence xs (T, I), gate by gate; the last h and c."""
    def gate(number, x, h):
        rows = slice(number * len(h), (number + 1) * len(h))
        return w[rows] @ x + b[rows], r[rows] @ h + b2[rows]

    states = []
    for x in xs:
        if mode == "lstm":
            i, f, g, o = (sum(gate(number, x, h)) for number in range(4))
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
        elif mode == "gru":
            reset, z = (sigmoid(sum(gate(number, x, h))) for number in range(2))
            of_input, of_state = gate(2, x, h)
            h = (1 - z) * np.tanh(of_input + reset * of_state) + z * h
        else:
            h = sum(gate(0, x, h))
            h = np.tanh(h) if mode == "rnn_tanh" else np.maximum(h, 0)
        states.append(h)
    return np.array(states), h, c


def written_out(mode, num_layers, both, hidden, x, parameters, state, cells):
    """Output (T, N, D H) and last states, sequence by sequence."""
    gates, at, cursor = GATES[mode] * hidden, {}, 0
    for part in ("matrices", "biases"):
        for layer in range(num_layers):
            for direction in range(both):
                width = both * hidden if layer else x.shape[2]
                for name, shape in ((("w", (gates, width)), ("r", (gates, hidden))) if part == "matrices"
                                    else (("b", (gates,)), ("b2", (gates,)))):
                    at[name, layer, direction] = parameters[cursor : cursor + np.prod(shape)].reshape(shape)
                    cursor += np.prod(shape)
    assert cursor == len(parameters)
    outputs, last_h, last_c = [], np.empty_like(state), np.empty_like(state)
    for n in range(x.shape[1]):
        below = x[:, n]
        for layer in range(num_layers):
            above = []
            for direction in range(both):
                number = layer * both + direction
                weights = [at[name, layer, direction] for name in ("w", "r", "b", "b2")]
                xs = below[::-1] if direction else below
                states, last_h[number, n], last_c[number, n] = one_direction(
                    mode, xs, *weights, state[number, n], cells[number, n])
                above.append(states[::-1] if direction else states)
            below = np.concatenate(above, axis=1)
        outputs.append(below)
    return np.stack(outputs, axis=1), last_h, last_c


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("num_layers, both", [(1, 1), (1, 2), (3, 1), (2, 2)])
def test_against_the_formulas(mode, num_layers, both, rng):
    hidden, data = int(rng.integers(1, 8)), tuple(int(size) for size in rng.integers(1, 8, 3))
    graph = layer(mode, state_size=hidden, num_layers=num_layers, bidirectional=both == 2)
    sizes = graph.infer_shapes({"data": data})
    assert sizes[Ref("parameters")] == (num_parameters(graph["y"], data[2]),)
    values = {Ref(name): rng.standard_normal(sizes[Ref(name)]) for name in graph.variables}
    values[Ref("parameters")] *= 0.7 * hidden**-0.5  # with larger weights states are chaotic, and rounding errors grow
    results = forward(graph, values, training=True)
    cells = values.get(Ref("state_cell"), np.zeros(sizes[Ref("state")]))
    wanted = written_out(mode, num_layers, both, hidden, *(values[Ref(name)] for name in graph.variables[:3]), cells)
    for ref, array in zip(graph.outputs, wanted, strict=False):
        assert results[ref].shape == sizes[ref]
        np.testing.assert_allclose(results[ref], array, rtol=0, atol=SAME * max(1, np.abs(array).max()))


@pytest.fixture(scope="module")
def errors(seed):
    script = Path(__file__).with_name("rnn_in_mxnet.py")
    environment = {**os.environ, "MXNET_MKLDNN_ENABLED": "1"}
    done = subprocess.run([sys.executable, str(script), str(seed)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long(but=["*lstm"])
@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("what", ["output", "states", "executors"])
def test_against_mxnet(mode, what, errors):
    """Outputs and all gradients, relative to the largest."""
    assert max(errors[f"{mode} {what}"]) < FP32_TOLERANCE


def classifier(mode, **attrs):
    """A classifier of sequences (N, T, I), with trained initial states."""
    cell = [mx.sym.var("state_cell")] if mode == "lstm" else []
    x = mx.sym.transpose(mx.sym.var("data"), axes=(1, 0, 2))
    x = mx.sym.RNN(x, mx.sym.var("parameters"), mx.sym.var("state"), *cell, mode=mode, state_size=5, num_layers=2,
                   name="rnn", **attrs)
    x = mx.sym.FullyConnected(mx.sym.transpose(x[0], axes=(1, 0, 2)), num_hidden=7, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


@pytest.mark.parametrize("mode", GATES)
def test_a_step_against_the_network_as_it_is_given(mode, rng):
    """The graph that includes the backward pass, as any executor runs it."""
    graph, shapes = Graph.from_json(classifier(mode).tojson()), {"data": (3, 6, 4), "softmax_label": (3,)}
    sizes = graph.infer_shapes(shapes)
    values = {name: rng.normal(0, 0.7, sizes[Ref(name)]) for name in graph.variables}
    values["softmax_label"] = np.array([0.0, 6, 2])
    step = pipeline.training_step(graph, shapes, "float32", fewest)
    assert {"RNNTrain", "RNNBackward"} <= step.operators().keys()
    assert Graph.from_json(step.to_json()) == step
    results = run(step, values)
    gradients = backward(graph, forward(graph, {Ref(name): value for name, value in values.items()}, True))
    for name in (name for name in graph.arguments if name not in shapes):
        np.testing.assert_allclose(results[f"{name}_grad"], gradients[Ref(name)], rtol=0, atol=SAME)


@pytest.mark.parametrize("attrs, message", [
    ({"p": 0.3}, "p=0.3 is not supported: put Dropout between"),
    ({"projection_size": 2, "mode": "lstm"}, "projection_size=2 is not supported"),
    ({"use_sequence_length": True}, "use_sequence_length=True is not supported: give sequences of one length"),
    ({"num_layers": 0}, "num_layers=0"),
    ({"mode": "elman"}, "mode='elman'"),
])
def test_what_is_refused(attrs, message):
    with pytest.raises(GraphError, match=message):
        layer(**{"mode": "gru", **attrs})


def test_data_of_another_number_of_dimensions_is_refused():
    with pytest.raises(GraphError, match=r"RNN 'y' needs data of shape \(steps, sequences, features\), not \(3, 4\)"):
        layer("gru").infer_shapes({"data": (3, 4)})


def test_states_that_the_loss_depends_on_are_refused():
    graph = Graph.from_json(mx.sym.SoftmaxOutput(mx.sym.Flatten(mx.sym.RNN(
        mx.sym.var("data"), mx.sym.var("parameters"), mx.sym.var("state"), mode="gru", state_size=5, num_layers=1,
        state_outputs=True, name="rnn")[1])).tojson())
    with pytest.raises(GraphError, match="last state of RNN 'rnn' is read"):
        pipeline.training_step(graph, {"data": (4, 3, 2)}, "float32", fewest)


def test_mxnet_without_onednn_is_refused(monkeypatch):
    """Without oneDNN, MXNet's native RNN gives wrong numbers, and ends the process for some sizes."""
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    graph = Graph.from_json(classifier("gru").tojson())
    with pytest.raises(GraphError, match="RNN 'rnn' .* MXNET_MKLDNN_ENABLED"):
        create_executor("mxnet", graph, {"data": (3, 6, 4), "softmax_label": (3,)})
