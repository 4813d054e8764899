"""The executor on stock MXNet: any CPU, and GPUs up to sm_89, for which MXNet 1.9.1 has machine code.

Fused operators are expanded to MXNet's own. On the CPU the graph is converted to NCHW (MXNet's CPU convolution does not
support NHWC). Then the Symbol is bound. Equal inputs give equal bits in every run on one machine and thread count.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from common.mxnet_compat import mx
from common.quiet import without_lines
from graph_passes.errors import GraphError
from graph_passes.executors.base import NO_DRAWS, TOP_K, Draws, Executor, Metrics, parse_device
from graph_passes.graph import VARIABLE, Graph, Node, Ref
from graph_passes.operators import LOSSES, OPERATORS, Shape
from graph_passes.operators.dropout import SEED, words_of
from graph_passes.operators.formula import SCORES, TARGETS
from graph_passes.passes import draw_masks, layout, remove_dropout, unfuse

LABEL = "softmax_label"
Array = Any  # mx.nd.NDArray; MXNet has no type stubs


class _Bound(NamedTuple):
    """The Symbol bound for one use and one image size. `masks`: the inputs of the Symbol that are Dropout masks."""

    executor: Any
    inputs: dict[str, Array]
    masks: dict[str, Shape]


class MXNetExecutor(Executor):
    """Runs a graph by MXNet's own operators, in fp32, on CPUs and on GPUs that these operators support."""

    def __init__(self, graph: Graph, shapes: Mapping[str, Sequence[int]], device: str = "cpu(0)") -> None:
        self._context = _context(device)
        check_recurrent(graph)
        images, *_ = shapes.get("data") or (1,)  # missing data is refused below
        graph = draw_masks(unfuse(graph), images)
        super().__init__(layout(graph, "NCHW") if self._context.device_type == "cpu" else graph, shapes)
        graph = self.graph
        self._loss = _loss_node(graph)
        if self._loss:  # the Symbol ends in the scores; the loss is computed outside the Symbol
            graph = Graph(graph, self._loss.inputs[:1], graph.attrs)
            if LABEL in self.input_shapes:
                self._classes = self.graph.infer_shapes(self.input_shapes)[self._loss.inputs[0]][1]
        weights = self._loss.get("class_weights", ()) if self._loss else ()
        self._class_weights = mx.nd.array(weights, ctx=self._context).reshape((1, -1)) if weights else None
        self._shapes = {name: shape for name, shape in self.input_shapes.items() if name != LABEL or not self._loss}
        training, inference = (mx.sym.load_json(each.to_json(indent=None))
                               for each in (_with_masks(graph), remove_dropout(graph)))
        arguments, aux = _infer_shapes(inference, self._shapes)
        zeros = {name: mx.nd.zeros(shape, ctx=self._context) for name, shape in {**arguments, **aux}.items()}
        self.params = {name: zeros[name] for name in arguments if name not in self.input_shapes}
        self.aux = {name: zeros[name] for name in aux}
        self._symbols = {"write": training, "add": training, "null": inference}
        # The Symbol is bound once for each use. forward(is_train) of a bound Symbol sets a flag. Operators that wait in
        # the engine read this flag only when they run, so one Symbol for both training and inference would mix up the
        # two.
        # grad_req -> Symbol: "write" gradients, "add" to gradients, or infer ("null")
        self._bound: dict[str, _Bound] = {}
        self._trained: set[str] = set()  # bound Symbols that have had a training pass
        self._totals = mx.nd.zeros(4, dtype="float64", ctx=self._context)  # sums of the fields of Metrics
        self._latest: Array = None  # probabilities of the latest inference

    @cached_property
    def grads(self) -> dict[str, Array]:  # type: ignore[override]  # made when training begins: inference has none
        return {name: mx.nd.zeros(array.shape, ctx=self._context) for name, array in self.params.items()
                if name not in self.frozen}

    def forward_backward(self, data: Array, label: Array, accumulate: bool = False, draws: Draws = NO_DRAWS) -> None:
        if self._loss is None:
            raise GraphError("the graph does not end in SoftmaxOutput: without a loss there is nothing to train")
        grad_req = "add" if accumulate else "write"
        bound = self._load(grad_req, data, draws)
        targets, ranked = self._targets(label, draws.own_share(*data.shape[1:3]))
        if self._class_weights is not None:
            targets = targets * self._class_weights
        with self._first_pass_quiet(grad_req):
            (scores,) = bound.executor.forward(is_train=True)
            bound.executor.backward(_loss_gradient(self._loss, scores, targets))
        self._count(scores, targets, ranked, label.shape[0])

    def forward(self, data: Array, label: Array | None = None) -> Array:
        self.infer(data, label, data.shape[0])
        return self._latest

    def forward_all(self, data: Array) -> list[np.ndarray]:
        """All outputs of the graph in inference; `forward` returns only the first output."""
        bound = self._load("null", data)
        return [output.asnumpy() for output in bound.executor.forward(is_train=False)]

    def infer(self, data: Array, label: Array | None = None, num_valid: int = 0) -> None:
        (answer,) = self._load("null", data).executor.forward(is_train=False)
        if label is not None:
            self._count(answer, *self._targets(label), num_valid)
        self._latest = _probabilities(self._loss, answer) if self._loss else answer

    def request_probabilities(self) -> Callable[[], np.ndarray]:
        return self._latest.copyto(mx.cpu()).asnumpy

    def read_metrics(self) -> Metrics:
        loss_sum, top1, top5, count = self._totals.asnumpy()
        self._totals[:] = 0
        return Metrics(float(loss_sum), int(top1), int(top5), int(count))

    def synchronize(self) -> None:
        mx.nd.waitall()

    def _assign(self, array: Array, value: np.ndarray) -> None:
        # After inference oneDNN keeps convolution weights in its own blocked layout (training undoes it). Every MXNet
        # operator can read this layout. But NumPy values cannot be assigned to an array in this layout, and other
        # libraries must not use the array's pointer.
        array[:] = mx.nd.array(value, ctx=self._context)

    def _load(self, grad_req: str, data: Array, draws: Draws = NO_DRAWS) -> _Bound:
        """The Symbol bound for a use and the size of this batch, with the images in its input."""
        self.check_input("data", data.shape)
        bound = self._bound.get(grad_req)
        if not bound or bound.inputs["data"].shape != data.shape:
            bound = self._bind(grad_req, self._shapes | {"data": data.shape})
        for name, mask in _masks(self.graph, bound.masks, draws.seed):
            bound.inputs[name][:] = mx.nd.array(mask, ctx=self._context)
        bound.inputs["data"][:] = data if draws.mixup == 1 else _mixed(data, draws.mixup)
        if draws.cutmix and draws.own_share(*data.shape[1:3]) < 1:  # MXNet has no empty slices
            top, left, bottom, right = draws.cutmix
            bound.inputs["data"][:, top:bottom, left:right] = mx.nd.flip(data[:, top:bottom, left:right], axis=0)
        return bound

    def _targets(self, label: Array, share: float = 1.0) -> tuple[Array, Array]:
        """Targets (N, classes) with label smoothing, and the labels (N,) for counting hits (see `Draws`). `share`:
        share of an image's own label."""
        self.check_input(LABEL, label.shape)
        assert self._loss is not None
        label, smoothing = label.as_in_context(self._context), self._loss["smooth_alpha"]
        elsewhere = smoothing / (self._classes - 1) if smoothing else 0.0
        targets = mx.nd.one_hot(label, self._classes, 1 - smoothing, elsewhere)
        if share == 1:
            return targets, label
        partners = mx.nd.flip(label, axis=0)
        ranked = label if share > 0.5 else partners if share < 0.5 else mx.nd.minimum(label, partners)
        return _mixed(targets, share), ranked

    def _bind(self, grad_req: str, shapes: Mapping[str, Sequence[int]]) -> _Bound:
        # all bound Symbols share their working memory
        shared = next((bound.executor for bound in self._bound.values()), None)
        masks = {} if grad_req == "null" else _mask_shapes(self.graph, shapes["data"])
        inputs = {name: mx.nd.zeros(shape, ctx=self._context) for name, shape in {**shapes, **masks}.items()}
        grads = {} if grad_req == "null" else self.grads
        requests = dict.fromkeys({**self.params, **inputs}, "null") | dict.fromkeys(grads, grad_req)
        arguments = {**self.params, **inputs}
        with without_lines(_ANY_LINE):
            executor = self._symbols[grad_req].bind(
                self._context, arguments, grads, requests, self.aux, shared_exec=shared
            )
        self._bound[grad_req] = _Bound(executor, inputs, masks)
        self._trained.discard(grad_req)
        return self._bound[grad_req]

    @contextlib.contextmanager
    def _first_pass_quiet(self, grad_req: str) -> Iterator[None]:
        """Silence oneDNN in its first training pass, where it logs a line for each average pooling over windows."""
        pools = any(node.op == "Pooling" and node["pool_type"] == "avg" and not node["global_pool"]
                    for node in self.graph)
        if not pools or grad_req in self._trained:
            yield
            return
        with without_lines(_ANY_LINE):
            yield
            mx.nd.waitall()
        self._trained.add(grad_req)

    def _count(self, scores: Array, targets: Array, label: Array, num_valid: int) -> None:
        """Add the first `num_valid` images of a batch to the metrics. Asynchronous."""
        if not num_valid:
            return
        assert self._loss
        scores = scores[:num_valid]
        best = mx.nd.topk(scores, k=min(TOP_K, self._classes), axis=1) == label[:num_valid].reshape((-1, 1))
        sums = [_loss_sum(self._loss, scores, targets[:num_valid]), best[:, 0].sum(), best.sum(),
                mx.nd.full(1, num_valid, ctx=self._context)]
        self._totals += mx.nd.concat(*sums, dim=0).astype("float64")


def _mixed(array: Array, share: float) -> Array:
    """Each row mixed with row n - 1 - i."""
    return share * array + (1 - share) * mx.nd.flip(array, axis=0)


def _context(device: str) -> Any:
    kind, number = parse_device(device)
    if kind == "gpu" and number >= mx.context.num_gpus():
        raise GraphError(f"MXNet finds {mx.context.num_gpus()} GPUs here, so {device} cannot be used: use --device cpu")
    return mx.Context(kind, number)


def check_recurrent(graph: Graph) -> None:
    """Refuse RNN without oneDNN. MXNet 1.9.1 computes RNN with oneDNN. With oneDNN switched off, MXNet still passes
    oneDNN's arrays to RNN, and returns wrong numbers or ends the process. MXNet's own RNN code (MXNET_USE_MKLDNN_RNN=0)
    computes wrong gradients for several layers.
    """
    recurrent = [node.name for node in graph if node.op == "RNN"]
    if recurrent and "0" in (os.environ.get("MXNET_MKLDNN_ENABLED"), os.environ.get("MXNET_USE_MKLDNN_RNN")):
        raise GraphError(f"MXNet computes RNN '{recurrent[0]}' correctly only with oneDNN: unset MXNET_MKLDNN_ENABLED "
                         "and MXNET_USE_MKLDNN_RNN, or use the executor reference")


def _infer_shapes(symbol: Any, inputs: Mapping[str, Sequence[int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes of arguments and running statistics by name."""
    for name in inputs:
        if name not in symbol.list_arguments():
            raise GraphError(f"the graph has no input '{name}': give shapes for its inputs only")
    try:
        with warnings.catch_warnings():  # MXNet also prints a warning; the error below is enough
            warnings.simplefilter("ignore")
            arguments, _, aux = symbol.infer_shape(**inputs)
    except mx.base.MXNetError as error:
        reason = str(error).strip().splitlines()[-1]
        raise GraphError(f"the input shapes {dict(inputs)} do not fit the graph: {reason}") from None
    if arguments is None:
        raise GraphError(f"the input shapes {dict(inputs)} do not determine all others: give the shapes of all inputs")
    return (
        dict(zip(symbol.list_arguments(), arguments, strict=True)),
        dict(zip(symbol.list_auxiliary_states(), aux, strict=True)),
    )


# Messages about MXNET_SUBGRAPH_BACKEND (common/mxnet_compat.py) that MXNet logs when it binds a Symbol. No setting
# turns these messages off.
_ANY_LINE = re.compile(b"")
_DROPPING = ("DropoutImages", "DropoutElements")


def _mask(node: Node) -> str:
    """Name of the mask input that replaces the Dropout `node`: the tensor is multiplied by this mask."""
    return f"{node.name}_mask"


def _with_masks(graph: Graph) -> Graph:
    """The graph with Dropout masks as inputs. MXNet's own Dropout would draw other masks in a resumed run."""
    def multiply(node: Node) -> Sequence[Node] | None:
        if node.op not in _DROPPING:
            return None
        return Node(VARIABLE, _mask(node)), Node("broadcast_mul", node.name, (node.inputs[0], Ref(_mask(node))))

    return graph.rewrite(multiply)


def _mask_shapes(graph: Graph, data: Sequence[int]) -> dict[str, Shape]:
    """Shapes of all masks, by name, for data of this shape."""
    dropping = [node for node in graph if node.op in _DROPPING]
    sizes = graph.infer_shapes({"data": data}) if dropping else {}
    return {_mask(node): (sizes[Ref(node.name)][0], 1, 1, 1) if node.op == "DropoutImages" else sizes[Ref(node.name)]
            for node in dropping}


def _masks(graph: Graph, shapes: Mapping[str, Shape], seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """The masks of a seed, by name."""
    values = {Ref(SEED): words_of(seed)}
    for node in graph if shapes else ():
        if node.op == "DropoutFactors":
            values[Ref(node.name)], = OPERATORS[node.op].compute(node, values[Ref(SEED)])
        elif node.op in _DROPPING:
            ones = np.ones(shapes[_mask(node)], np.float32)
            yield _mask(node), OPERATORS[node.op].compute(node, ones, values[node.inputs[1]])[0]


def _loss_node(graph: Graph) -> Node | None:
    node = graph[graph.outputs[0].node]
    return node if node.op in LOSSES else None




def _probabilities(loss: Node, scores: Array) -> Array:
    is_sigmoid = loss.op == "SigmoidOutput" or loss.get("probabilities") == "sigmoid"
    return mx.nd.sigmoid(scores) if is_sigmoid else mx.nd.softmax(scores)


@lru_cache(maxsize=8)
def _custom_loss(symbol: str) -> Any:
    """A function of scores and targets that gives the loss of each image; MXNet differentiates it."""
    inputs = [mx.sym.Variable(name, dtype="float32") for name in (SCORES, TARGETS)]
    return mx.gluon.SymbolBlock(mx.sym.load_json(symbol), inputs)


def _loss_sum(loss: Node, scores: Array, targets: Array) -> Array:
    """The loss (1,): the sum over the images."""
    if loss.op == "SigmoidOutput":
        targets = _above_threshold(loss, targets)
        costs = mx.nd.relu(scores) - scores * targets + mx.nd.log1p(mx.nd.exp(-mx.nd.abs(scores)))
        return costs.sum() / scores.shape[1]
    if loss.op == "CustomOutput":
        return _custom_loss(loss["loss"])(scores, targets).sum()
    return -(targets * mx.nd.log_softmax(scores)).sum()


def _loss_gradient(loss: Node, scores: Array, targets: Array) -> Array:
    """The gradient (N, classes) of the loss with respect to the scores."""
    scale = loss["grad_scale"] / (1 if loss["normalization"] == "null" else scores.shape[0])
    if loss.op == "SigmoidOutput":
        return (mx.nd.sigmoid(scores) - _above_threshold(loss, targets)) * (scale / scores.shape[1])
    if loss.op == "CustomOutput":
        scores = scores.copy()
        scores.attach_grad()
        with mx.autograd.record():
            total = _custom_loss(loss["loss"])(scores, targets).sum()
        total.backward()
        return scores.grad * scale
    probabilities = mx.nd.softmax(scores)
    if loss["class_weights"]:
        probabilities = probabilities * targets.sum(axis=1, keepdims=True)
    return (probabilities - targets) * scale


def _above_threshold(loss: Node, targets: Array) -> Array:
    return targets > loss["threshold"] if loss["threshold"] else targets
