"""The memory layout of images: NHWC (channels last) to NCHW (channels first) and back."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import BATCH_NORMS, channel_axis, window

# layout -> axes of the transpose from the other layout; weights likewise
_AXES = {"NCHW": (0, 3, 1, 2), "NHWC": (0, 2, 3, 1)}
# Operators that treat every element alike, or that work along a dimension whose number depends on the layout.
_ELEMENTWISE = ("Activation", "relu", "elemwise_add", "AddRelu", "clip", "_copy", "BlockGrad", "sigmoid", "tanh",
                "softsign", "hard_sigmoid", "elemwise_mul", "_plus_scalar", "_minus_scalar", "_mul_scalar",
                "_div_scalar")
_BROADCAST = ("broadcast_mul", "broadcast_add")
_AXIS = {"Concat": "dim", "slice_axis": "axis", "LayerNorm": "axis"}  # operator -> its attribute that is a dimension


def layout(graph: Graph, to: str, inputs: Sequence[str] = ()) -> Graph:
    """Convert convolutions, poolings and batch norms to the layout `to`, "NCHW" or "NHWC".

        before    data (NHWC) -> Convolution(layout=NHWC), weight OHWI -> BatchNorm(axis=3) -> ... -> Pooling(NHWC)
        after     data (NHWC) -> transpose -> Convolution(layout=NCHW), weight OIHW -> BatchNorm(axis=1) -> ...

    The weights change their layout (`weight_layouts` returns it), and so do the graph's inputs named by `inputs`, if
    they are read in the other layout. Other inputs keep their layout. Elementwise operators follow their inputs, and so
    do operators along a dimension, such as Concat and LayerNorm. A tensor of one pixel (after global pooling) can be
    flattened without conversion. So a residual network gets one transpose, at its data, or none with `inputs=["data"]`.
    If no operator determines the layout of an input, the input counts as being in the other layout. All other operators
    get their inputs in the original layout.

    Raises GraphError for an unknown layout or input.
    """
    if to not in _AXES:
        raise GraphError(f"there is no layout '{to}': choose {' or '.join(_AXES)}")
    for name in inputs:
        if name not in graph.arguments:
            raise GraphError(f"the graph has no input '{name}' to convert to {to}: name one that it has")
    return _Conversion(graph, to, inputs).run()


def reading_nhwc(graph: Graph, default: str) -> Graph:
    """The graph with images, `data`, in NHWC: through a transpose if the graph's operators read images in NCHW.
    `default`: the layout of the images if no operator that reads them determines it. A fully connected layer reads the
    pixels in either order, so it does not show the layout.
    """
    if _layout_of(graph, "data", default) == "NHWC":
        return graph
    images = Node("transpose", graph.unused_name("data_nchw"), (Ref("data"),), {"axes": _AXES["NCHW"]})
    return graph.replace([images], {Ref("data"): Ref(images.name)})


def _layout_of(graph: Graph, images: str, default: str) -> str:
    """The layout of the first operator that reads the images and has a layout."""
    reached = {images}
    for node in graph:
        if not any(ref.node in reached for ref in node.inputs):
            continue
        if node.op in ("Convolution", "Pooling"):
            return str(node["layout"])
        if node.op in BATCH_NORMS:
            return "NCHW" if node["axis"] == 1 else "NHWC"
        for layout, axes in _AXES.items():
            if node.op == "transpose" and node["axes"] == axes:
                return "NHWC" if layout == "NCHW" else "NCHW"
        if node.op not in ("Flatten", "FullyConnected", "Reshape", "transpose"):
            reached.add(node.name)
    return default


def weight_layouts(graph: Graph) -> dict[str, str]:
    """Layout of every variable that is a convolution's weight, by name: "OIHW" or "OHWI"."""
    return {
        node.inputs[1].node: "OIHW" if node["layout"] == "NCHW" else "OHWI"
        for node in graph
        if node.op == "Convolution" and graph[node.inputs[1].node].is_variable
    }


def _makes_vector(node: Node) -> bool:
    return node.op == "Reshape" and len(node["shape"]) == 4 and sum(size != 1 for size in node["shape"]) == 1


class _Conversion:
    """One run of the pass. Records for every tensor the layouts in which the tensor exists."""

    def __init__(self, graph: Graph, to: str, inputs: Sequence[str]) -> None:
        self.graph, self.inputs = graph, inputs
        self.to, self.origin = to, next(name for name in _AXES if name != to)
        self.nodes: list[Node] = []
        self.converted: dict[Ref, Ref] = {}  # tensor of the graph -> the tensor in the layout `to`
        self.restored: dict[Ref, Ref] = {}  # tensor that exists only converted -> the tensor in the original layout
        self.one_pixel: set[Ref] = set()  # converted tensors of height and width 1

    def run(self) -> Graph:
        for node in self.graph:
            self.nodes.append(self._rebuild(node))
        outputs = [self._original(ref) for ref in self.graph.outputs]
        return Graph(self.nodes, outputs, self.graph.attrs)

    def _rebuild(self, node: Node) -> Node:
        if node.is_variable:
            return self._variable(node) if self._is_weight(node) or self._is_input(node) else node
        result = Ref(node.name)
        # the input of the transpose has the new layout already
        if node.op == "transpose" and node["axes"] == _AXES[self.origin]:
            source = self._original(node.inputs[0])
            self.converted[result] = source
            return node.replace(inputs=(source,))
        is_converted = [ref in self.converted for ref in node.inputs]
        if node.op in ("Convolution", "Pooling") and self._is_to_convert(node):
            inputs = (*map(self._convert, node.inputs[:2]), *node.inputs[2:])  # data and weight, but not the bias
            self.converted[result] = result
            if self._makes_one_pixel(node):
                self.one_pixel.add(result)
            return node.with_attrs(layout=self.to).replace(inputs=inputs)
        if node.op in BATCH_NORMS and is_converted[0] and self._is_to_convert(node):
            inputs = (self._convert(node.inputs[0]), *node.inputs[1:5], *map(self._convert, node.inputs[5:]))
            self.converted[result] = result
            return node.with_attrs(axis=channel_axis(self.to)).replace(inputs=inputs)
        if node.op in _AXIS and is_converted[0]:
            self.converted[result] = result
            images = node.inputs[:1] if node.op == "LayerNorm" else node.inputs
            if all(self._convert(ref) in self.one_pixel for ref in images):
                self.one_pixel.add(result)
            inputs = (*map(self._convert, images), *node.inputs[len(images):])
            return node.with_attrs(**{_AXIS[node.op]: self._moved(node[_AXIS[node.op]])}).replace(inputs=inputs)
        if node.op == "mean" and is_converted[0] and self._is_over_pixels(node):
            if node["keepdims"]:
                self.converted[result] = result
                self.one_pixel.add(result)
            axes = tuple(sorted(map(self._moved, node["axis"])))
            return node.with_attrs(axis=axes).replace(inputs=(self._convert(node.inputs[0]),))
        if node.op == "reverse" and is_converted[0]:
            self.converted[result] = result
            axes = tuple(sorted(map(self._moved, node["axis"])))
            return node.with_attrs(axis=axes).replace(inputs=(self._convert(node.inputs[0]),))
        if node.op in _BROADCAST and any(is_converted) and all(map(self._is_image, node.inputs)):
            self.converted[result] = result
            return node.replace(inputs=tuple(map(self._convert, node.inputs)))
        if self._is_elementwise(node) and any(is_converted):
            self.converted[result] = result
            if all(ref in self.one_pixel for ref in node.inputs):
                self.one_pixel.add(result)
            return node.replace(inputs=tuple(self._convert(ref) for ref in node.inputs))
        if node.op == "DropoutImages" and is_converted[0]:
            self.converted[result] = result
            return node.replace(inputs=(self._convert(node.inputs[0]), node.inputs[1]))
        flattens = node.op == "Flatten" or (node.op == "FullyConnected" and node["flatten"])
        if flattens and node.inputs[0] in self.one_pixel:
            return node
        return node.replace(inputs=tuple(self._original(ref) for ref in node.inputs))

    def _is_image(self, ref: Ref) -> bool:
        """Whether a tensor has the dimensions of images, or has been converted."""
        node = self.graph[ref.node]
        return ref in self.converted or (node.op == "Reshape" and len(node["shape"]) == 4)

    def _makes_one_pixel(self, node: Node) -> bool:
        """Whether the node's output has one pixel: a global pooling, or a product of a one-pixel tensor with every
        weight.
        """
        if node.op == "Pooling":
            return bool(node["global_pool"])
        return self._convert(node.inputs[0]) in self.one_pixel and window(node).pad == (0, 0)

    def _is_elementwise(self, node: Node) -> bool:
        """Whether the node treats each element alike, independently of the element's position."""
        if node.op == "LeakyReLU":
            return bool(node["act_type"] != "prelu")
        return node.op in _ELEMENTWISE or (node.op == "Dropout" and not node["axes"])

    def _is_over_pixels(self, node: Node) -> bool:
        """Whether the node is a mean over height and width only."""
        return {axis % 4 for axis in node["axis"]} == {0, 1, 2, 3} - {0, channel_axis(self.origin)}

    def _moved(self, axis: int) -> int:
        """The index of an image dimension in the new layout."""
        return _AXES[self.to].index(axis % 4)

    def _is_to_convert(self, node: Node) -> bool:
        """Whether the node works on images in the layout that is being replaced."""
        if node.op in ("Convolution", "Pooling"):
            return node["layout"] == self.origin
        return node.op in BATCH_NORMS and node["axis"] % 4 == channel_axis(self.origin)

    def _is_input(self, variable: Node) -> bool:
        """Whether the variable is an input that must be in the new layout, and is not yet."""
        return variable.name in self.inputs and _layout_of(self.graph, variable.name, self.origin) == self.origin

    def _is_weight(self, variable: Node) -> bool:
        """Whether the only readers of the variable are converted convolutions, which read it as their weight."""
        ref = Ref(variable.name)
        readers = self.graph.consumers.get(ref, ())
        return ref not in self.graph.outputs and all(
            node.op == "Convolution" and node["layout"] == self.origin and node.inputs.index(ref) == 1
            for node in readers
        )

    def _variable(self, variable: Node) -> Node:
        """A variable in its new layout. Only the shape hint changes here; the caller converts the values."""
        self.converted[Ref(variable.name)] = Ref(variable.name)
        shape = ast.literal_eval(variable.attrs.get("__shape__", "()"))
        if len(shape) != 4:
            return variable
        return variable.with_attrs(__shape__=str(tuple(shape[axis] for axis in _AXES[self.to])))

    def _convert(self, ref: Ref) -> Ref:
        """The tensor in the new layout, through a transpose if it does not exist in the new layout yet."""
        if ref not in self.converted:
            source = self.graph[ref.node]
            self.converted[ref] = self._reshape(source) if _makes_vector(source) else self._transpose(ref, self.to)
        return self.converted[ref]

    def _reshape(self, node: Node) -> Ref:
        """A vector along one dimension of images, such as one number for each channel, in the new layout."""
        name = self.graph.unused_name(f"{node.name}_{self.to.lower()}")
        shape = tuple(node["shape"][axis] for axis in _AXES[self.to])
        self.nodes.append(node.replace(name=name).with_attrs(shape=shape))
        return Ref(name)

    def _original(self, ref: Ref) -> Ref:
        """The tensor in its original layout."""
        if self.converted.get(ref) != ref:
            return ref
        if ref not in self.restored:
            self.restored[ref] = self._transpose(ref, self.origin)
        return self.restored[ref]

    def _transpose(self, ref: Ref, to: str) -> Ref:
        name = self.graph.unused_name(f"{ref.node}_{to.lower()}")
        self.nodes.append(Node("transpose", name, (ref,), {"axes": _AXES[to]}))
        return Ref(name)
