"""Networks from files: MXNet's Symbol JSON, as Module and Gluon export it, and ONNX models.

    python -m train --model net-symbol.json --weights net-0000.params
    python -m train --weights net.onnx                       # the network and its weights

A file counts as a plug-in with one model, whose name is that of the file (`common/plugins.py`): a run records its
digest and keeps a copy. The network's classifier gets as many classes as the run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common import plugins
from graph_passes import Graph, GraphError, Node, Ref, passes, roles
from graph_passes.operators.base import integers
from train.errors import TrainError
from train.models import onnx_reader, plugged


@dataclass(frozen=True)
class NetworkOfFile:
    """A network from a file, as `plugins.Registered.made`.

    graph: from the input `data`, images in NHWC, to the scores of the file's classes. The layer `classifier` computes
    the scores. `image_size`: pixels, height and width of the images; 0 if the file does not state the size. `weights`:
    the weights in the file, by the names of the graph's variables, in the layout of the graph.
    """

    graph: Graph
    classifier: Node
    image_size: int = 0
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __call__(self, num_classes: int) -> Graph:
        """The graph for another number of classes."""
        changed = self.classifier.with_attrs(**{plugged.COUNTS[self.classifier.op]: num_classes})
        return self.graph.replace([changed], {})

    @property
    def is_channels_first(self) -> bool:
        """Whether the file's images are NCHW, and its convolution weights OIHW."""
        return "OIHW" in passes.weight_layouts(self.graph).values()


def register(file: str, content: bytes) -> None:
    """Register the network of a file as a model. Raises UserError, naming operators and nodes, for a network that this
    program cannot train.
    """
    if not plugins.is_name(Path(file).name):
        raise TrainError(f"{file}: the name of this file becomes the network's name, which may have only letters, "
                         "digits, '_', '-' and '.': rename the file")
    made = _READERS[Path(file).suffix.lower()](file, content)
    plugged.in_our_form(file, made.graph, plugged.num_scores(made.classifier), made.image_size or plugged.SIZES[0])
    plugins.register("model", Path(file).name, made, data_file=file)


def read_json(file: str, content: bytes) -> NetworkOfFile:
    """A network in MXNet's Symbol JSON. Raises UserError."""
    try:
        graph = Graph.from_json(content.decode(), source=file)
    except UnicodeDecodeError:
        raise TrainError(f"{file} is not text, so it holds no network in MXNet's JSON: give a file of symbol.save()"
                         ) from None
    except GraphError as error:
        raise TrainError(str(error)) from None
    graph = _without_copies(plugged.without_loss(file, graph))
    plugged.check_operators(file, graph)
    try:
        shape = integers(graph["data"].attrs.get("__shape__", "()"))
    except (ValueError, SyntaxError, TypeError):
        raise TrainError(f"{file} has an invalid __shape__ for its data: write the file with symbol.save()") from None
    size = max(shape[1:], default=0)  # the other dimension is the number of colours
    is_channels_last = len(shape) == 4 and shape[3] == 3 != shape[1]
    graph = passes.reading_nhwc(graph.rewrite(_plain), default="NHWC" if is_channels_last else "NCHW")
    return NetworkOfFile(graph, plugged.classifier(file, graph), size)


def read_onnx(file: str, content: bytes) -> NetworkOfFile:
    """A network in ONNX, with its weights. Raises UserError."""
    graph, weights, size = onnx_reader.read(file, content)
    return NetworkOfFile(graph, plugged.classifier(file, graph), size, weights)


_READERS: Mapping[str, Callable[[str, bytes], NetworkOfFile]] = {".json": read_json, ".onnx": read_onnx}


def _plain(node: Node) -> Node | None:
    """Simplify a node: variables lose MXNet's notes about their former arrays, and a Reshape to (N, values) becomes a
    Flatten.
    """
    if node.is_variable:
        return node.replace(attrs={key: value for key, value in node.attrs.items() if key == roles.RATE_FACTOR})
    if node.op == "Reshape" and len(node["shape"]) == 2:  # a Reshape to (N, values)
        return Node("Flatten", node.name, node.inputs)
    return None


def _without_copies(graph: Graph) -> Graph:
    moved = {Ref(node.name): node.inputs[0] for node in graph if node.op == "_copy"}
    return graph.replace([], moved)
