"""Reads ONNX models as networks that can be trained: one row per operator, like `graph_passes/onnx_writer.py`.

    graph, weights, size = read("net.onnx", content)

Operators and attributes are those of ONNX's default domain (https://onnx.ai/onnx/operators/), from opset 7 on. Most
exporters fold BatchNorms into convolutions; these networks then have no BatchNorm to train.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import plugins
from common.content import refused_as
from graph_passes import Graph, GraphError, Node, Ref
from graph_passes.graph import VARIABLE, unused_name
from train.content import content_of_file, reason
from train.errors import TrainError

DEFAULT_DOMAINS = ("", "ai.onnx")
FIRST_OPSET = 7  # before it, Add and others were told how to broadcast
NEW_OPSET = 17  # that others can convert to
FLOAT_LIMIT = float(np.finfo(np.float32).max)
Weights = dict[str, np.ndarray]


class Read(NamedTuple):
    """A model. `graph`: from the variable `data`, images in NHWC, to the model's output, without a softmax at its end.
    `weights`: arrays by the names of the graph's variables, in the graph's layout, mostly NCHW. `size`: height and
    width of the images; 0: any.
    """

    graph: Graph
    weights: Weights
    size: int


def content_of(path: Path) -> bytes:
    """The bytes of an ONNX model in one piece: PyTorch writes the weights into a file beside the model. Raises OSError,
    and TrainError if such a file is missing or too short."""
    content = path.read_bytes()
    if b"location" not in content:  # tensors in another file have the key `location`
        return content
    model = parsed(str(path), content)
    of_nodes = (attribute.t for node in model.graph.node for attribute in node.attribute)
    elsewhere = [tensor for tensor in (*model.graph.initializer, *of_nodes) if tensor.external_data]
    with damage_of(str(path)):
        for tensor in elsewhere:
            _take_in(path, tensor)
        return bytes(model.SerializeToString()) if elsewhere else content


def _take_in(path: Path, tensor: Any) -> None:
    """Read a tensor's bytes from the tensor's external file into the tensor."""
    about = {entry.key: entry.value for entry in tensor.external_data}
    name, offset = about.get("location", ""), int(about.get("offset", 0))
    num_bytes = math.prod(tensor.dims) * _item_bytes(tensor)
    if not name or min(offset, *tensor.dims, 0) < 0 or int(about.get("length", num_bytes)) != num_bytes:
        raise ValueError(f"its weights {tensor.name} have no valid place in another file")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise TrainError(f"{path} has weights in {name}, outside its folder: write the model again, with its weights "
                         "beside it or inside")
    beside = path.parent / name
    try:
        with beside.open("rb") as file:
            if file.seek(0, os.SEEK_END) < offset + num_bytes:
                raise TrainError(f"{beside} is too short for the weights {tensor.name} of {path.name}: copy or write "
                                 "both files again")
            file.seek(offset)
            tensor.raw_data = file.read(num_bytes)
    except (FileNotFoundError, IsADirectoryError):
        raise TrainError(f"{path} has its weights in {name}, which is not beside it: copy that file there too"
                         ) from None
    except OSError as error:
        raise TrainError(f"{path} has its weights in {beside}, which cannot be read ({error.strerror}): check its "
                         "permissions") from None
    tensor.data_location = tensor.DEFAULT
    del tensor.external_data[:]


def _item_bytes(tensor: Any) -> int:
    from onnx import helper

    return int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def parsed(file: str, content: bytes) -> Any:
    """The `onnx.ModelProto` of a file. Raises TrainError if the file is damaged, or the package onnx is missing."""
    try:
        import onnx
    except ImportError:
        raise TrainError(f"{file} needs the package onnx: run make setup, or pip install onnx") from None
    if not content:
        raise TrainError(f"{file} is empty: fetch or write it again")
    with damage_of(file):
        return onnx.load_model_from_string(content)


def damage_of(file: str) -> contextlib.AbstractContextManager[None]:
    """A context in which any exception that the content of the file causes becomes a TrainError."""
    return content_of_file(lambda reason: f"{file} is not a complete ONNX file ({reason}): write it again")


def read(file: str, content: bytes) -> Read:
    """The network of an ONNX file, whose weights are all in `content`. Raises TrainError if the file is damaged, if its
    opset is before 7, or if it has operators or attributes that this program lacks; the message names their nodes.
    """
    model = parsed(file, content)
    with damage_of(file):
        if not model.opset_import:
            raise ValueError("it does not say its opset")
    opset = max((each.version for each in model.opset_import if each.domain in DEFAULT_DOMAINS), default=FIRST_OPSET)
    if opset < FIRST_OPSET:
        raise TrainError(f"{file} has opset {opset}, and this program reads opset {FIRST_OPSET} or later: export it "
                         f"again, or convert it with onnx.version_converter.convert_version(model, {NEW_OPSET})")
    with contextlib.suppress(Exception):  # of an invalid node, which is named when it is read
        from onnx import shape_inference

        model = shape_inference.infer_shapes(model)
    try:
        return _Reader(file, model).read()
    except GraphError as error:
        raise TrainError(f"{file}: {error}") from None


class _Reader:
    """One model that is being read. `tensors`: the graph's tensor for each value of the model; `constants`: the values
    that are constants.
    """

    def __init__(self, file: str, model: Any) -> None:
        self.file, self.model = file, model
        self.constants = {tensor.name: _array(tensor) for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and node.output:
                self.constants[node.output[0]] = _constant(node)
            # exporters write equal weights once, and refer to them by Identity
            elif node.op_type == "Identity" and node.input[0] in self.constants:
                self.constants[node.output[0]] = self.constants[node.input[0]]
        self.shapes = {value.name: [dim.dim_value if dim.HasField("dim_value") else None
                                    for dim in value.type.tensor_type.shape.dim]
                       for value in (*model.graph.value_info, *model.graph.input, *model.graph.output)
                       if value.type.tensor_type.HasField("shape")}
        self.tensors: dict[str, Ref] = {}
        self.nodes: dict[str, Node] = {}
        self.weights: Weights = {}

    def read(self) -> Read:
        outputs = self.model.graph.output
        inputs = [each.name for each in self.model.graph.input if each.name not in self.constants]
        if len(inputs) != 1 or len(outputs) != 1:
            raise GraphError(f"it has {len(inputs)} inputs and {len(outputs)} outputs: a network for images has one of "
                             "each")
        needed = self._needed(outputs[0].name)
        known = {"Constant", *OPERATORS}
        for node in needed:
            shown = f"{node.op_type} ({node.name or node.output[0]})"
            if node.domain not in DEFAULT_DOMAINS:
                raise GraphError(f"the operator {shown} belongs to {node.domain}, and this program reads ONNX's own "
                                 "operators alone: export the model without a runtime's optimisations or extensions")
            if node.op_type not in known:
                raise GraphError(f"this program does not read the operator {shown}: use only "
                                 f"{', '.join(sorted(OPERATORS))}; or add the operator ({plugins.WALKS})")
        size = self._size(inputs[0])
        self.tensors[inputs[0]] = self._images(inputs[0], needed)
        for node in needed:
            if not {*node.output} & (self.constants.keys() | self.tensors.keys()):
                with refused_as(partial(self._refusal, node)):
                    results = OPERATORS[node.op_type](self, Call(self, node))
                found = [results] if isinstance(results, Ref) else results
                self.tensors |= dict(zip(node.output, found, strict=False))
        if outputs[0].name not in self.tensors:
            raise GraphError("its output is a constant: it has no network")
        graph = Graph(self.nodes.values(), [self.tensors[outputs[0].name]])
        return Read(graph, {name: self.weights[name] for name in graph.variables if name != "data"},
                    size)

    def _refusal(self, node: Any, error: Exception) -> GraphError:
        """The error of a node that cannot be read: what ONNX's checker says of it, or else the exception."""
        from onnx import checker

        context = checker.C.CheckerContext()
        context.ir_version = self.model.ir_version
        context.opset_imports = {each.domain: each.version for each in self.model.opset_import}
        try:
            checker.check_node(node, context)
            why = reason(error)
        except Exception as invalid:
            why = reason(invalid).rstrip(".")
        return GraphError(f"{node.op_type} '{node.name or node.output[0]}' cannot be read ({why}): check its inputs "
                          "and attributes, or export the model again")

    def _needed(self, output: str) -> list[Any]:
        """The nodes on which the output depends, in order, without nodes that only compute the shape of a Reshape."""
        makers = {name: node for node in self.model.graph.node for name in node.output}
        names, found = [output], set()
        while names:
            node = makers.get(names.pop())
            if node is not None and id(node) not in found:
                found.add(id(node))
                is_flatten = node.op_type == "Reshape" and self.rank(node.output[0]) == 2
                names += node.input[:1] if is_flatten else node.input
        return [node for node in self.model.graph.node if id(node) in found]

    def _size(self, data: str) -> int:
        if data not in self.shapes:
            raise GraphError(f"its input {data} has no shape: export the model with the shape (N, 3, size, size), in "
                             "which N may be left open")
        lengths = {length or 0 for length in self.shapes[data][1:]} - {3}
        if self.rank(data) != 4 or len(lengths) > 1:
            raise GraphError(f"its input {data} has the shape {self.shapes[data]}: a network for images reads "
                             "(N, 3, size, size)")
        return lengths.pop() if lengths else 0

    def _images(self, name: str, needed: list[Any]) -> Ref:
        """The images of the model, from the network's `data` in NHWC. The images are in NCHW, the layout of ONNX's
        operators, unless their shape, or a transpose before these operators, shows another layout.
        """
        data, shape = self.put(Node(VARIABLE, "data")), self.shapes[name]
        readers = [node for node in needed if name in node.input]
        is_transposed = all(Call(self, node).attrs.get("perm") == [0, 3, 1, 2] for node in readers)
        if shape[1] != 3 and (shape[3] == 3 or is_transposed):
            return data
        return self.add("transpose", "data_nchw", [data], axes=(0, 3, 1, 2))

    def rank(self, name: str) -> int | None:
        """How many dimensions a value has; None: not known."""
        if name in self.constants:
            return int(self.constants[name].ndim)
        return len(self.shapes[name]) if name in self.shapes else None


    def add(self, op: str, name: str, inputs: Sequence[Ref], **attrs: Any) -> Ref:
        """Add a node to the graph, and return its output."""
        return self.put(Node(op, unused_name(name, self.nodes), tuple(inputs), attrs))

    def parameter(self, name: str, array: np.ndarray) -> Ref:
        """Add a variable with its value, and return its output."""
        ref = self.put(Node(VARIABLE, unused_name(name, self.nodes)))
        self.weights[ref.node] = np.ascontiguousarray(array, np.float32)
        return ref

    def put(self, node: Node) -> Ref:
        self.nodes[node.name] = node
        return Ref(node.name)


class Call:
    """A node of the model, with its inputs and attributes."""

    def __init__(self, reader: _Reader, node: Any) -> None:
        from onnx import helper

        self.reader, self.node, self.op = reader, node, node.op_type
        self.attrs = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        self.shown = node.name or node.output[0]
        self.name = _plain_name(self.shown)

    def error(self, sentence: str) -> GraphError:
        return GraphError(f"{self.op} '{self.shown}' {sentence}")

    def has(self, place: int) -> bool:
        """Whether the node has an input at this position."""
        return place < len(self.node.input) and bool(self.node.input[place])

    def tensor(self, place: int) -> Ref:
        """An input that the network computes."""
        name = self.node.input[place]
        if name not in self.reader.tensors:
            what = f"the constant {name}" if name in self.reader.constants else f"{name or 'nothing'}"
            raise self.error(f"reads {what} as its input {place}, which must be computed before it from the images")
        return self.reader.tensors[name]

    def is_constant(self, place: int) -> bool:
        return self.node.input[place] in self.reader.constants

    def constant(self, place: int) -> np.ndarray:
        """An input that is a constant array."""
        name = self.node.input[place]
        if name not in self.reader.constants:
            raise self.error(f"reads {name} as its input {place}, which must be a constant of the file")
        return self.reader.constants[name]

    def value(self, place: int, attribute: str, default: Any) -> Any:
        """The value of an input that is an attribute in older versions of the operator."""
        if self.has(place):
            found = self.constant(place)
            return found.item() if found.size == 1 and not isinstance(default, tuple) else tuple(found.tolist())
        return self.attrs.get(attribute, default)

    def layer(self, weight: int) -> str:
        """The name of a layer: its weight's name, if an exporter has kept it, or the node's name."""
        name = re.sub(r"[._]weight$", "", self.node.input[weight])
        return _plain_name(name) if name != self.node.input[weight] else self.name

    def require(self, attribute: str, *allowed: Any, default: Any = None) -> None:
        """Raise GraphError unless an attribute has one of these values."""
        value = self.attrs.get(attribute, default)
        value = value.decode() if isinstance(value, bytes) else value
        if value not in allowed:
            raise self.error(f"has {attribute}={value}, which this program does not have: it must be "
                             f"{' or '.join(map(str, allowed))}")

    def window(self) -> dict[str, Any]:
        """Kernel, stride and padding of a convolution or pooling, as MXNet's attributes."""
        kernel = tuple(self.attrs.get("kernel_shape") or self.constant(1).shape[2:])
        strides, pads = self.attrs.get("strides", [1, 1]), self.attrs.get("pads", [0, 0, 0, 0])
        if len(kernel) != 2:
            raise self.error(f"has kernel_shape={kernel}: only two dimensions are supported")
        dilations = self.attrs.get("dilations", [1, 1])
        for name, values, count in (("strides", strides, 2), ("dilations", dilations, 2), ("pads", pads, 4)):
            if len(values) != count or min(values) < (name != "pads"):
                raise self.error(f"has {name}={[*values]}, which is not valid for two dimensions: export the model "
                                 "again")
        auto = self.attrs.get("auto_pad", b"NOTSET").decode()
        if auto.startswith("SAME") and [*strides] == [1, 1] and all(size % 2 for size in kernel):
            pads = [size // 2 for size in kernel] * 2
        elif auto not in ("NOTSET", "VALID"):
            raise self.error(f"has auto_pad={auto} with a kernel of {kernel} and strides of {strides}, which pads one "
                             "side more than the other: write the model with equal pads")
        if [*pads[:2]] != [*pads[2:]]:
            raise self.error(f"has pads={[*pads]}, which differ between the sides: write the model with equal pads")
        return {"kernel": kernel, "stride": tuple(strides), "pad": tuple(pads[:2])}


def _plain_name(name: str) -> str:
    """The name, reduced to the characters that checkpoints allow in names of arrays: letters, digits, '.' and '_'."""
    return re.sub(r"[^\w.]+", "_", name).strip("_.") or "node"


def _array(tensor: Any) -> np.ndarray:
    from onnx import numpy_helper

    with refused_as(lambda error: GraphError(f"its tensor {tensor.name} is damaged ({reason(error)}): write or fetch "
                                             "the model again")):
        return numpy_helper.to_array(tensor)


def _constant(node: Any) -> np.ndarray:
    from onnx import helper

    kinds = [attribute.name for attribute in node.attribute]
    if kinds == ["value"]:
        return _array(node.attribute[0].t)
    if kinds not in (["value_float"], ["value_floats"], ["value_int"], ["value_ints"]):
        raise GraphError(f"Constant '{node.output[0]}' has {' and '.join(kinds) or 'no value'}: only a dense tensor or "
                         "numbers are supported")
    return np.asarray(helper.get_attribute_value(node.attribute[0]))


# --- one row per operator ---

Row = Callable[[_Reader, Call], Any]  # returns a Ref, or one Ref for each output


def _conv(reader: _Reader, call: Call) -> Ref:
    weight, layer = call.constant(1), call.layer(1)
    if weight.ndim != 4 or call.attrs.get("group", 1) < 1:
        raise call.error(f"has weights of the shape {weight.shape} and group={call.attrs.get('group', 1)}: only two "
                         "dimensions, and a group of at least 1, are supported")
    bias = [reader.parameter(f"{layer}_bias", call.constant(2))] if call.has(2) else []
    return reader.add("Convolution", layer, [call.tensor(0), reader.parameter(f"{layer}_weight", weight), *bias],
                      num_filter=len(weight), num_group=call.attrs.get("group", 1), no_bias=not bias, layout="NCHW",
                      dilate=tuple(call.attrs.get("dilations", (1, 1))), **call.window())


def _dense(reader: _Reader, call: Call, weight: np.ndarray, bias: np.ndarray | None) -> Ref:
    """A fully connected layer; `weight` has the shape (inputs, outputs)."""
    if weight.ndim != 2:
        raise call.error(f"has weights of the shape {weight.shape}, where a fully connected layer has two dimensions")
    layer = call.layer(1)
    of_bias = [] if bias is None else [reader.parameter(
        f"{layer}_bias", np.broadcast_to(bias, (1, weight.shape[1])).reshape(-1))]
    is_flat = reader.rank(call.node.input[0]) in (2, None)
    return reader.add("FullyConnected", layer,
                      [call.tensor(0), reader.parameter(f"{layer}_weight", weight.T), *of_bias],
                      num_hidden=weight.shape[1], no_bias=bias is None, flatten=is_flat)


def _gemm(reader: _Reader, call: Call) -> Ref:
    call.require("transA", 0, default=0)
    weight = call.constant(1).T if call.attrs.get("transB", 0) else call.constant(1)
    bias = call.constant(2) * call.attrs.get("beta", 1.0) if call.has(2) else None
    return _dense(reader, call, weight * np.float32(call.attrs.get("alpha", 1.0)), bias)


def _batch_norm(reader: _Reader, call: Call) -> Ref:
    call.require("training_mode", 0, default=0)
    call.require("spatial", 1, default=1)  # until opset 8
    layer = call.layer(1)
    arrays = dict(zip(("gamma", "beta", "moving_mean", "moving_var"), map(call.constant, range(1, 5)), strict=True))
    inputs = [reader.parameter(f"{layer}_{name}", array) for name, array in arrays.items()]
    return reader.add("BatchNorm", layer, [call.tensor(0), *inputs], axis=1, fix_gamma=False,
                      eps=call.attrs.get("epsilon", 1e-5), momentum=call.attrs.get("momentum", 0.9))


def _layer_norm(reader: _Reader, call: Call) -> Ref:
    axis, rank = call.attrs.get("axis", -1), reader.rank(call.node.input[0])
    if axis not in (-1, rank and rank - 1):
        raise call.error(f"has axis={axis}: only the last dimension is supported")
    gamma = call.constant(1)
    beta, layer = call.constant(2) if call.has(2) else np.zeros_like(gamma), call.layer(1)
    inputs = [reader.parameter(f"{layer}_gamma", gamma), reader.parameter(f"{layer}_beta", beta)]
    return reader.add("LayerNorm", layer, [call.tensor(0), *inputs], axis=-1, eps=call.attrs.get("epsilon", 1e-5))


def _one(op: str, **attrs: Any) -> Row:
    return lambda reader, call: reader.add(op, call.name, [call.tensor(0)], **attrs)


def _leaky(kind: str, attribute: str = "", default: float = 0.0) -> Row:
    return lambda reader, call: reader.add("LeakyReLU", call.name, [call.tensor(0)], act_type=kind,
                                           **{"slope": call.attrs.get(attribute, default)} if attribute else {})


def _selu(reader: _Reader, call: Call) -> Ref:
    for name, value in (("alpha", 1.6732632), ("gamma", 1.0507009)):
        if not math.isclose(call.attrs.get(name, value), value, rel_tol=1e-5):
            raise call.error(f"has {name}={call.attrs[name]:g}: only {value} is supported")
    return reader.add("LeakyReLU", call.name, [call.tensor(0)], act_type="selu")


def _gelu(reader: _Reader, call: Call) -> Ref:
    call.require("approximate", "none", default="none")
    return reader.add("LeakyReLU", call.name, [call.tensor(0)], act_type="gelu")


def _prelu(reader: _Reader, call: Call) -> Ref:
    slopes, shape = call.constant(1), reader.shapes.get(call.node.input[0]) or []
    channels = shape[1] if len(shape) > 1 else None
    if slopes.size == 1 and channels:  # one slope for all channels: repeated for each channel
        slopes = np.full(channels, slopes.item())
    elif (1,) * (len(shape) - slopes.ndim) + slopes.shape != (1, channels, *(1,) * (len(shape) - 2)):
        raise call.error(f"has slopes of the shape {slopes.shape}: give one slope for each channel")
    gamma = reader.parameter(f"{call.name}_gamma", slopes.reshape(-1))
    return reader.add("LeakyReLU", call.name, [call.tensor(0), gamma], act_type="prelu")


def _clip(reader: _Reader, call: Call) -> Ref:
    low, high = call.value(1, "min", -FLOAT_LIMIT), call.value(2, "max", FLOAT_LIMIT)
    return reader.add("clip", call.name, [call.tensor(0)], a_min=float(low), a_max=float(high))


def _hard_sigmoid(reader: _Reader, call: Call) -> Ref:
    return reader.add("hard_sigmoid", call.name, [call.tensor(0)], alpha=call.attrs.get("alpha", 0.2),
                      beta=call.attrs.get("beta", 0.5))


def _hard_swish(reader: _Reader, call: Call) -> Ref:
    gate = reader.add("hard_sigmoid", f"{call.name}_gate", [call.tensor(0)], alpha=1 / 6, beta=0.5)
    return reader.add("elemwise_mul", call.name, [call.tensor(0), gate])


_WITH_NUMBER = {"Add": "_plus_scalar", "Mul": "_mul_scalar", "Sub": "_minus_scalar", "Div": "_div_scalar"}


def _arithmetic(reader: _Reader, call: Call) -> Ref:
    """Sums and products of two tensors, or of a tensor and a number. A sum may also be the bias of a MatMul."""
    places = [place for place in (0, 1) if call.is_constant(place)]
    if not places:
        return _of_tensors(reader, call)
    if len(places) == 2 or (places == [0] and call.op in ("Sub", "Div")):
        raise call.error("has a constant as its first input, which this program does not have")
    number, data = call.constant(places[0]), call.tensor(1 - places[0])
    if number.size == 1:
        return reader.add(_WITH_NUMBER[call.op], call.name, [data], scalar=number.item())
    dense = reader.nodes[data.node]
    if call.op == "Add" and dense.op == "FullyConnected" and dense["no_bias"] and number.size == number.shape[-1] == (
            dense["num_hidden"]):
        # a new layer with the weight of the MatMul: other nodes may read the product without the bias; if none does,
        # the old layer is left out
        bias = reader.parameter(f"{dense.name}_bias", number.reshape(-1))
        return reader.add("FullyConnected", call.name, (*dense.inputs, bias), **{**dense.attrs, "no_bias": False})
    raise call.error(f"has a constant of the shape {number.shape}: only single numbers and biases are supported")


def _of_tensors(reader: _Reader, call: Call) -> Ref:
    if call.op not in ("Add", "Mul"):
        raise call.error("of two tensors is not supported: only Add and Mul are")
    shapes = [reader.shapes.get(name) for name in call.node.input]
    ops = ("elemwise_add", "broadcast_add") if call.op == "Add" else ("elemwise_mul", "broadcast_mul")
    return reader.add(ops[shapes[0] != shapes[1]], call.name, [call.tensor(0), call.tensor(1)])


def _slice(reader: _Reader, call: Call) -> Ref:
    starts, ends = (call.value(place, name, ()) for place, name in ((1, "starts"), (2, "ends")))
    starts, ends = (value if isinstance(value, (tuple, list)) else (value,) for value in (starts, ends))
    if not starts or len(starts) != len(ends):
        raise call.error(f"has starts={starts} and ends={ends}: it needs as many of both")
    axes = call.value(3, "axes", tuple(range(len(starts))))
    steps = call.value(4, "steps", (1,) * len(starts))
    if any(step != 1 for step in steps):
        raise call.error(f"has steps={steps}: only 1 is supported")
    data = call.tensor(0)
    for number, (axis, begin, end) in enumerate(zip(axes, starts, ends, strict=True)):
        name = call.name if number == len(axes) - 1 else f"{call.name}_{number}"
        data = reader.add("slice_axis", name, [data], axis=axis, begin=begin, end=None if end >= 2**31 - 1 else end)
    return data


def _split(reader: _Reader, call: Call) -> list[Ref]:
    axis, count = call.attrs.get("axis", 0), len(call.node.output)
    parts = call.value(1, "split", ())
    if not parts:
        whole = (reader.shapes.get(call.node.input[0]) or [])[axis:][:1]
        if not whole or not whole[0] or whole[0] % count:
            raise call.error("splits a dimension whose length is not known: write the model with the lengths")
        parts = (whole[0] // count,) * count
    ends = np.cumsum(parts).tolist()
    return [reader.add("slice_axis", f"{call.name}_{number}", [call.tensor(0)], axis=axis, begin=end - part, end=end)
            for number, (part, end) in enumerate(zip(parts, ends, strict=True))]


def _pool(kind: str) -> Row:
    def row(reader: _Reader, call: Call) -> Ref:
        if {*call.attrs.get("dilations", (1,))} != {1}:
            raise call.error(f"has dilations={[*call.attrs['dilations']]}: only 1 is supported")
        call.require("storage_order", 0, default=0)
        more = {"count_include_pad": bool(call.attrs.get("count_include_pad", 0))} if kind == "avg" else {}
        return reader.add("Pooling", call.name, [call.tensor(0)], pool_type=kind, layout="NCHW",
                          pooling_convention="full" if call.attrs.get("ceil_mode", 0) else "valid",
                          **call.window(), **more)

    return row


def _global_pool(kind: str) -> Row:
    return _one("Pooling", pool_type=kind, global_pool=True, kernel=(1, 1), layout="NCHW")


def _mean(reader: _Reader, call: Call) -> Ref:
    axes = call.value(1, "axes", ())
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    if not axes:
        raise call.error("is over all dimensions: only means over height and width are supported")
    if {0, -(reader.rank(call.node.input[0]) or 0)} & {*axes}:
        raise call.error("is over the images of a batch: an image's scores must not depend on others")
    return reader.add("mean", call.name, [call.tensor(0)], axis=axes, keepdims=bool(call.attrs.get("keepdims", 1)))


def _to_rows(reader: _Reader, call: Call) -> Ref:
    """Flatten, Squeeze and Reshape, to (N, values); or a Reshape to a shape that the file states."""
    if call.op == "Flatten":
        call.require("axis", 1, default=1)
    if call.op == "Flatten" or reader.rank(call.node.output[0]) == 2:
        return reader.add("Flatten", call.name, [call.tensor(0)])
    if call.op == "Squeeze":
        raise call.error("does not leave (N, values): only that is supported")
    shape = tuple(int(size) for size in call.constant(1))
    return reader.add("Reshape", call.name, [call.tensor(0)], shape=(0, *shape[1:]))


def _dropout(reader: _Reader, call: Call) -> Ref:
    return reader.add("Dropout", call.name, [call.tensor(0)], p=float(call.value(1, "ratio", 0.5)))


def _softmax(reader: _Reader, call: Call) -> Ref:
    rank = reader.rank(call.node.input[0])
    if call.node.output[0] != reader.model.graph.output[0].name:
        raise call.error("is not the model's last operator: only there is a softmax supported")
    call.require("axis", -1, 1, rank and rank - 1, default=-1)
    return call.tensor(0)


def _same(reader: _Reader, call: Call) -> Ref:
    return call.tensor(0)


def _cast(reader: _Reader, call: Call) -> Ref:
    call.require("to", 1)  # the type must be float32, the type of the network's tensors
    return call.tensor(0)


def _transpose(reader: _Reader, call: Call) -> Ref:
    return reader.add("transpose", call.name, [call.tensor(0)], axes=tuple(call.attrs.get("perm", ())))


_NOT_OF_A_GELU = "is not part of a GELU, x * (1 + erf(x / sqrt(2))) * 0.5: only that is supported"


def _erf(reader: _Reader, call: Call) -> Ref:
    """GELU as exporters of older opsets write it: x / sqrt(2), Erf, + 1, * x, * 0.5, the products in any order."""
    source = reader.nodes[call.tensor(0).node]
    factor = {"_div_scalar": math.sqrt(2), "_mul_scalar": math.sqrt(0.5)}.get(source.op, 0.0)
    if not math.isclose(source.get("scalar", -1.0) or -1.0, factor, rel_tol=1e-4):
        raise call.error("is not part of a GELU, which reads x / sqrt(2): only that is supported")
    x = source.inputs[0]
    readers: dict[str, list[Any]] = {}
    for node in reader.model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for output in reader.model.graph.output:
        readers.setdefault(output.name, []).append(None)

    def step(name: str, op: str) -> tuple[Any, str]:
        """The only node that reads a value, and the other value that this node reads."""
        if len(found := readers.get(name, [])) != 1 or found[0] is None or found[0].op_type != op:
            raise call.error(_NOT_OF_A_GELU)
        return found[0], next(each for each in found[0].input if each != name)

    def is_number(name: str, value: float) -> bool:
        constant = reader.constants.get(name)
        return constant is not None and constant.size == 1 and math.isclose(constant.item(), value, rel_tol=1e-6)

    added, one = step(call.node.output[0], "Add")
    product, other = step(added.output[0], "Mul")
    last = product
    if is_number(other, 0.5) or reader.tensors.get(other) == x:
        last, other_of_last = step(product.output[0], "Mul")
        is_gelu = {is_number(other, 0.5), is_number(other_of_last, 0.5)} == {True, False} and x in (
            reader.tensors.get(other), reader.tensors.get(other_of_last))
    else:  # the factor is x * 0.5
        half = reader.nodes[reader.tensors[other].node] if other in reader.tensors else source
        is_gelu = half.op == "_mul_scalar" and half["scalar"] == 0.5 and half.inputs[0] == x
    if not (is_number(one, 1.0) and is_gelu):
        raise call.error(_NOT_OF_A_GELU)
    gelu = reader.add("LeakyReLU", call.name, [x], act_type="gelu")
    reader.tensors |= {node.output[0]: gelu for node in (added, product, last)}
    return gelu


OPERATORS: Mapping[str, Row] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": lambda reader, call: _dense(reader, call, call.constant(1), None),
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "Relu": _one("Activation", act_type="relu"),
    "Sigmoid": _one("Activation", act_type="sigmoid"),
    "Tanh": _one("Activation", act_type="tanh"),
    "Softplus": _one("Activation", act_type="softrelu"),
    "Softsign": _one("Activation", act_type="softsign"),
    "Clip": _clip,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "LeakyRelu": _leaky("leaky", "alpha", 0.01),
    "Elu": _leaky("elu", "alpha", 1.0),
    "Selu": _selu,
    "Gelu": _gelu,
    "Erf": _erf,
    "PRelu": _prelu,
    **dict.fromkeys(_WITH_NUMBER, _arithmetic),
    "Concat": lambda reader, call: reader.add("Concat", call.name, [*map(call.tensor, range(len(call.node.input)))],
                                              num_args=len(call.node.input), dim=call.attrs["axis"]),
    "Slice": _slice,
    "Split": _split,
    "MaxPool": _pool("max"),
    "AveragePool": _pool("avg"),
    "GlobalMaxPool": _global_pool("max"),
    "GlobalAveragePool": _global_pool("avg"),
    "ReduceMean": _mean,
    **dict.fromkeys(("Flatten", "Squeeze", "Reshape"), _to_rows),
    "Transpose": _transpose,
    "Dropout": _dropout,
    "Softmax": _softmax,
    "Identity": _same,
    "Cast": _cast,
}
