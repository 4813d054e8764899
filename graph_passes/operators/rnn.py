"""Recurrent layers: MXNet's `RNN`, in its four modes, stacked and in one or both directions; and its gradient.

Names of sizes: T steps, N sequences, I features of the data, H of a state (`state_size`), L layers (`num_layers`), D
directions (1, or 2 with `bidirectional`), G gates. A step computes, with x of the layer below and h of the step before
(W, R, b and b' belong to one layer and direction):

    rnn_relu, rnn_tanh    h' = f(W x + b + R h + b')
    lstm                  i, f, o = sigmoid(...), g = tanh(...);  c' = f c + i g,  h' = o tanh(c')
    gru                   r, z = sigmoid(...), n = tanh(W x + b + r (R h + b'));  h' = (1 - z) n + z h

Gates are in the order i, f, g, o and r, z, n. The backward direction reads the sequence from its end. The layer above
reads both directions side by side. (Hochreiter and Schmidhuber, Neural Computation 9, 1997; Cho et al.,
arXiv:1406.1078, with the reset gate after the product, as in cuDNN.)

`parameters` is one vector, MXNet's and cuDNN's: W (G H, I) and R (G H, H) of each layer and direction, one after the
other, then b (G H,) and b' (G H,) of each. States are (L D, N, H).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import (
    FALSE,
    Array,
    Attribute,
    Gradient,
    NodeView,
    Operator,
    Ref,
    Shape,
    Shapes,
    known,
    one_of,
)
from graph_passes.operators.body import Body

GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
# cuDNN's algorithms. Persistent algorithms keep the weights on the chip from one step to the next, if the weights fit
# (Diamos et al., 'Persistent RNNs: Stashing Recurrent Weights On-Chip', ICML 2016). The last one is for one small layer
# in one direction: with two layers in both directions it gave wrong gradients on an H200 (cuDNN 9.19) in each run of
# tests/graph_passes/cuda/test_rnn_layers.py. cuDNN's persist_dynamic is left out: its results were wrong in one of two
# runs.
ALGORITHMS = ("standard", "persist_static", "persist_static_small_h")


def directions(node: NodeView) -> int:
    """The number of directions D."""
    return 2 if node["bidirectional"] else 1


def num_parameters(node: NodeView, features: int) -> int:
    """Elements of `parameters` for data with this many features."""
    gates, hidden, both = GATES[node["mode"]] * node["state_size"], node["state_size"], directions(node)
    above = (node["num_layers"] - 1) * (both * hidden + hidden + 2)
    return both * gates * (features + hidden + 2 + above)


def flops(node: NodeView, data: Shape) -> int:
    """Multiplications and additions of the products with W and R in the forward pass."""
    steps, sequences, features = data
    biases = 2 * directions(node) * node["num_layers"] * GATES[node["mode"]] * node["state_size"]
    return 2 * steps * sequences * (num_parameters(node, features) - biases)


# --- shapes ---


def _rnn(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    given, (output, state) = _sizes(node, known(node, shapes))
    return given, [output, *[state] * (len(given) - 2 if node["state_outputs"] else 0)]


def _train(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    given, made = _rnn(node, shapes)
    (steps, sequences, _), (states, _, hidden) = given[0], given[2]
    return given, [*made, (states, steps, sequences, _NUM_SAVED[node["mode"]] * hidden)]


def _backward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    given, made = _train(node, list(shapes[1 : len(shapes) - 2]))
    return [made[0], *given, made[0], made[-1]], given


def _sizes(node: NodeView, data: Shape) -> tuple[list[Shape], tuple[Shape, Shape]]:
    """The shapes of the inputs, and of output and state."""
    if len(data) != 3:
        raise GraphError(f"{node.op} '{node.name}' needs data of shape (steps, sequences, features), not {data}")
    steps, sequences, features = data
    state = (node["num_layers"] * directions(node), sequences, node["state_size"])
    states = [state] * (2 if _has_cell(node) else 1)
    output = (steps, sequences, directions(node) * node["state_size"])
    return [data, (num_parameters(node, features),), *states], (output, state)


def _has_cell(node: NodeView) -> bool:
    return bool(node["mode"] == "lstm")


def _no_cell(node: NodeView) -> bool:
    return not _has_cell(node)


def _no_state_output(node: NodeView) -> bool:
    return not node["state_outputs"]


def _no_cell_output(node: NodeView) -> bool:
    return _no_cell(node) or _no_state_output(node)


# --- NumPy: one layer in one direction. Arrays (T, N, ...) are in the order in which its steps run ---

# Values of each step that the backward pass reads, in multiples of H: the gates and the new states; for the GRU also R
# h + b'.
_NUM_SAVED = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 6, "gru": 5}


class _Weights(NamedTuple):
    """The weights of one layer and direction, or their gradients: views of `parameters`."""

    input: Array  # W (G H, I)
    recurrent: Array  # R (G H, H)
    input_bias: Array  # (G H,)
    recurrent_bias: Array


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))  # this form cannot overflow


def _plain_step(activation: Callable[[Array], Array], from_input: Array, from_state: Array, h: Array,
                c: Array) -> tuple[list[Array], Array, Array]:
    return [], activation(from_input + from_state), c


def _lstm_step(from_input: Array, from_state: Array, h: Array, c: Array) -> tuple[list[Array], Array, Array]:
    i, f, g, o = np.split(from_input + from_state, 4, axis=1)
    i, f, g, o = _sigmoid(i), _sigmoid(f), np.tanh(g), _sigmoid(o)
    c = f * c + i * g
    return [i, f, g, o, c], o * np.tanh(c), c


def _gru_step(from_input: Array, from_state: Array, h: Array, c: Array) -> tuple[list[Array], Array, Array]:
    (input_r, input_z, input_n), (r, z, state_n) = np.split(from_input, 3, axis=1), np.split(from_state, 3, axis=1)
    r, z = _sigmoid(input_r + r), _sigmoid(input_z + z)
    n = np.tanh(input_n + r * state_n)
    return [r, z, n, state_n], (1 - z) * n + z * h, c


# Mode -> function of (W x + b, R h + b', h, c) that returns the saved values other than the new h, the new h, and the
# new c.
_STEPS: Mapping[str, Callable[..., tuple[list[Array], Array, Array]]] = {
    "rnn_relu": lambda *given: _plain_step(lambda x: np.maximum(x, 0), *given),
    "rnn_tanh": lambda *given: _plain_step(np.tanh, *given),
    "lstm": _lstm_step,
    "gru": _gru_step,
}


def _relu_step_back(saved: list[Array], h: Array, c: Array, dh: Array, dc: Array) -> tuple[Array, ...]:
    dz = dh * (saved[-1] > 0)
    return dz, dz, np.zeros_like(dh), dc


def _tanh_step_back(saved: list[Array], h: Array, c: Array, dh: Array, dc: Array) -> tuple[Array, ...]:
    dz = dh * (1 - saved[-1] ** 2)
    return dz, dz, np.zeros_like(dh), dc


def _lstm_step_back(saved: list[Array], h: Array, c: Array, dh: Array, dc: Array) -> tuple[Array, ...]:
    i, f, g, o, new_c, _ = saved
    tanh_c = np.tanh(new_c)
    dc = dc + dh * o * (1 - tanh_c**2)
    dz = np.concatenate([dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g**2),
                         dh * tanh_c * o * (1 - o)], axis=1)
    return dz, dz, np.zeros_like(dh), dc * f


def _gru_step_back(saved: list[Array], h: Array, c: Array, dh: Array, dc: Array) -> tuple[Array, ...]:
    r, z, n, state_n, _ = saved
    dn = dh * (1 - z) * (1 - n**2)
    dr, dz = dn * state_n * r * (1 - r), dh * (h - n) * z * (1 - z)
    return np.concatenate([dr, dz, dn], axis=1), np.concatenate([dr, dz, dn * r], axis=1), dh * z, dc


# Mode -> function of (saved values, h and c before the step, gradients of the new h and c) that returns the gradients
# of W x + b, of R h + b', of h without the path through R, and of c
_STEPS_BACK: Mapping[str, Callable[..., tuple[Array, ...]]] = {
    "rnn_relu": _relu_step_back,
    "rnn_tanh": _tanh_step_back,
    "lstm": _lstm_step_back,
    "gru": _gru_step_back,
}


def _run(mode: str, x: Array, weights: _Weights, h: Array, c: Array) -> tuple[Array, Array, Array, Array]:
    """The states of all steps (T, N, H), the last h and c, and the saved values (T, N, ... H)."""
    from_input = x @ weights.input.T + weights.input_bias
    outputs, saved = [], []
    for each in from_input:
        kept, h, c = _STEPS[mode](each, h @ weights.recurrent.T + weights.recurrent_bias, h, c)
        outputs.append(h)
        saved.append(np.concatenate([*kept, h], axis=1))
    return np.stack(outputs), h, c, np.stack(saved)


def _run_back(mode: str, dy: Array, x: Array, weights: _Weights, h: Array, c: Array, saved: Array,
              gradients: _Weights) -> tuple[Array, Array, Array]:
    """Gradients of x and of the first h and c. The gradients of the weights are added to `gradients`."""
    steps = [np.split(each, _NUM_SAVED[mode], axis=1) for each in saved]
    before = [(h, c), *((kept[-1], kept[-2] if mode == "lstm" else c) for kept in steps[:-1])]
    dh, dc, dx = np.zeros_like(h), np.zeros_like(c), np.empty_like(x)
    for t in reversed(range(len(x))):
        of_input, of_state, dh, dc = _STEPS_BACK[mode](steps[t], *before[t], dh + dy[t], dc)
        dx[t] = of_input @ weights.input
        dh = dh + of_state @ weights.recurrent
        for total, part in zip(gradients, (of_input.T @ x[t], of_state.T @ before[t][0], of_input.sum(0),
                                           of_state.sum(0)), strict=True):
            total += part
    return dx, dh, dc


# --- NumPy: the operators ---


def _unpacked(node: NodeView, parameters: Array, features: int) -> list[_Weights]:
    """The weights of each layer and direction, in the order of the states."""
    gates, hidden, both = GATES[node["mode"]] * node["state_size"], node["state_size"], directions(node)
    cells = [(layer, direction) for layer in range(node["num_layers"]) for direction in range(both)]
    widths = [both * hidden if layer else features for layer, _ in cells]
    shapes = [shape for width in widths for shape in ((gates, width), (gates, hidden))]
    ends = np.cumsum([*(rows * columns for rows, columns in shapes), *[gates] * (2 * len(cells))])
    parts = np.split(parameters, ends[:-1])
    matrices = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=False)]
    biases = parts[len(shapes) :]
    return [_Weights(*matrices[i : i + 2], *biases[i : i + 2]) for i in range(0, len(shapes), 2)]


def _layers(node: NodeView) -> Iterator[list[tuple[int, slice]]]:
    """For each layer, yield a list of its directions. A direction is the index of its state and the order of its steps.
    """
    both = directions(node)
    for layer in range(node["num_layers"]):
        yield [(layer * both + direction, slice(None, None, -1 if direction else 1)) for direction in range(both)]


def _forward(node: NodeView, x: Array, parameters: Array, state: Array,
             state_cell: Array | None = None) -> tuple[Array, Array, Array, Array]:
    """Output, last states and cells, and the values that the backward pass needs."""
    weights = _unpacked(node, parameters, x.shape[2])
    cells = np.zeros_like(state) if state_cell is None else state_cell
    last_h, last_c, saved = [], [], []
    for layer in _layers(node):
        outputs = []
        for number, order in layer:
            y, h, c, kept = _run(node["mode"], x[order], weights[number], state[number], cells[number])
            outputs.append(y[order])
            last_h.append(h)
            last_c.append(c)
            saved.append(kept)
        x = np.concatenate(outputs, axis=2)
    return x, np.stack(last_h), np.stack(last_c), np.stack(saved)


def _compute_train(node: NodeView, *inputs: Array) -> list[Array]:
    output, h, c, saved = _forward(node, *inputs)
    states = [] if not node["state_outputs"] else [h, c] if _has_cell(node) else [h]
    return [output, *states, saved]


def _compute(node: NodeView, *inputs: Array) -> list[Array]:
    return _compute_train(node, *inputs)[:-1]


def _compute_backward(node: NodeView, dy: Array, x: Array, parameters: Array, state: Array,
                      *others: Array) -> list[Array]:
    *state_cell, _, saved = others
    cells = state_cell[0] if state_cell else np.zeros_like(state)
    weights, hidden = _unpacked(node, parameters, x.shape[2]), node["state_size"]
    dparameters, dstate, dcells = np.zeros_like(parameters), np.empty_like(state), np.empty_like(cells)
    gradients = _unpacked(node, dparameters, x.shape[2])
    layers = list(_layers(node))
    data = [x]  # for each layer: the saved states of its directions, in the order of time
    for layer in layers[:-1]:
        data.append(np.concatenate([saved[number][order, :, -hidden:] for number, order in layer], axis=2))
    for layer, below in zip(reversed(layers), reversed(data), strict=True):
        dx = np.zeros_like(below)
        for direction, (number, order) in enumerate(layer):
            own = dy[order, :, direction * hidden : (direction + 1) * hidden]
            part, dstate[number], dcells[number] = _run_back(
                node["mode"], own, below[order], weights[number], state[number], cells[number], saved[number],
                gradients[number])
            dx += part[order]
        dy = dx
    return [dy, dparameters, dstate, *([dcells] if state_cell else [])]


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    return [*_compute_backward(node, dy, *inputs, outputs[0], _forward(node, *inputs)[3])]


# --- the gradient in the graph ---


def _gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    forward = node.derive("RNNTrain", node.name, node.inputs)
    backward = node.derive("RNNBackward", f"{node.name}_backward",
                           (dy, *node.inputs, Ref(node.name), forward.output("reserve")))
    names = OPERATORS[0].input_names(node)
    return Gradient([backward], {name: backward.output(f"{name}_grad") for name in names})


# --- the descriptions ---


def _size(value: Any) -> int:
    """Parse a size of at least 1."""
    if int(value) < 1:
        raise ValueError(value)
    return int(value)


def _unsupported(name: str, advice: str) -> Attribute:
    """An MXNet attribute that must keep its default."""

    def read(value: Any) -> None:
        if str(value) not in ("None", "0", "0.0", "False"):
            raise GraphError(f"an RNN with {name}={value} is not supported: {advice}")

    return Attribute(read, None)


_ATTRIBUTES = {
    "mode": Attribute(one_of(*GATES)),
    "state_size": Attribute(_size),
    "num_layers": Attribute(_size),
    "bidirectional": FALSE,
    "state_outputs": FALSE,
    "p": _unsupported("p", "put Dropout between RNNs of one layer each"),
    "projection_size": _unsupported("projection_size", "put a FullyConnected behind it"),
    "lstm_state_clip_min": _unsupported("lstm_state_clip_min", "clip gradients in the optimizer"),
    "lstm_state_clip_max": _unsupported("lstm_state_clip_max", "clip gradients in the optimizer"),
    "use_sequence_length": _unsupported("use_sequence_length", "give sequences of one length"),
    "algorithm": Attribute(one_of(*ALGORITHMS), ALGORITHMS[0]),  # ours: cuDNN's algorithm, chosen by the cover
}
_INPUTS = ("data", "parameters", "state", "state_cell")
_OUTPUTS = ("output", "state_output", "statecell_output")
_OPTIONAL = {"state_cell": _no_cell, "state_cell_grad": _no_cell, "state_output": _no_state_output,
             "statecell_output": _no_cell_output}


def _train_body(b: Body) -> list[Any]:
    """The contents of `reserve` depend on the algorithm, which the backward pass must share."""
    *others, reserve = b.primitive()
    return [*others, b.reserve(reserve)]


def _backward_body(b: Body) -> list[Any]:
    reserve = b["reserve"]
    return b.primitive([b.read_reserve(each) if each == reserve else each for each in b.inputs])


OPERATORS = (
    Operator("RNN", _INPUTS, _rnn, _compute, _ATTRIBUTES, _OUTPUTS, _OPTIONAL, gradient=_gradient,
             numpy_gradient=_numpy_gradient, training=lambda node: "RNNTrain"),
    # `reserve`: memory for the backward pass, in the executor's own format.
    Operator("RNNTrain", _INPUTS, _train, _compute_train, _ATTRIBUTES, (*_OUTPUTS, "reserve"), _OPTIONAL,
             forward="RNN", body=_train_body),
    # All gradients at once: cuDNN's data gradient writes to `reserve` the values that the weights' gradient reads. No
    # gradient flows back through the last states.
    Operator("RNNBackward", ("out_grad", *_INPUTS, "output", "reserve"), _backward, _compute_backward, _ATTRIBUTES,
             tuple(f"{name}_grad" for name in _INPUTS), _OPTIONAL, forward="RNN", body=_backward_body),
)
