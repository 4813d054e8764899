"""RNN in the reference executor against MXNet's, in a separate process: MXNet's RNN needs oneDNN, which the other tests
turn off (conftest.py). Prints {case: [relative errors]} as JSON.

    python tests/graph_passes/rnn_in_mxnet.py SEED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.mxnet_compat import mx
from graph_passes import Graph, Ref
from graph_passes.executors import create_executor
from graph_passes.executors.reference import backward, forward
from graph_passes.operators.rnn import GATES


def layers(rng: np.random.Generator, mode: str, state_outputs: bool) -> tuple[Graph, tuple[int, ...]]:
    """One RNN of a random size, as MXNet's Symbol."""
    size = [int(rng.integers(1, 9)) for _ in range(4)]
    cell = [mx.sym.var("state_cell")] if mode == "lstm" else []
    symbol = mx.sym.RNN(mx.sym.var("data"), mx.sym.var("parameters"), mx.sym.var("state"), *cell, mode=mode,
                        state_size=size[3], num_layers=int(rng.integers(1, 4)), bidirectional=bool(rng.integers(2)),
                        state_outputs=state_outputs, name="y")
    return Graph.from_json(symbol.tojson()), tuple(size[:3])


def operator_errors(rng: np.random.Generator, mode: str, state_outputs: bool) -> list[float]:
    """Errors of the outputs, and of the gradients of all inputs, each relative to its largest element."""
    graph, data = layers(rng, mode, state_outputs)
    shapes = graph.infer_shapes({"data": data})
    # Weights of about 1 / sqrt(hidden): with larger ones the states are chaotic, and rounding errors grow from step to
    # step.
    scale = {"parameters": 0.7 * graph["y"]["state_size"] ** -0.5}
    values = {Ref(name): (rng.standard_normal(shapes[Ref(name)]) * scale.get(name, 1)).astype(np.float32)
              for name in graph.variables}
    results = forward(graph, values, training=True)
    head = rng.standard_normal(shapes[graph.outputs[0]]).astype(np.float32)
    own = backward(graph, results, True, head)
    arrays = {ref.node: mx.nd.array(value) for ref, value in values.items()}
    grads = {name: mx.nd.zeros(array.shape) for name, array in arrays.items()}
    bound = mx.sym.load_json(graph.to_json()).bind(mx.cpu(), arrays, grads)
    outputs = bound.forward(is_train=True)
    bound.backward([mx.nd.array(head), *(mx.nd.zeros(output.shape) for output in outputs[1:])])
    pairs = [(output.asnumpy(), results[ref]) for output, ref in zip(outputs, graph.outputs, strict=True)]
    largest = max(np.abs(own[Ref(name)]).max() for name in grads)
    errors = [np.abs(theirs - ours).max() / max(1, np.abs(ours).max()) for theirs, ours in pairs]
    return errors + [np.abs(grad.asnumpy() - own[Ref(name)]).max() / largest for name, grad in grads.items()]


def network(mode: str) -> Graph:
    """Two bidirectional recurrent layers in a classifier of sequences (N, T, I), with trained initial states."""
    cell = [mx.sym.var("state_cell")] if mode == "lstm" else []
    x = mx.sym.transpose(mx.sym.var("data"), axes=(1, 0, 2))
    x = mx.sym.RNN(x, mx.sym.var("parameters"), mx.sym.var("state"), *cell, mode=mode, state_size=5, num_layers=2,
                   bidirectional=True, name="rnn")
    x = mx.sym.FullyConnected(mx.sym.transpose(x, axes=(1, 0, 2)), num_hidden=7, name="fc")
    return Graph.from_json(mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax").tojson())


def executor_errors(rng: np.random.Generator, mode: str) -> list[float]:
    """Errors of the probabilities and gradients of a training pass, mxnet against reference."""
    graph, shapes = network(mode), {"data": (3, 6, 4), "softmax_label": (3,)}
    sizes = graph.infer_shapes(shapes)
    params = {name: rng.normal(0, 0.5, sizes[Ref(name)]).astype(np.float32)
              for name in graph.arguments if name not in shapes}
    data, label = rng.standard_normal(shapes["data"]).astype(np.float32), np.array([0, 6, 2], np.float32)
    answers, gradients = [], []
    for kind in ("reference", "mxnet"):
        executor = create_executor(kind, graph, shapes)
        executor.set_params(params, {})
        executor.forward_backward(mx.nd.array(data), mx.nd.array(label))
        gradients.append({name: executor.to_canonical(name, array) for name, array in executor.grads.items()})
        executor.forward(mx.nd.array(data))
        answers.append(executor.request_probabilities()())
    ours, theirs = gradients
    largest = max(np.abs(gradient).max() for gradient in ours.values())
    errors = [np.abs(ours[name] - theirs[name]).max() / largest for name in params]
    return [np.abs(answers[0] - answers[1]).max(), *errors]


def main() -> None:
    rng = np.random.default_rng(int(sys.argv[1]))
    errors = {f"{mode} {use}": [float(error) for error in found]
              for mode in GATES
              for use, found in (("output", operator_errors(rng, mode, False)),
                                 ("states", operator_errors(rng, mode, True)),
                                 ("executors", executor_errors(rng, mode)))}
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
