"""From a graph to launches on buffers: one method per operator.

The graph is NHWC and fused (passes `layout`, `bn_relu`, `bn_add_relu`); for training it holds the backward pass too
(`gradient`, `gradient_add`), and `precision` has marked its tensors. Nodes are lowered in the graph's order, which is
the order of the launches.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from graph_passes.errors import GraphError
from graph_passes.executors.cuda import pointwise
from graph_passes.executors.cuda.convolution import Problem
from graph_passes.executors.cuda.kernels import C_TYPES
from graph_passes.executors.cuda.parameters import Parameter, ParameterStore, padded
from graph_passes.executors.cuda.planner import Decision, Way
from graph_passes.executors.cuda.pointwise import DgradReduce, NormBackward
from graph_passes.executors.cuda.program import Buffer, Launch, Program
from graph_passes.executors.cuda.statistics_group import MAX_ARRAYS, MAX_VALUES, THREADS, StatisticsGroup
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import Shape, window
from graph_passes.operators_backward import FORWARD_OF, forward_node
from graph_passes.passes import output_names, tensor_dtypes
from graph_passes.passes.precision import ITEM_BYTES

VECTOR = 8  # VEC of common.cuh
Size = tuple[int, int, int]
Buffers = tuple["Buffer | None", ...]
TILE_CHANNELS = 64  # channels that a block of batch_norm.cu works on
REDUCE_BLOCK: Size = (8, 96, 1)  # threads: vectors along the channels, rows
APPLY_BLOCK: Size = (8, 32, 1)
STEM_BLOCK: Size = (256, 1, 1)
STEM_FILTERS, STEM_SIZE, STEM_OUT_ROWS = 64, 7, 4  # FILTERS, SIZE and OUT_ROWS of stem.cu
STEM_STATIC_BYTES = 2100  # of shared memory, beside what `stem_work` says
STEM_SHARE = STEM_FILTERS * STEM_SIZE * 32  # floats of the weights' gradient that a block of stem_wgrad leaves
# How batch_norm.cu knows where ReLU let the gradient through.
_RELU = {"BatchNormBackward": "NO_RELU", "BatchNormReluBackward": "RECOMPUTED", "BatchNormAddReluBackward": "BITS"}
LAUNCH_MS = 0.003  # what a separate launch costs besides its bytes


def count(value: int) -> ctypes.c_uint32:
    """An unsigned 32-bit kernel argument."""
    return ctypes.c_uint32(value)


def stem_work(out_shape: Shape) -> tuple[int, int, int, int]:
    """How stem.cu divides an output (N, H, W, 64): items of work, tiles of 16 pixels in a row, and the bytes of shared
    memory that an item's rows of the image and of the output's gradient take."""
    images, height, width, filters = out_shape
    tiles = -(-width // 16)
    in_rows = 2 * STEM_OUT_ROWS + STEM_SIZE - 2
    return (images * -(-height // STEM_OUT_ROWS), tiles, in_rows * (16 * tiles + 3) * 16,
            STEM_OUT_ROWS * 16 * tiles * filters * 2)


class _Window(ctypes.Structure):
    """`Window` of pooling.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in (
        "height", "width", "out_height", "out_width", "kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w"))


class _Image(ctypes.Structure):
    """`Image` of batch_norm_pool.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("height", "width", "out_height", "out_width"))


@dataclass
class Persistent:
    """Buffers beside the parameters that outlive a step."""

    data: Buffer  # (N, H, W, C padded), the network's dtype
    label: Buffer  # (N,) float32
    mixup: Buffer  # float32: lambda of mixup, 1 without
    probabilities: Buffer  # (N, classes) float32
    metrics: Buffer  # softmax.cu's Metrics
    num_valid: Buffer  # int32: how many rows of the batch count
    loss_scale: Buffer  # float32, part of the optimizer's state
    tickets: Buffer  # zeros, left as zeros by every reduction


@dataclass(frozen=True)
class _Pointwise:
    """The backward pass of a BatchNorm and of the 1x1 convolution before it, as far as one launch can make it."""

    norm: Node
    wgrad: Node
    dgrad: Node
    behind: Node | None  # the BatchNormReluBackward that reads the dgrad, if its sums can be made too


def parameters_of(graph: Graph, shapes: Mapping[Ref, Shape], inputs: tuple[str, ...]) -> list[Parameter]:
    """Every parameter of a forward graph, the last layer's first: the order in which their gradients are ready."""
    parameters: dict[str, Parameter] = {}
    for node in reversed(list(graph)):
        for position, ref in enumerate(node.inputs):
            name = ref.node
            if not graph[name].is_variable or name in graph.aux or name in inputs or name in parameters:
                continue
            shape = tuple(shapes[ref])
            is_weight = position == 1 and node.op in ("Convolution", "FullyConnected")
            if is_weight and node.op == "FullyConnected":
                device_shape: tuple[int, ...] = (padded(shape[0]), 1, 1, shape[1])
            elif is_weight:
                device_shape = (*shape[:3], padded_channels(shape[3]))
            else:
                device_shape = (*shape[:-1], padded(shape[-1]))
            parameters[name] = Parameter(name, shape, device_shape, is_weight)
    return list(parameters.values())


def padded_channels(channels: int) -> int:
    """Channels of a convolution's input: 3 become 4, for which cuDNN has tensor-core kernels; others stay."""
    return 4 if channels == 3 else channels


class Lowering:
    """One pass over the graph. `program` holds the result, `ready` after how many launches each gradient is final.
    `group`: the GPUs that BatchNorm's statistics are shared with.
    """

    def __init__(self, graph: Graph, shapes: Mapping[Ref, Shape], store: ParameterStore, persistent: Persistent,
                 tools: Toolchain, group: StatisticsGroup | None = None) -> None:
        self._graph, self._shapes, self._store, self._persistent = graph, shapes, store, persistent
        self._dtypes = tensor_dtypes(graph)
        self._gpu, self._kernels, self._convolutions = tools.gpu, tools.kernels, tools.convolutions
        self._planner, self._group = tools.planner, group
        self._dtype, self._c_type = store.dtype, C_TYPES[store.dtype]
        self._item_bytes = ITEM_BYTES[store.dtype]
        self._buffers: dict[Ref, Buffer] = {Ref("data"): persistent.data}
        self._sums: dict[Ref, Buffer] = {}  # sum and sum of squares that a convolution has left beside its output
        # Max poolings that are one launch with the BatchNormRelu before them -> that one's input where it won.
        self._pooled: dict[str, Buffer] = {}
        self._stems: set[str] = set()  # convolutions that are launches of stem.cu
        # Gradients of a stem's output that are not written, but made by the launch that reads them -> what makes them:
        # the BatchNormReluBackward, the MaxPoolingBackward behind it, and what that reads.
        self._pool_gradients: dict[Ref, tuple[Node, Node, Buffer]] = {}
        self._paired: set[str] = set()  # BatchNorms that are one launch with the BatchNormAddRelu that adds them
        # Gradients of a convolution's data that the BatchNorm reading them may make itself -> their node.
        self._held: dict[Ref, Node] = {}
        self._masked: dict[str, Buffer] = {}  # BatchNorm + ReLU without addend -> its `_dz`
        self._done: set[str] = set()  # nodes whose launches have been emitted with an earlier one's
        self.decisions: list[Decision] = []
        self._workspace, self._partials = Buffer("workspace", (0,), "uint8"), Buffer("partials", (0,), "float32")
        self.program = Program(scratch=(self._workspace, self._partials))
        self._bind_variables()
        for node in graph:
            if not node.is_variable and node.name not in self._done:
                self._rule(node)(node)
        self.program.plan_memory()
        self.ready = {name: number for number, launch in enumerate(self.program.launches, start=1)
                      for name, gradient in store.gradients.items() if gradient in launch.writes}

    def _bind_variables(self) -> None:
        """Parameters, running statistics and gradients have their places already."""
        for name in self._store.parameters:
            self._buffers[Ref(name)] = self._store.value(name)
        for name, buffer in self._store.statistics.slices.items():
            self._buffers[Ref(name)] = buffer
        if "output_names" in self._graph.attrs:
            for name, ref in output_names(self._graph).items():
                if name.endswith("_grad"):
                    self._buffers[ref] = self._store.gradients[name.removesuffix("_grad")]

    def _rule(self, node: Node) -> Callable[[Node], None]:
        forward = FORWARD_OF.get(node.op, node.op)
        if forward in ("Convolution", "FullyConnected"):
            kinds = {"Wgrad": self._wgrad, "Dgrad": self._dgrad}
            return kinds.get(node.op[-5:], self._convolution if forward == "Convolution" else self._fully_connected)
        if forward in ("BatchNorm", "BatchNormRelu", "BatchNormAddRelu"):
            return self._batch_norm_backward if node.op.endswith("Backward") else self._batch_norm
        rules = {
            "Pooling": self._pooling,
            "MaxPoolingTrain": self._pooling,
            "MaxPoolingBackward": self._max_pool_backward,
            "AvgPoolingBackward": self._average_pool_backward,
            "Flatten": self._flatten,
            "FlattenBackward": self._flatten,
            "SoftmaxOutput": self._softmax,
            "SoftmaxCrossEntropy": self._softmax,
            "BiasGrad": self._bias_gradient,
            "elemwise_add": self._add,
            "AddRelu": self._epilogue,
        }
        if node.op == "relu" or (node.op == "Activation" and node["act_type"] == "relu"):
            return self._epilogue
        if node.op not in rules:
            raise self._no_lowering(node)
        return rules[node.op]

    @staticmethod
    def _no_lowering(node: Node) -> GraphError:
        return GraphError(f"operator {node.op} of node '{node.name}' has no GPU lowering: use --executor mxnet, or "
                          "the passes that fuse it into one that has")

    @property
    def buffers(self) -> Mapping[Ref, Buffer]:
        """Where the tensors lie that exist on the device; what is fused away has none."""
        return self._buffers

    # --- helpers of the rules ---

    def _input(self, node: Node, index: int) -> Buffer:
        return self._buffers[node.inputs[index]]

    def _output(self, node: Node, index: int = 0, shape: Shape | None = None) -> Buffer:
        """The buffer of one output of a node; gradients of parameters have theirs already."""
        ref = Ref(node.name, index)
        if ref not in self._buffers:
            name = node.name if index == 0 else f"{node.name}:{index}"
            self._buffers[ref] = Buffer(name, tuple(shape or self._shapes[ref]), self._dtypes[ref])
        return self._buffers[ref]

    def _launch(self, node: Node, source: str, kernel: str, grid: Size, block: Size, arguments: tuple[Any, ...],
                reads: Buffers, writes: Buffers, in_place: tuple[Buffer, Buffer] | None = None,
                shared_bytes: int = 0, flops: int = 0) -> None:
        """Emit a kernel of ours. None is a null pointer among the arguments, and nothing among reads and writes."""
        function = self._kernels.get(source, kernel)

        def enqueue() -> None:
            values = (a.address if isinstance(a, Buffer) else 0 if a is None else a for a in arguments)
            function.launch(grid, block, *values, shared_bytes=shared_bytes)

        self.program.launches.append(Launch(
            node.name, kernel.split("<")[0], enqueue, tuple(b for b in reads if b), tuple(b for b in writes if b),
            flops, in_place))

    def _fastest(self, node: Node, problem: str, ways: dict[str, Way]) -> None:
        """Emit the launches of the fastest of several ways; see `Planner`."""
        decision, launches = self._planner.fastest(node.name, problem, ways, self.program.scratch)
        self.program.launches += launches
        self.decisions.append(decision)

    def _emitted(self, *rules: Callable[[], None]) -> list[Launch]:
        """What rules would emit."""
        before, self.program.launches = self.program.launches, []
        try:
            for rule in rules:
                rule()
            return self.program.launches
        finally:
            self.program.launches = before

    def _kernel(self, name: str, *flags: bool) -> str:
        """A kernel's instantiation for the network's dtype."""
        return f"{name}<{', '.join([self._c_type, *(str(flag).lower() for flag in flags)])}>"

    def _vectors(self, buffer: Buffer) -> int:
        return buffer.num_bytes // (VECTOR * self._item_bytes)

    def _require(self, condition: bool, node: Node, problem: str) -> None:
        if not condition:
            raise GraphError(f"{node.op} '{node.name}' {problem}")

    # --- convolution and classifier ---

    def _convolution(self, node: Node) -> None:
        x, w = self._input(node, 0), self._input(node, 1)
        self._require(node["layout"] == "NHWC", node, "is not NHWC: run the layout pass first")
        self._require(node["num_group"] == 1, node, f"has {node['num_group']} groups, which have no GPU lowering")
        if not node["no_bias"]:
            training = "output_names" in self._graph.attrs
            self._require(not training, node, "has a bias, which has no GPU lowering in training: use a BatchNorm")
            if not self._has_epilogue(node):
                self._biased_convolution(node, node, relu=False)
            return
        y = self._output(node)
        self._require(y.shape[3] % VECTOR == 0, node, f"has {y.shape[3]} filters: use a multiple of {VECTOR}")
        plain, fused = (self._problem(kind, node, x, w, y) for kind in ("fprop", "fprop_stats"))
        readers = self._graph.consumers.get(Ref(node.name), ())
        wants_sums = any(reader.op.startswith("BatchNorm") and reader.op.endswith("Train") for reader in readers)
        if wants_sums and self._stem_serves(node):
            self._stem(node)
        elif wants_sums and self._fusing_pays(node, plain, fused, y.num_bytes):
            sums = Buffer(f"{node.name}:sums", (2, y.shape[3]), "float32")
            self._sums[Ref(node.name)] = sums
            self._plan(node, fused, (x, w), (y, sums))
        else:
            self._plan(node, plain, (x, w), (y,))

    def _has_epilogue(self, node: Node) -> bool:
        """Is this a convolution with bias (of inference) whose ReLU, or sum and ReLU, alone reads it? It is launched
        in their place."""
        readers = self._graph.consumers.get(Ref(node.name), ())
        ops = [reader.op for reader in readers if reader.op != "Activation" or reader["act_type"] == "relu"]
        return node.op == "Convolution" and not node["no_bias"] and ops in (["Activation"], ["relu"], ["AddRelu"])

    def _epilogue(self, node: Node) -> None:
        """ReLU, or the sum of two tensors and ReLU, behind one or two convolutions with bias."""
        first, *others = sorted(node.inputs, key=lambda ref: not self._has_epilogue(self._graph[ref.node]))
        if not self._has_epilogue(self._graph[first.node]):
            raise self._no_lowering(node)
        for ref in others:
            if self._has_epilogue(self._graph[ref.node]):
                self._biased_convolution(self._graph[ref.node], self._graph[ref.node], relu=False)
        self._biased_convolution(self._graph[first.node], node, True, *(self._buffers[ref] for ref in others))

    def _biased_convolution(self, node: Node, result: Node, relu: bool, *addend: Buffer) -> None:
        """Convolution + bias (+ addend) (+ ReLU) as the output of `result`: one cuDNN plan, or two launches where these
        are faster or cuDNN has none."""
        x, w, bias = (self._input(node, index) for index in range(3))
        y = self._output(result)
        self._require(y.shape[3] % VECTOR == 0, node, f"has {y.shape[3]} filters: use a multiple of {VECTOR}")
        plain = self._problem("fprop", node, x, w, y)
        fused = self._problem(f"fprop_bias{'_add' if addend else ''}{'_relu' if relu else ''}", node, x, w, y)
        if self._fusing_pays(node, plain, fused, 2 * y.num_bytes):
            self._plan(node, fused, (x, w, bias, *addend), (y,))
            return
        product = Buffer(f"{node.name}:product", y.shape, y.dtype)
        self._plan(node, plain, (x, w), (product,))
        vectors = self._vectors(y)
        self._launch(result, "elementwise.cu", self._kernel("bias_add_relu", bool(addend), relu), *_threads(vectors),
                     (product, bias, addend[0] if addend else None, y, count(vectors), count(y.shape[3] // VECTOR)),
                     (product, bias, *addend), (y,), in_place=(product, y))

    def _stem_serves(self, node: Node) -> bool:
        """Is this the convolution that stem.cu is for, on a GPU that has the shared memory for it?"""
        x, w = self._input(node, 0), self._input(node, 1)
        if (window(node) != ((7, 7), (2, 2), (3, 3), (1, 1)) or w.shape != (STEM_FILTERS, STEM_SIZE, STEM_SIZE, 4)
                or x.shape[2] % 2 or self._item_bytes != 2 or self._gpu.capability < (8, 0)):
            return False
        _, _, image_bytes, gradient_bytes = stem_work(self._output(node).shape)
        needed = image_bytes + max(image_bytes, gradient_bytes) + STEM_STATIC_BYTES
        return needed <= self._gpu.max_shared_bytes

    def _stem(self, node: Node) -> None:
        """The convolution with the sums of its output."""
        x, w, y = self._input(node, 0), self._input(node, 1), self._output(node)
        sums = Buffer(f"{node.name}:sums", (2, y.shape[3]), "float32")
        self._sums[Ref(node.name)] = sums
        self._stems.add(node.name)
        items, tiles, image_bytes, _ = stem_work(y.shape)
        blocks = min(self._gpu.num_multiprocessors, items)
        self._reserve_partials(blocks * 2 * STEM_FILTERS)
        self._launch(node, "stem.cu", self._kernel("stem_fprop"), (blocks, 1, 1), STEM_BLOCK,
                     (x, w, y, sums, self._partials, self._persistent.tickets, _image(x, y), count(items),
                      ctypes.c_int(tiles)),
                     (x, w), (y, sums), shared_bytes=2 * image_bytes, flops=self._problem("fprop", node, x, w, y).flops)

    def _stem_wgrad(self, node: Node, batch_norm: Node, pool: Node, dz: Buffer) -> None:
        """The gradient of the weights, from what makes the gradient of the convolution's output."""
        x, gamma, saved = (self._input(batch_norm, index) for index in (1, 2, 3))
        dgamma, dbeta = self._output(batch_norm, 1), self._output(batch_norm, 2)
        winner, data, dw = self._input(pool, 1), self._input(node, 1), self._output(node)
        items, tiles, image_bytes, gradient_bytes = stem_work(x.shape)
        blocks = min(2 * self._gpu.num_multiprocessors, items)
        self._reserve_partials(blocks * STEM_SHARE)
        rows, _ = self._rows(batch_norm, x)
        self._launch(node, "stem.cu", self._kernel("stem_wgrad"), (blocks, 1, 1), STEM_BLOCK,
                     (data, x, dz, winner, saved, gamma, dgamma, dbeta, self._partials, _image(data, x), _image(x, dz),
                      count(rows), count(items), ctypes.c_int(tiles)),
                     (data, x, dz, winner, saved, gamma, dgamma, dbeta), (),
                     shared_bytes=image_bytes + gradient_bytes, flops=self._problem("wgrad", node, data, dw, x).flops)
        self._launch(node, "stem.cu", self._kernel("stem_wgrad_sum"), (STEM_FILTERS * STEM_SIZE, 1, 1), (32, 8, 1),
                     (self._partials, dw, ctypes.c_int(blocks)), (), (dw,))

    def _reserve_partials(self, floats: int) -> None:
        self._partials.shape = (max(self._partials.shape[0], floats),)

    def _fully_connected(self, node: Node) -> None:
        """A 1x1 convolution of a 1x1 image. The bias is added by the softmax kernel, in fp32."""
        readers = [reader.op for reader in self._graph.consumers.get(Ref(node.name), ())]
        self._require(bool(readers) and set(readers) <= {"SoftmaxOutput", "SoftmaxCrossEntropy"}, node,
                      "does not feed a SoftmaxOutput alone: only the classifier has a GPU lowering")
        x, w = self._input(node, 0), self._input(node, 1)
        images = x.shape[0]
        y = self._output(node, shape=(images, 1, 1, padded(node["num_hidden"])))
        self._plan(node, self._problem("fprop", node, x, w, y), (x, w), (y,))

    def _wgrad(self, node: Node) -> None:
        if node.inputs[0] in self._pool_gradients:
            self._stem_wgrad(node, *self._pool_gradients[node.inputs[0]])
            return
        dy, x = self._input(node, 0), self._input(node, 1)
        dw = self._output(node)
        self._plan(node, self._problem("wgrad", node, x, dw, dy), (x, dy), (dw,))

    def _dgrad(self, node: Node) -> None:
        if self._may_be_fused(node):
            self._held[Ref(node.name)] = node
        else:
            self._plain_dgrad(node)

    def _plain_dgrad(self, node: Node) -> None:
        dy, w = self._input(node, 0), self._input(node, 1)
        dx = self._output(node)
        self._plan(node, self._problem("dgrad", node, dx, w, dy), (dy, w), (dx,))

    def _may_be_fused(self, dgrad: Node) -> bool:
        """Can the BatchNorm that alone reads this gradient make it itself (`_dgrad_reduce`)?"""
        readers = self._graph.consumers.get(Ref(dgrad.name), ())
        if len(readers) != 1 or readers[0].op != "BatchNormAddReluBackward":
            return False
        forward, w = forward_node(dgrad), self._input(dgrad, 1)
        return forward.op == "Convolution" and pointwise.serves(self._gpu, self._dtype, w.shape, window(forward))

    def _problem(self, kind: str, node: Node, x: Buffer, w: Buffer, y: Buffer) -> Problem:
        forward = forward_node(node) if node.op in FORWARD_OF else node
        if forward.op == "FullyConnected":
            rows, columns = y.shape[0], math.prod(x.shape[1:])
            return Problem(kind, (rows, 1, 1, columns), _four(w.shape), (rows, 1, 1, math.prod(y.shape[1:])),
                           (0, 0), (1, 1), (1, 1), self._dtype)
        size = window(forward)
        return Problem(kind, _four(x.shape), _four(w.shape), _four(y.shape), size.pad, size.stride, size.dilate,
                       self._dtype)

    def _plan(self, node: Node, problem: Problem, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        """Emit a cuDNN plan."""
        plan = self._convolutions.plan(problem)
        self._workspace.shape = (max(self._workspace.shape[0], plan.workspace_bytes),)

        def enqueue() -> None:
            addresses = [buffer.address for buffer in (*reads, *writes)]
            if problem.kind == "fprop_stats":
                addresses.append(addresses[-1] + writes[-1].num_bytes // 2)  # the second half: sums of squares
            plan.enqueue(*addresses, workspace=self._workspace.address)

        self.program.launches.append(Launch(node.name, problem.kind, enqueue, reads, writes, flops=problem.flops))

    def _fusing_pays(self, node: Node, plain: Problem, fused: Problem, separate_bytes: int) -> bool:
        """Is a convolution with something in its epilogue faster than one without and a launch that moves so much? No
        where runs are to be repeatable: time must not decide then, and cuDNN's sums for a BatchNorm are added up in a
        varying order, which its notes on plans do not say (cuDNN 9.19 on an H200: other bits in each of 20 runs)."""
        if self._convolutions.deterministic:
            return False
        try:
            fused_ms = self._convolutions.plan(fused).time_ms
        except GraphError:
            fused_ms = float("inf")
        separate_ms = separate_bytes / self._gpu.bandwidth * 1e3 + LAUNCH_MS
        times = {"separate": self._convolutions.plan(plain).time_ms + separate_ms, fused.kind: fused_ms}
        self.decisions.append(Decision(node.name, str(fused), times))
        return self.decisions[-1].chosen == fused.kind

    # --- batch norm ---

    def _batch_norm(self, node: Node) -> None:
        """Forward, in training (with the batch's statistics) and inference (with the running ones)."""
        training = node.op.endswith("Train")
        forward = forward_node(node) if training else node
        add, relu = forward.op == "BatchNormAddRelu", forward.op != "BatchNorm"
        self._require(node["axis"] in (3, -1), node, f"has axis={node['axis']}: the cuda executor needs NHWC, axis=3")
        self._require(not node["fix_gamma"], node, "has fix_gamma=True, which has no GPU lowering: set it to False")
        x, gamma, beta, running_mean, running_var = (self._input(node, index) for index in range(5))
        rows, channels = self._rows(node, x)
        size = (count(rows), ctypes.c_int(channels))

        sums = self._sums.get(node.inputs[0]) or Buffer(f"{node.name}:sums", (2, channels), "float32")
        if not training:
            self._launch(node, "batch_norm.cu", "sums_from_running", *_threads(channels),
                         (running_mean, running_var, sums, *size), (running_mean, running_var), (sums,))
        elif node.inputs[0] not in self._sums:
            self._launch(node, "batch_norm.cu", self._kernel("batch_norm_statistics"),
                         self._reduce_grid(rows, channels), REDUCE_BLOCK,
                         (x, sums, self._partials, self._persistent.tickets, *size), (x,), (sums,))
            self._sums[node.inputs[0]] = sums
        if training:
            self._share(node, sums)
        if self._added_by(node):
            return  # `_batch_norm_pair`, at the node that adds it
        if training and add and self._added_by(shortcut := self._graph[node.inputs[5].node]):
            self._batch_norm_pair(node, shortcut)
            return
        saved = self._output(node, 1) if training else None
        constants = (ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]))
        if pool := self._max_pool_behind(node):
            y, winner = self._output(pool, 0), self._output(pool, 1)
            x_winner = Buffer(f"{pool.name}:x_winner", y.shape, y.dtype)
            self._pooled[pool.name] = x_winner
            outputs = math.prod(y.shape[:-1])
            self._launch(node, "batch_norm_pool.cu", self._kernel("batch_norm_relu_max_pool"),
                         self._grid(outputs, channels), APPLY_BLOCK,
                         (x, sums, gamma, beta, y, winner, x_winner, saved, running_mean, running_var, *constants,
                          _image(x, y), count(rows), count(outputs), ctypes.c_int(channels)),
                         (x, sums, gamma, beta), (y, winner, x_winner, saved))
            return
        y = self._output(node)
        addend = self._input(node, 5) if add else None
        mask = self._output(node, 4) if training and add else None
        running = (running_mean, running_var) if training else (None, None)
        self._launch(node, "batch_norm.cu", self._kernel("batch_norm_apply", add, relu), self._grid(rows, channels),
                     APPLY_BLOCK,
                     (x, addend, sums, gamma, beta, y, mask, saved, *running, *constants, *size),
                     (x, addend, sums, gamma, beta), (y, saved, mask), in_place=(x, y))

    def _share(self, node: Node, *arrays: Buffer) -> None:
        """Replace sums over this GPU's rows by their means over the group, where there is one."""
        if self._group is None:
            return
        values = math.prod(arrays[0].shape)
        self._require(values <= MAX_VALUES, node,
                      f"has {values // 2} channels: a group shares {MAX_VALUES // 2} at most")
        missing = (None,) * (MAX_ARRAYS - len(arrays))
        self._launch(node, "batch_norm_group.cu", "average_over_group", (-(-values // THREADS), 1, 1), (THREADS, 1, 1),
                     (*arrays, *missing, *self._group.arguments(values)), arrays, arrays)

    def _added_by(self, node: Node) -> Node | None:
        """The BatchNormAddRelu in training that alone reads this BatchNorm, as its addend: a projection shortcut's."""
        readers = self._graph.consumers.get(Ref(node.name), ())
        if node.op != "BatchNormTrain" or [reader.op for reader in readers] != ["BatchNormAddReluTrain"]:
            return None
        same = all(readers[0][name] == node[name] for name in ("eps", "momentum"))
        return readers[0] if same and readers[0].inputs[5] == Ref(node.name) else None

    def _batch_norm_pair(self, node: Node, shortcut: Node) -> None:
        """A BatchNormAddRelu and the BatchNorm that it adds, whose sums are there: neither's output is written."""
        self._paired |= {node.name, shortcut.name}
        x, *pairs = ((self._input(node, index), self._input(shortcut, index)) for index in range(5))
        gamma, beta, running_mean, running_var = pairs
        sums = (self._sums[node.inputs[0]], self._sums[shortcut.inputs[0]])
        saved = (self._output(node, 1), self._output(shortcut, 1))
        y, mask = self._output(node), self._output(node, 4)
        rows, channels = self._rows(node, x[0])
        self._launch(node, "batch_norm_pair.cu", self._kernel("batch_norm_pair_apply"), self._grid(rows, channels),
                     APPLY_BLOCK,
                     (*x, *sums, *gamma, *beta, y, mask, *saved, *running_mean, *running_var,
                      ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]), count(rows),
                      ctypes.c_int(channels)),
                     (*x, *sums, *gamma, *beta), (y, mask, *saved))

    def _batch_norm_pair_backward_reduce(self, node: Node) -> None:
        """Of what `_batch_norm` made one launch; `node` is the BatchNormAddReluBackward."""
        shortcut, = self._graph.consumers[Ref(node.name, 3)]
        dy, mask = self._input(node, 0), self._input(node, 4)
        dy2 = None if node["single_grad"] else self._input(node, 5)
        x, saved = ((self._input(node, index), self._input(shortcut, index)) for index in (1, 3))
        dgamma, dbeta = ((self._output(node, index), self._output(shortcut, index)) for index in (1, 2))
        dz = self._dz(node)
        rows, channels = self._rows(node, x[0])
        self._launch(node, "batch_norm_pair.cu", self._kernel("batch_norm_pair_backward_reduce", dy2 is not None),
                     self._reduce_grid(rows, channels, num_sums=3), REDUCE_BLOCK,
                     (*x, dy, dy2, mask, dz, *saved, *dgamma, *dbeta, self._partials, self._persistent.tickets,
                      count(rows), ctypes.c_int(channels)),
                     (*x, dy, dy2, mask, *saved), (dz, *dgamma, *dbeta), in_place=(dy, dz))

    def _batch_norm_pair_backward_apply(self, node: Node) -> None:
        """The gradients of both inputs, from dz and the sums."""
        shortcut, = self._graph.consumers[Ref(node.name, 3)]
        x, gamma, saved = ((self._input(node, index), self._input(shortcut, index)) for index in (1, 2, 3))
        dx, dgamma, (dbeta, _) = ((self._output(node, index), self._output(shortcut, index)) for index in range(3))
        dz, (rows, channels) = self._dz(node), self._rows(node, x[0])
        self._launch(node, "batch_norm_pair.cu", self._kernel("batch_norm_pair_backward_apply"),
                     self._grid(rows, channels, blocks_per_multiprocessor=2), APPLY_BLOCK,
                     (*x, dz, *dx, *saved, *gamma, *dgamma, dbeta, count(rows), ctypes.c_int(channels)),
                     (*x, dz, *saved, *gamma, *dgamma, dbeta), dx, in_place=(dz, dx[0]))

    def _max_pool_behind(self, node: Node) -> Node | None:
        """The 3x3 max pooling with stride 2 that alone reads a BatchNormRelu in training, as in ResNet's stem."""
        readers = self._graph.consumers.get(Ref(node.name), ())
        if node.op != "BatchNormReluTrain" or len(readers) != 1 or readers[0].op != "MaxPoolingTrain":
            return None
        size = window(forward_node(readers[0]))
        return readers[0] if size[:3] == ((3, 3), (2, 2), (1, 1)) else None

    def _batch_norm_pool_backward(self, node: Node, pool: Node) -> None:
        """Of what `_batch_norm` made one launch; `pool` is the MaxPoolingBackward."""
        x, gamma, saved = (self._input(node, index) for index in (1, 2, 3))
        dy, winner = self._input(pool, 0), self._input(pool, 1)
        dy2 = None if pool["single_grad"] else self._input(pool, 2)
        x_winner = self._pooled[pool.inputs[1].node]
        dx, dgamma, dbeta = (self._output(node, index) for index in range(3))
        rows, channels = self._rows(node, x)
        outputs, squares = math.prod(dy.shape[:-1]), x.shape[0] * -(-x.shape[1] // 2) * -(-x.shape[2] // 2)
        image, last = _image(x, dy), ctypes.c_int(channels)
        dz = Buffer(f"{pool.name}:dz", dy.shape, dy.dtype) if dy2 else dy
        kernel = self._kernel("batch_norm_relu_max_pool_backward_reduce", dy2 is not None)
        self._launch(node, "batch_norm_pool.cu", kernel, self._reduce_grid(outputs, channels), REDUCE_BLOCK,
                     (x_winner, dy, dy2, winner, dz, saved, dgamma, dbeta, self._partials, self._persistent.tickets,
                      count(outputs), last),
                     (x_winner, dy, dy2, winner, saved), (dz if dy2 else None, dgamma, dbeta),
                     in_place=(dy, dz) if dy2 else None)
        self._share(node, dgamma, dbeta)
        readers = [reader.op for reader in self._graph.consumers[Ref(node.name)]]
        if node.inputs[1].node in self._stems and readers == ["ConvolutionWgrad"]:
            self._pool_gradients[Ref(node.name)] = (node, pool, dz)
            return
        self._launch(node, "batch_norm_pool.cu", self._kernel("batch_norm_relu_max_pool_backward_apply"),
                     self._grid(squares, channels, blocks_per_multiprocessor=2), APPLY_BLOCK,
                     (x, dz, winner, dx, saved, gamma, dgamma, dbeta, image, count(rows), count(squares), last),
                     (x, dz, winner, saved, gamma, dgamma, dbeta), (dx,))

    def _batch_norm_backward(self, node: Node) -> None:
        behind = self._graph[node.inputs[0].node]
        if behind.op == "MaxPoolingBackward" and behind.inputs[1].node in self._pooled:
            self._batch_norm_pool_backward(node, behind)
            return
        norms = self._norms(node)
        held = [self._held.pop(ref) for ref in dict.fromkeys(node.inputs) if ref in self._held]
        for other in held[1:]:
            self._plain_dgrad(other)
        if held:
            self._reduce_after(held[0], node)
        else:
            self._batch_norm_backward_reduce(node)
        self._share(node, *(self._output(norm, index) for index in (1, 2) for norm in norms))
        self._done |= {norm.name for norm in norms}
        convolutions = [convolution for norm in norms if (convolution := self._pointwise_behind(norm))]
        if len(convolutions) == len(norms):
            self._backward_through(node, convolutions)
        else:
            self._batch_norm_backward_apply(node, self._stores_dz(node))

    def _norms(self, node: Node) -> list[Node]:
        """The BatchNorm backward itself, and that of the shortcut where both are made in one."""
        return [node, *(self._graph.consumers[Ref(node.name, 3)] if node.inputs[3].node in self._paired else ())]

    def _reduce_after(self, dgrad: Node, node: Node) -> None:
        """The gradient of a 1x1 convolution's data, and the sums of the BatchNorm backward that reads it."""
        k, (rows, columns) = self._input(dgrad, 1).shape[0], self._rows(node, self._input(node, 1))
        paired = len(self._norms(node)) == 2
        ways: dict[str, Way] = {"separate": partial(self._emitted, partial(self._plain_dgrad, dgrad),
                                                    partial(self._batch_norm_backward_reduce, node))}
        for way in pointwise.dgrad_reduce_ways(self._gpu, k, columns, paired):
            ways[f"dgrad_reduce<{way}>"] = partial(self._emitted, partial(self._dgrad_reduce, dgrad, node, way))
        if len(ways) == 1:
            self.program.launches += ways["separate"]()
            return
        names = f"{node.op}{' of a pair' * paired}{'' if node['single_grad'] else ' with another gradient'}"
        self._fastest(node, f"dgrad {rows}x{k} -> {columns}, {names}, {self._dtype}", ways)

    def _dgrad_reduce(self, dgrad: Node, node: Node, way: DgradReduce) -> None:
        """Both in one launch."""
        norms, (dy, w) = self._norms(node), (self._input(dgrad, index) for index in range(2))
        x, saved = ([self._input(norm, index) for norm in norms] for index in (1, 3))
        dgamma, dbeta = ([self._output(norm, index) for norm in norms] for index in (1, 2))
        mask, dz = self._input(node, 4), self._dz(node)
        gradients = (node.inputs[0],) if node["single_grad"] else (node.inputs[0], node.inputs[-1])
        addend = next((self._buffers[ref] for ref in gradients if ref != Ref(dgrad.name)), None)
        rows, columns = self._rows(node, x[0])
        grid = way.grid(rows, columns, self._gpu.num_multiprocessors)
        self._reserve_partials((1 + len(norms)) * columns * grid[1])
        second = [None] * (2 - len(norms))
        flags = ", ".join(_bool(flag) for flag in (addend, len(norms) == 2))
        self._launch(node, "dgrad_reduce.cu", f"dgrad_reduce<{self._c_type}, {way}, {flags}>", grid, way.block,
                     (dy, w, *x, *second, addend, mask, dz, *saved, *second, *dgamma, *second, *dbeta, *second,
                      self._partials, self._persistent.tickets, count(rows), ctypes.c_int(columns)),
                     (dy, w, *x, addend, mask, *saved), (dz, *dgamma, *dbeta),
                     in_place=(addend, dz) if addend else None, shared_bytes=way.shared_bytes(1 + len(norms)),
                     flops=2 * rows * columns * way.k)

    def _pointwise_behind(self, norm: Node) -> _Pointwise | None:
        """The 1x1 convolution whose output a BatchNorm backward makes the gradient of, where one launch may make that
        gradient and all that comes of it."""
        readers = self._graph.consumers.get(Ref(norm.name), ())
        kinds = {reader.op: reader for reader in readers}
        if len(readers) != 2 or kinds.keys() != {"ConvolutionWgrad", "ConvolutionDgrad"}:
            return None
        wgrad, dgrad = kinds["ConvolutionWgrad"], kinds["ConvolutionDgrad"]
        w = self._input(dgrad, 1)
        if not (pointwise.serves(self._gpu, self._dtype, w.shape, window(forward_node(dgrad)))
                and NormBackward.serves(self._gpu, w.shape[0], w.shape[3])):
            return None
        behind = self._graph.consumers.get(Ref(dgrad.name), ())
        reduces = [reader.op for reader in behind] == ["BatchNormReluBackward"] and behind[0]["single_grad"]
        if self._group:
            reduces = False  # its sums are shared before they are used: that has no place in a way that is timed
        return _Pointwise(norm, wgrad, dgrad, behind[0] if reduces else None)

    def _backward_through(self, node: Node, convolutions: list[_Pointwise]) -> None:
        """From dz through BatchNorm and the 1x1 convolutions before it, to the BatchNorm that each of them has read."""
        masked, relu = self._stores_dz(node), self._relu_is_missing(node)
        separate: list[Callable[[], None]] = [partial(self._batch_norm_backward_apply, node, masked)]
        fused: list[Callable[[], None]] = []
        problem = []
        for one in convolutions:
            separate += [partial(self._wgrad, one.wgrad), partial(self._plain_dgrad, one.dgrad)]
            fused += [partial(self._norm_backward, one, self._dz(node) if masked else self._input(node, 0), relu)]
            if one.behind:
                separate += [partial(self._batch_norm_backward_alone, one.behind)]
                fused += [partial(self._batch_norm_backward_apply, one.behind, True)]
            x, w = self._input(one.wgrad, 1), self._input(one.dgrad, 1)
            problem += [f"{x.shape} -> {w.shape[0]}{' after BatchNormRelu' * bool(one.behind)}"]
            self._done |= {each.name for each in (one.wgrad, one.dgrad, one.behind) if each}
        self._fastest(node, f"backward of {node.op} and 1x1 convolution: {', '.join(problem)}, {self._dtype}",
                      {"separate": partial(self._emitted, *separate), "norm_backward": partial(self._emitted, *fused)})

    def _norm_backward(self, one: _Pointwise, dz: Buffer, relu: bool) -> None:
        """The gradients of the weights and of the data, or the sums of the BatchNorm that reads the latter. `relu`: has
        it still to be applied to `dz`?"""
        x, saved, gamma = (self._input(one.norm, index) for index in (1, 3, 2))
        dgamma, dbeta = self._output(one.norm, 1), self._output(one.norm, 2)
        w, dw, beta = self._input(one.dgrad, 1), self._output(one.wgrad), self._input(one.norm, 4) if relu else None
        (rows, k), columns, way = self._rows(one.norm, x), w.shape[3], NormBackward(w.shape[0])
        grid = way.grid(rows, self._gpu.num_multiprocessors)
        self._reserve_partials(2 * columns * grid[1])
        parts = Buffer(f"{one.wgrad.name}:parts", (grid[1], k, columns), "float32")
        more: Buffers
        if one.behind:
            behind, gamma_2, saved_2, beta_2 = (self._input(one.behind, index) for index in range(1, 5))
            out, more = self._dz(one.behind), (saved_2, gamma_2, beta_2)
            sums: Buffers = (self._output(one.behind, 1), self._output(one.behind, 2))
        else:
            behind, out = self._input(one.wgrad, 1), self._output(one.dgrad)
            more, sums = (None, None, None), (None, None)
        reads = (dz, x, saved, gamma, beta, dgamma, dbeta, w, behind)
        flags = f"{k}, {_bool(relu)}, {_bool(one.behind)}"
        self._launch(one.norm, "norm_backward.cu", f"norm_backward<{self._c_type}, {flags}>", grid, way.block,
                     (*reads, out, *more, *sums, parts, self._partials, self._persistent.tickets, count(rows)),
                     (*reads, *more), (out, *sums, parts), shared_bytes=way.shared_bytes, flops=4 * rows * columns * k)
        vectors = k * columns // VECTOR
        self._launch(one.wgrad, "norm_backward.cu", f"sum_parts<{C_TYPES[dw.dtype]}>", (-(-vectors // 16), 1, 1),
                     (256, 1, 1), (parts, dw, ctypes.c_int(grid[1]), count(vectors)), (parts,), (dw,))

    def _dz(self, node: Node) -> Buffer:
        """The gradient of a BatchNorm + ReLU's output where ReLU let it through: what its addend gets."""
        if node.op == "BatchNormAddReluBackward":
            return self._output(node, 3)
        x = self._input(node, 1)
        return self._masked.setdefault(node.name, Buffer(f"{node.name}:dz", x.shape, x.dtype))

    @staticmethod
    def _stores_dz(node: Node) -> bool:
        """Where it is wanted (by the addend), or would cost more than one read."""
        return node.op == "BatchNormAddReluBackward" or not node["single_grad"]

    def _relu_is_missing(self, node: Node) -> bool:
        """Is ReLU's part not in the gradient that the second half of the backward pass starts from?"""
        return node.op == "BatchNormReluBackward" and not self._stores_dz(node)

    def _batch_norm_backward_alone(self, node: Node) -> None:
        self._batch_norm_backward_reduce(node)
        self._batch_norm_backward_apply(node, self._stores_dz(node))

    def _batch_norm_backward_reduce(self, node: Node) -> None:
        """The sums of a BatchNorm's backward pass, and `_dz` where it is stored."""
        if len(self._norms(node)) == 2:
            self._batch_norm_pair_backward_reduce(node)
            return
        relu = _RELU[node.op]
        dy, x, gamma, saved = (self._input(node, index) for index in range(4))
        beta = self._input(node, 4) if relu == "RECOMPUTED" else None
        mask = self._input(node, 4) if relu == "BITS" else None
        dy2 = None if node["single_grad"] else self._buffers[node.inputs[-1]]
        dz = self._dz(node) if self._stores_dz(node) else None
        dgamma, dbeta = self._output(node, 1), self._output(node, 2)
        rows, channels = self._rows(node, x)
        flags = ", ".join((self._c_type, relu, _bool(dy2), _bool(dz)))
        self._launch(node, "batch_norm.cu", f"batch_norm_backward_reduce<{flags}>", self._reduce_grid(rows, channels),
                     REDUCE_BLOCK,
                     (x, dy, dy2, mask, dz, saved, gamma, beta, dgamma, dbeta, self._partials, self._persistent.tickets,
                      count(rows), ctypes.c_int(channels)),
                     (x, dy, dy2, mask, saved, gamma, beta), (dz, dgamma, dbeta), in_place=(dy, dz) if dz else None)

    def _batch_norm_backward_apply(self, node: Node, masked: bool) -> None:
        """The gradient of the input, from the sums and `_dz` if `masked`, else the gradient of the output."""
        if len(self._norms(node)) == 2:
            self._batch_norm_pair_backward_apply(node)
            return
        relu = "NO_RELU" if masked else _RELU[node.op]
        source = self._dz(node) if masked else self._input(node, 0)
        x, gamma, saved = (self._input(node, index) for index in range(1, 4))
        beta = self._input(node, 4) if relu == "RECOMPUTED" else None
        dx, dgamma, dbeta = (self._output(node, index) for index in range(3))
        rows, channels = self._rows(node, x)
        kernel = f"batch_norm_backward_apply<{self._c_type}, {relu}>"
        self._launch(node, "batch_norm.cu", kernel, self._grid(rows, channels), APPLY_BLOCK,
                     (x, source, dx, saved, gamma, beta, dgamma, dbeta, count(rows), ctypes.c_int(channels)),
                     (x, source, saved, gamma, beta, dgamma, dbeta), (dx,), in_place=(source, dx))

    def _rows(self, node: Node, x: Buffer) -> tuple[int, int]:
        channels = x.shape[-1]
        self._require(channels % VECTOR == 0, node, f"has {channels} channels: use a multiple of {VECTOR}")
        rows = math.prod(x.shape[:-1])
        self._require(rows * channels // VECTOR < 2**32, node, f"has {rows} x {channels} elements: use a smaller batch")
        return rows, channels

    def _reduce_grid(self, rows: int, channels: int, num_sums: int = 2) -> Size:
        grid = self._grid(rows, channels, REDUCE_BLOCK, blocks_per_multiprocessor=1)
        self._reserve_partials(num_sums * channels * grid[1])
        return grid

    def _grid(self, rows: int, channels: int, block: Size = APPLY_BLOCK, blocks_per_multiprocessor: int = 4) -> Size:
        """As many blocks as the GPU holds at once, by the launch bounds of the kernel."""
        tiles = -(-channels // TILE_CHANNELS)
        blocks = self._gpu.num_multiprocessors * blocks_per_multiprocessor
        return tiles, max(1, min(blocks // tiles, -(-rows // block[1]))), 1

    # --- pooling ---

    def _pooling(self, node: Node) -> None:
        if node.name in self._pooled:
            return
        x, y = self._input(node, 0), self._output(node)
        self._require(node["layout"] == "NHWC", node, "is not NHWC: run the layout pass first")
        self._require(x.shape[3] % VECTOR == 0, node, f"has {x.shape[3]} channels: use a multiple of {VECTOR}")
        size = (count(self._vectors(y)), *self._pixels_and_pitch(x))
        if node["pool_type"] == "avg" and node["global_pool"]:
            self._launch(node, "pooling.cu", self._kernel("global_average_pool"), *_threads(self._vectors(y)),
                         (x, y, *size), (x,), (y,))
        elif node["pool_type"] == "max" and not node["global_pool"]:
            winner = self._output(node, 1) if node.op == "MaxPoolingTrain" else None
            self._launch(node, "pooling.cu", self._kernel("max_pool"), *_threads(self._vectors(y)),
                         (x, y, winner, _pool_window(node, x, y), size[0], size[2]), (x,), (y, winner))
        else:
            raise GraphError(f"Pooling '{node.name}' ({node['pool_type']}, global_pool={node['global_pool']}) has no "
                             "GPU lowering: there are max pooling and global average pooling")

    def _max_pool_backward(self, node: Node) -> None:
        if node.inputs[1].node in self._pooled:
            return
        dy, winner = self._input(node, 0), self._input(node, 1)
        dy2 = None if node["single_grad"] else self._input(node, 2)
        dx = self._output(node)
        kernel = self._kernel("max_pool_backward", dy2 is not None)
        self._launch(node, "pooling.cu", kernel, *_threads(self._vectors(dx)),
                     (dy, dy2, winner, dx, _pool_window(forward_node(node), dx, dy), count(self._vectors(dx)),
                      self._pixels_and_pitch(dx)[1]),
                     (dy, dy2, winner), (dx,))

    def _average_pool_backward(self, node: Node) -> None:
        self._require(node["global_pool"], node, "is not global, and has no GPU lowering")
        dy, dx = self._input(node, 0), self._output(node)
        self._launch(node, "pooling.cu", self._kernel("global_average_pool_backward"), *_threads(self._vectors(dx)),
                     (dy, dx, count(self._vectors(dx)), *self._pixels_and_pitch(dx)), (dy,), (dx,))

    def _pixels_and_pitch(self, x: Buffer) -> tuple[ctypes.c_int, ctypes.c_int]:
        return ctypes.c_int(x.shape[1] * x.shape[2]), ctypes.c_int(x.shape[3] // VECTOR)

    # --- the rest ---

    def _flatten(self, node: Node) -> None:
        """The same memory, forward and backward."""
        source = self._input(node, 0)
        self._require(source.num_bytes == math.prod(self._shapes[Ref(node.name)]) * self._item_bytes, node,
                      "changes its number of elements by padding, which has no GPU lowering")
        self._buffers[Ref(node.name)] = source

    def _add(self, node: Node) -> None:
        a, b = self._input(node, 0), self._input(node, 1)
        total = self._output(node)
        self._launch(node, "elementwise.cu", self._kernel("add"), *_threads(self._vectors(total)),
                     (a, b, total, count(self._vectors(total))), (a, b), (total,), in_place=(a, total))

    def _softmax(self, node: Node) -> None:
        """Training: loss, metrics and the gradient of the scores. Inference: probabilities and metrics."""
        training = node.op == "SoftmaxCrossEntropy"
        classifier = self._graph[node.inputs[0].node]
        self._require(classifier.op == "FullyConnected", node, "does not follow a FullyConnected: no GPU lowering")
        scores = self._input(node, 0)
        images, pitch, classes = scores.shape[0], scores.shape[3], classifier["num_hidden"]
        bias = None if classifier["no_bias"] else self._input(classifier, 2)
        keep = self._persistent
        gradient = self._output(node, shape=scores.shape) if training else None
        probabilities, mixup = (None, keep.mixup) if training else (keep.probabilities, None)
        row_loss = Buffer(f"{node.name}:row_loss", (images,), "float32")
        row_rank = Buffer(f"{node.name}:row_rank", (images,), "int32")
        scale = node["grad_scale"] / (images if node["normalization"] == "batch" else 1)
        self._launch(node, "softmax.cu", self._kernel("softmax_cross_entropy"), (images, 1, 1), (256, 1, 1),
                     (scores, bias, keep.label, mixup, probabilities, gradient, row_loss, row_rank, keep.loss_scale,
                      ctypes.c_float(scale), ctypes.c_float(node["smooth_alpha"]), ctypes.c_int(classes),
                      ctypes.c_int(pitch)),
                     (scores, bias, keep.label, mixup), (probabilities, gradient, row_loss, row_rank),
                     shared_bytes=4 * classes)
        self._launch(node, "softmax.cu", "add_metrics", (1, 1, 1), (256, 1, 1),
                     (row_loss, row_rank, keep.num_valid, keep.metrics), (row_loss, row_rank), (keep.metrics,))

    def _bias_gradient(self, node: Node) -> None:
        dy, dbias = self._input(node, 0), self._output(node)
        classes = self._shapes[Ref(node.name)][0]
        pitch = dy.shape[-1]
        self._launch(node, "softmax.cu", self._kernel("bias_gradient"), (-(-classes // 32), 1, 1), (32, 32, 1),
                     (dy, dbias, ctypes.c_int(math.prod(dy.shape[:-1])), ctypes.c_int(classes), ctypes.c_int(pitch)),
                     (dy,), (dbias,))


def _four(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    a, b, c, d = shape
    return a, b, c, d


def _bool(value: object) -> str:
    return "true" if value else "false"


def _threads(vectors: int) -> tuple[Size, Size]:
    """Grid and block with one thread for each."""
    return (-(-vectors // 256), 1, 1), (256, 1, 1)


def _image(x: Buffer, y: Buffer) -> _Image:
    return _Image(*x.shape[1:3], *y.shape[1:3])


def _pool_window(node: Node, x: Buffer, y: Buffer) -> _Window:
    size = window(node)
    return _Window(*x.shape[1:3], *y.shape[1:3], *size.kernel, *size.stride, *size.pad)
