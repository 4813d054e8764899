"""The part of the cuda executor that needs no GPU: the lowering of whole networks, memory, parameters, the cache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import combinations, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_sanitizer
from step_networks import NEWEST, OWN_FORMS, bottlenecks, flattened, random_network
from test_compile import kernels as all_kernels
from test_compile import serves
from test_formula import focal, json_of

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, Ref, passes, pipeline, roles
from graph_passes.choice import Choice, fewest, plain
from graph_passes.executors import Box, Draws
from graph_passes.executors.cuda import compiled, kernel_library, network, prices, toolchain, training_step
from graph_passes.executors.cuda.capacity import check_fits
from graph_passes.executors.cuda.folding import Folded
from graph_passes.executors.cuda.kernel_library import HOPPER, Kernel
from graph_passes.executors.cuda.lowering import Persistent, check_operators
from graph_passes.executors.cuda.lowering import lower as lower_to_launches
from graph_passes.executors.cuda.optimizer import OptimizerConfig
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.parameters import Parameter, ParameterStore, padded_channels, parameters_of
from graph_passes.executors.cuda.prices import Prices
from graph_passes.executors.cuda.program import Buffer, Launch, Program
from graph_passes.optimizers.sgd import SGD
from graph_passes.passes.conv_epilogue import conv_epilogue
from graph_passes.passes.softmax_bias import softmax_bias
from train import models
from train.models.resnet import resnet


class FakeKernels:
    def get(self, source: str, kernel: str) -> Any:
        return SimpleNamespace(launch=lambda *arguments, **options: None)

    def begin(self, source: str, kernel: str) -> None: ...

    def side_by_side(self) -> Any:
        return nullcontext()


class FakeConvolutions:
    variant, deterministic = "fake", False

    def save(self) -> None: ...

    def plan(self, problem: Any) -> Any:
        return SimpleNamespace(workspace_bytes=4096, time_ms=1.0, enqueue=lambda *addresses, workspace: None)


def _sizes(buffers: Sequence[Buffer]) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes. A batch's sums have two or three rows, which does not change the time."""
    return [((2, *buffer.shape[1:]) if len(buffer.shape) == 2 and buffer.shape[0] == 3 else buffer.shape, buffer.dtype)
            for buffer in buffers]


# Fusions that only timing takes, except cuDNN's own and the stem's.
BY_THE_CLOCK = (*NEWEST, *OWN_FORMS, "DgradReduce", "NormBackward", "NormBackwardReduce", "StemPool")
OF_OUR_OWN = (*NEWEST, *OWN_FORMS, "StemPool")


class FakePlanner:
    """Prices by which the fewest launches are taken; our own forward kernels and `NEWEST` only with `own_kernels`.
    Without `fused`, only fusions of the forward pass or the stem."""

    def __init__(self, fused: bool, deterministic: bool = False, own_kernels: bool = False) -> None:
        self.fused, self.deterministic, self.own_kernels = fused, deterministic, own_kernels
        self.asked: dict[str, Any] = {}  # problem -> its launches

    def times(self, problems: dict[str, Any], others: Sequence[Any] = ()) -> dict[str, float]:
        for lower in others:
            with suppress(GraphError):
                lower()
        return {problem: self._time(problem, lower) for problem, lower in problems.items()}

    def _time(self, problem: str, lower: Callable[[], Program]) -> float:
        try:
            launched = [(launch.operation, launch.flops, *map(_sizes, (launch.reads, launch.writes)))
                        for launch in lower().launches]
        except GraphError:
            return math.inf
        assert self.asked.setdefault(problem, launched) == launched, "problems that differ have other names"
        if _is_one_of(problem, OF_OUR_OWN):
            return (0.39 if problem.startswith("Conv1x1ForwardSumRelu ") else 0.4) if self.own_kernels else 9.0
        return 9.0 if _is_one_of(problem, BY_THE_CLOCK) and not self.fused else 1.0


def _is_one_of(problem: str, labels: Sequence[str]) -> bool:
    """Whether the problem names one of these kernels (some names are prefixes of others)."""
    found = [label for label in {*BY_THE_CLOCK, *OF_OUR_OWN} if problem.startswith(f"{label} ")]
    return max(found, key=len, default="") in labels


class CountingGpu:
    """Memory is only counted, and work is done at once."""

    num_multiprocessors = 132

    def __init__(self, capability: tuple[int, int] = HOPPER, shared_kib: int = 227) -> None:
        self.capability, self.max_shared_bytes = capability, shared_kib << 10
        self.copied: list[tuple[int, int, int]] = []
        self._memory = count(1 << 40, 1 << 30)

    def allocate(self, num_bytes: int) -> int:
        return next(self._memory)

    def copy(self, *arguments: int) -> None:
        self.copied.append(arguments)

    def fill(self, address: int, byte: int, num_bytes: int) -> None: ...

    def capture(self, enqueue: Callable[[], None]) -> None:
        enqueue()

    def replay(self, graph: None) -> None: ...

    def tensor_map(self, *arguments: Any) -> bytes:
        return b""


def lower(depth: int, batch: int, size: int, training: bool, fused: bool = False,
          **options: Any) -> tuple[Lowered, ParameterStore]:
    graph = passes.bn_relu(passes.bn_add_relu(Graph.from_json(resnet(depth, 1000).tojson())))
    return lower_graph(graph, {"data": (batch, size, size, 3), "softmax_label": (batch,)}, training, fused=fused,
                       **options)


def lower_graph(graph: Graph, shapes: dict[str, tuple[int, ...]], training: bool, dtype: str = "float16",
                fused: bool = False, group: Any = None, deterministic: bool = False,
                capability: tuple[int, int] = HOPPER, shared_kib: int = 227, planner: FakePlanner | None = None,
                recurrent: Any = None, own_kernels: bool = False) -> tuple[Lowered, ParameterStore]:
    batch, height, width, channels = shapes["data"]
    inferred = graph.infer_shapes(shapes)
    frozen, gpu = roles.frozen(graph), CountingGpu(capability, shared_kib)
    tools: Any = SimpleNamespace(gpu=gpu, kernels=FakeKernels(), convolutions=FakeConvolutions(), recurrent=recurrent,
                                 group=group, planner=planner or FakePlanner(fused, deterministic, own_kernels))
    store = ParameterStore(
        parameters_of(graph, inferred, tuple(shapes)), {name: inferred[Ref(name)] for name in graph.aux}, dtype,
        frozen=frozen, folded=Folded(graph, shapes, dtype, tools, frozen_only=True).store if frozen else None)

    def kept(name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
        return Buffer(name, shape, dtype, persistent=True)

    persistent = Persistent(
        kept("data", (batch, height, width, padded_channels(channels)), dtype), kept("label", (batch,), "float32"),
        kept("own_share", (1,), "float32"), kept("seed", (2,), "uint32"),
        kept("probabilities", (batch, math.prod(inferred[graph.outputs[0]][1:])), "float32"),
        kept("metrics", (32,), "uint8"),
        kept("num_valid", (1,), "int32"), kept("loss_scale", (1,), "float32"), kept("tickets", (64,), "int32"),
        kept("class_weights", (1000,), "float32") if graph[graph.outputs[0].node].get("class_weights", ()) else None)
    price = Prices(shapes, store, persistent, tools)
    if training:
        graph = pipeline.training_step(graph, shapes, dtype, price, grouped=group is not None)
    else:
        graph = passes.precision(passes.layer_scale(graph), dtype)
        graph = pipeline.cover(conv_epilogue(softmax_bias(graph)), price)
    lowering = lower_to_launches(graph, graph.infer_shapes(shapes), store, persistent, tools)
    lowering.program.load()
    return Lowered(lowering.program, lowering.ready, lowering.buffers, price.choices, graph), store


@dataclass
class Lowered:
    """A graph during lowering."""

    program: Program
    ready: dict[str, int]
    buffers: Mapping[Ref, Buffer]
    choices: list[Choice]
    graph: Graph


def test_plans_get_the_addresses_of_their_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans get addresses in the order of `Plan.enqueue`. A plan with statistics gets its sums as two addresses; the
    second is in the middle of the buffer."""
    given: list[tuple[str, tuple[int, ...], int]] = []

    def plan(self: FakeConvolutions, problem: Any) -> Any:
        return SimpleNamespace(workspace_bytes=4096, time_ms=1.0, enqueue=lambda *addresses, workspace: given.append(
            (problem.kind, addresses, workspace)))

    monkeypatch.setattr(FakeConvolutions, "plan", plan)
    lowering, _ = lower(18, 4, 64, training=True, fused=True)
    lowering.program.place(1 << 30)
    for launch in lowering.program.launches:
        if launch.operation not in ("fprop", "fprop_stats", "dgrad", "wgrad"):
            continue
        launch.enqueue()
        kind, addresses, workspace = given.pop()
        sums = launch.writes[-1]
        expected = [*(buffer.address for buffer in (*launch.reads, *launch.writes))]
        if kind == "fprop_stats":
            expected.append(sums.address + sums.num_bytes // 2)
        assert (kind, list(addresses)) == (launch.operation, expected)
        assert workspace == lowering.program.scratch[0].address > 1 << 30


def test_deterministic_runs_take_what_sums_in_a_fixed_order() -> None:
    for deterministic in (False, True):
        lowering, _ = lower(50, 4, 64, training=True, fused=True, deterministic=deterministic)
        operations = {launch.operation for launch in lowering.program.launches}
        assert ("fprop_stats" not in operations) == ("stem_forward" in operations) == deterministic
        assert {"dgrad_reduce", "norm_backward"} <= operations
        assert bool(lowering.choices) == (not deterministic)


@pytest.mark.long(but=["capability1*"])
@pytest.mark.parametrize("capability, shared_kib", [((7, 5), 64), ((8, 0), 163), ((8, 6), 99), ((8, 9), 99),
                                                    ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)])
def test_what_a_gpu_cannot_take_is_not_taken(capability: tuple[int, int], shared_kib: int) -> None:
    """Neither older nor newer GPUs have Hopper's instructions; the oldest lack those of the stem's kernels, too. On
    these GPUs the step is lowered without Hopper's kernels. test_compile.py compiles the remaining kernels for each of
    these GPUs.
    """
    lowering, _ = lower(50, 4, 224, training=True, fused=True, capability=capability, shared_kib=shared_kib)
    operations = {launch.operation for launch in lowering.program.launches}
    hopper, stem = {"dgrad_reduce", "norm_backward"}, {"stem_fprop", "stem_wgrad"}
    taken = (hopper if capability == HOPPER else set()) | (stem if capability >= (8, 0) else set())
    assert operations & (hopper | stem) == taken
    clocked = {*BY_THE_CLOCK, "ConvolutionStatistics", "StemFprop", "StemWgrad"}
    assert {choice.kernel for choice in lowering.choices} & clocked == {"ConvolutionStatistics"} | (
        {"DgradReduce", "NormBackwardReduce", "NormBackward"} if hopper & taken else set()) | (
        {"StemFprop", "StemWgrad"} if stem & taken else set())
    written_from = {kernel.strip("!"): source for source, kernel in all_kernels()}
    sources = {written_from[operation] for operation in operations & written_from.keys()}
    assert all(serves(source, capability) for source in sources), "each of them can be compiled for this GPU"
    assert {"batch_norm.cu", "batch_norm_pair.cu", "pooling.cu", "softmax.cu"} <= sources
    check_memory(lowering.program)


@pytest.mark.long(but=["18*"])
@pytest.mark.parametrize("depth, batch_norms, projections", [(18, 20, 3), (50, 53, 4), (152, 155, 4)])
def test_launches_of_a_training_step(depth: int, batch_norms: int, projections: int) -> None:
    lowering, store = lower(depth, 4, 64, training=True)
    operations = [launch.operation for launch in lowering.program.launches]
    with_sums = operations.count("fprop_stats") + operations.count("stem_fprop")
    assert with_sums == batch_norms, "the statistics of every BatchNorm come with its convolution"
    assert operations.count("wgrad") == batch_norms and operations.count("dgrad") == batch_norms
    alone = batch_norms - 1 - 2 * projections  # all but the stem's, and but the pairs whose outputs are added
    assert operations.count("batch_norm_apply") == operations.count("batch_norm_backward_apply") == alone
    assert operations.count("batch_norm_pair_apply") == projections
    assert operations.count("batch_norm_pair_backward_apply") == projections
    assert operations.count("batch_norm_relu_max_pool") == 1, "the stem's"
    assert "add" not in operations, "sums of gradients are taken by the kernels that read them"
    assert lowering.ready.keys() == store.parameters.keys()
    assert lowering.ready["classifier_weight"] < lowering.ready["stem_conv_weight"] == len(operations)
    for launch in lowering.program.launches:
        launch.enqueue()


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_launches_of_the_losses(training: bool) -> None:
    """One kernel for each loss. Without weights, and in inference, the softmax is the instance without weights."""
    plain = passes.bn_relu(passes.bn_add_relu(Graph.from_json(resnet(18, 1000).tojson())))
    shapes = {"data": (4, 64, 64, 3), "softmax_label": (4,)}
    kernels = {}
    for name, graph in (("softmax", plain), ("sigmoid", passes.binary_cross_entropy(plain, 0.2)),
                        ("weighted", passes.weigh_classes(plain, [0.5, 1.5] * 500)),
                        ("focal", passes.custom_loss(plain, json_of(focal)))):
        lowering, _ = lower_graph(graph, shapes, training)
        loss, count_hits = (launch for launch in lowering.program.launches if launch.node == "softmax")
        assert count_hits.operation == "add_metrics"
        kernels[name] = loss.operation, [buffer.name for buffer in loss.reads]
        check_memory(lowering.program)
    assert [operation for operation, _ in kernels.values()] == [
        "softmax_cross_entropy", "sigmoid_cross_entropy", "softmax_cross_entropy", "custom_loss"]
    assert {name: "class_weights" in reads for name, (_, reads) in kernels.items()} == {
        "softmax": False, "sigmoid": False, "weighted": training, "focal": False}
    assert all(("own_share" in reads) == training for _, reads in kernels.values())


def test_launches_of_folded_inference() -> None:
    graph = passes.fold_bn(passes.bn_relu(passes.bn_add_relu(Graph.from_json(resnet(50, 1000).tojson()))))
    lowering, store = lower_graph(graph, {"data": (4, 64, 64, 3), "softmax_label": (4,)}, training=False)
    operations = [launch.operation for launch in lowering.program.launches]
    assert operations.count("fprop_bias_relu") == 33 and operations.count("fprop_bias_add_relu") == 16
    assert operations.count("fprop_bias") == 4, "the shortcuts with a convolution"
    assert sorted(set(operations) - {"fprop_bias", "fprop_bias_relu", "fprop_bias_add_relu"}) == [
        "add_metrics", "fprop", "global_average_pool", "max_pool", "softmax_cross_entropy"]
    assert not store.statistics.slices
    check_memory(lowering.program)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_inference_that_ends_at_the_features(dtype: str) -> None:
    """What the classifier reads is handed out in float32 in place of probabilities; no classifier, no softmax."""
    graph = Graph.from_json(resnet(18, 1000).tojson())
    features = Graph(graph, roles.classifier(graph).inputs[:1], graph.attrs)
    lowering, store = lower_graph(passes.fold_bn(pipeline.run(pipeline.FUSED, features)), {"data": (4, 64, 64, 3)},
                                  training=False, dtype=dtype)
    *_, pool, hand_out = lowering.program.launches
    assert (pool.operation, hand_out.operation) == ("global_average_pool", "convert_input")
    assert hand_out.reads == pool.writes and [each.dtype for each in hand_out.reads] == [dtype]
    (answer,) = hand_out.writes
    assert (answer.name, answer.shape, answer.dtype) == ("probabilities", (4, 512), "float32")
    assert not any(name.startswith("classifier") for name in store.parameters)
    check_memory(lowering.program)


@pytest.mark.parametrize("training, operation", [(False, "conv1x1_forward"), (True, "dgrad_stream")])
def test_the_data_of_a_convolution_are_not_written_over(training: bool, operation: str) -> None:
    """In y = relu(conv(x) + b), y may overwrite b, unless b is x: one element of y needs several elements of x. In
    training, the gradient of x in y = conv(x) + x must not overwrite y's gradient, which it needs twice."""
    def conv_bn(x: Any, name: str, kernel: int) -> Any:
        x = mx.sym.Convolution(x, kernel=(kernel, kernel), pad=(kernel // 2, kernel // 2), num_filter=256,
                               no_bias=True, layout="NHWC", name=name)
        return mx.sym.BatchNorm(x, axis=3, fix_gamma=False, name=f"{name}_bn")

    def in_place(add_data: bool) -> list[bool]:
        first = mx.sym.relu(conv_bn(mx.sym.Variable("data"), "a", 3))
        x = mx.sym.relu(conv_bn(first, "b", 3) + first)
        addend = x if add_data else first
        if training:
            x = mx.sym.Convolution(x, kernel=(1, 1), num_filter=256, layout="NHWC", name="c") + addend
        else:
            x = mx.sym.relu(conv_bn(x, "c", 1) + addend)
        x = mx.sym.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1), layout="NHWC")
        x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=1000, name="classifier")
        graph = passes.bn_relu(passes.bn_add_relu(Graph.from_json(mx.sym.SoftmaxOutput(x, name="softmax").tojson())))
        graph = graph if training else passes.fold_bn(graph)
        lowering, _ = lower_graph(graph, {"data": (2, 9, 11, 8), "softmax_label": (2,)}, training, fused=True,
                                  own_kernels=True)
        check_memory(lowering.program)
        return [bool(launch.in_place) for launch in lowering.program.launches if launch.operation == operation]

    assert in_place(add_data=True) == [False]
    if not training:
        assert in_place(add_data=False) == [True]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name, grouped, averages", [("resnext50_32x4d", 16, 0), ("resnet50d", 0, 3)])
def test_grouped_convolutions_and_average_pooling(name: str, grouped: int, averages: int, training: bool) -> None:
    """Nothing is fused into a grouped convolution. Each group has its share of the weight's channels."""
    graph = passes.bn_relu(passes.bn_add_relu(models.create(name).graph))
    graph = graph if training else passes.fold_bn(graph)
    shapes: dict[str, tuple[int, ...]] = {"data": (4, 65, 65, 3), "softmax_label": (4,)}
    lowering, store = lower_graph(graph, shapes, training, fused=True)
    operations = Counter(launch.operation for launch in lowering.program.launches)
    if training:
        convolutions = graph.operators()["Convolution"]
        assert operations["batch_norm_statistics"] == grouped
        assert operations["fprop"] == grouped + 1 and operations["fprop_stats"] == convolutions - grouped
        assert operations["average_pool"] == operations["average_pool_backward"] == averages
    else:
        assert operations["fprop"] == operations["bias_add_relu"] + 1 == grouped + 1
        assert operations["average_pool"] == averages
    if grouped:
        assert store.parameters["stage1_block1_conv2_weight"].device_shape == (128, 3, 3, 4)
    check_memory(lowering.program)


@pytest.mark.parametrize("name, convolutions, sums", [("resnet18_v2", 20, 8), ("resnet50_v2", 53, 16)])
def test_a_pre_activation_network(name: str, convolutions: int, sums: int) -> None:
    """A BatchNorm that reads a sum computes its own statistics, and stays in inference because no convolution precedes
    it. Its backward pass adds the shortcut's gradient, so only sums of the forward pass are separate launches."""
    graph = passes.bn_relu(passes.bn_add_relu(models.create(name).graph))
    norms = graph.operators()["BatchNormRelu"]
    alone = sums + 1  # in each block and after the last; the first of them reads the stem's max pooling
    shapes: dict[str, tuple[int, ...]] = {"data": (4, 64, 64, 3), "softmax_label": (4,)}
    lowering, store = lower_graph(graph, shapes, training=True, fused=True)
    operations = Counter(launch.operation for launch in lowering.program.launches)
    assert operations["batch_norm_statistics"] == alone
    assert operations["stem_fprop"] + operations["fprop_stats"] == norms - alone
    assert operations["stem_fprop"] + operations["fprop_stats"] + operations["fprop"] == convolutions + 1
    assert operations["add"] == sums
    # In each block except those with a projection, whose shortcut reads the BatchNorm's output.
    assert sum(node.op.endswith("BackwardApplyAdd") for node in lowering.graph) == sums - 4
    assert lowering.ready.keys() == store.parameters.keys()
    check_memory(lowering.program)
    lowering, _ = lower_graph(passes.fold_bn(graph), shapes, training=False)
    operations = Counter(launch.operation for launch in lowering.program.launches)
    assert operations["batch_norm_apply"] == alone and operations["fprop_bias_relu"] == norms - alone
    assert operations["add"] == sums
    check_memory(lowering.program)


@pytest.mark.long(but=["*-resnet18-image-*"])
@pytest.mark.parametrize("name, mode, products", [("resnet18", "image", 0), ("resnet50", "image", 0),
                                                  ("resnet50", "block", 0), ("resnet50d", "image", 0),
                                                  ("resnet50_v2", "image", 2 * 15)])
@pytest.mark.parametrize("fused", [False, True])
def test_a_network_that_drops(name: str, mode: Any, products: int, fused: bool) -> None:
    """The launches of the same network, plus two for the masks and two for dropout. Where branches end in a BatchNorm,
    its launches include the products with masks."""
    plain = models.create(name).graph
    graph = passes.dropout(passes.stochastic_depth(plain, 0.2, mode), 0.1)
    shapes: dict[str, tuple[int, ...]] = {"data": (4, 96, 96, 3), "softmax_label": (4,)}
    lowering, store = lower_graph(graph, shapes, training=True, fused=fused)
    without, _ = lower_graph(plain, shapes, training=True, fused=fused)
    operations, before = (Counter(launch.operation for launch in each.program.launches) for each in (lowering, without))
    dropped = Counter({"dropout_factors": 1, "dropout_elements": 2, "dropout_images": products})
    alone = name == "resnet50_v2" and fused  # where a stage ends, masks are between a BatchNorm and a convolution
    dropped.update(dict.fromkeys(("batch_norm_backward_reduce", "dgrad", "wgrad"), 2 * alone))
    assert operations - before == +dropped
    assert before - operations == +Counter({"norm_backward": 2 * alone, "sum_parts": 2 * alone})
    assert lowering.ready.keys() == store.parameters.keys()
    for launch in lowering.program.launches:
        launch.enqueue()
    check_memory(lowering.program)
    check_operators(graph)
    inference = pipeline.inference(graph, "float16", fewest)
    assert inference == pipeline.inference(plain, "float16", fewest)


def test_inference_takes_over_every_parameter() -> None:
    graph = passes.bn_relu(passes.bn_add_relu(Graph.from_json(resnet(50, 1000).tojson())))
    shapes: dict[str, tuple[int, ...]] = {"data": (4, 64, 64, 3), "softmax_label": (4,)}
    _, trained = lower_graph(graph, shapes, training=True)
    gpu, launched = CountingGpu(), []
    kernel = SimpleNamespace(launch=lambda grid, block, *arguments: launched.append((grid[0], *arguments)))
    tools: Any = SimpleNamespace(gpu=gpu, kernels=SimpleNamespace(get=lambda source, name: kernel))
    folded = Folded(graph, shapes, "float16", tools)
    folded.fold(trained)
    own = folded.store
    assert len(launched) == 53 and not own.statistics.slices, "every BatchNorm is folded"
    assert launched[0][0] == 64 and launched[0][-1].value == 7 * 7 * 4, "the stem, a padded channel included"
    written = [address for launch in launched for address in launch[7:9]] + [to for to, _, _ in gpu.copied]
    assert sorted(written) == sorted(buffer.address for buffer in own.values.values())
    assert [size for _, _, size in gpu.copied] == [2 * 1000 * 2048, 4 * 1000]


@pytest.mark.long(but=["stage2-resnet50"])
@pytest.mark.parametrize("name", ["resnet50", "resnet50d", "resnet50_v2"])
@pytest.mark.parametrize("prefix", ["stem", "stage2", "backbone"])
def test_a_frozen_network(name: str, prefix: str) -> None:
    """Frozen convolutions run as in inference: one into which a BatchNorm is folded reads a folded copy of its weights.
    Frozen parameters have no gradient and no optimizer state."""
    whole = models.create(name).graph
    shapes: dict[str, tuple[int, ...]] = {"data": (4, 64, 64, 3), "softmax_label": (4,)}
    graph = pipeline.run(pipeline.FUSED, passes.freeze(whole, prefix))
    frozen = roles.frozen(graph)
    lowering, store = lower_graph(graph, shapes, training=True, fused=True)
    assert lowering.ready.keys() == store.gradients.keys() == store.parameters.keys() - frozen
    assert all(not array.slices.keys() & frozen for array in (*store.states, store.ema, store.ema_statistics))
    ends = {"master": store.ema, "statistics": store.ema_statistics}
    assert all(list(store.arrays[name].slices)[: len(ema.slices)] == list(ema.slices) for name, ema in ends.items())
    assert store.folded and store.folded.values.keys() - frozen == {
        each.bias for each in passes.foldings(graph, frozen_only=True)}
    check_memory(lowering.program)
    everything, _ = lower_graph(pipeline.run(pipeline.FUSED, whole), shapes, training=True, fused=True)
    assert len(lowering.program.launches) < len(everything.program.launches)
    assert lowering.program.arena_bytes <= everything.program.arena_bytes


def test_what_is_frozen_takes_the_kernels_of_inference() -> None:
    graph = pipeline.run(pipeline.FUSED, passes.freeze(models.create("resnet50").graph, "stage3"))
    shapes = {"data": (16, 224, 224, 3), "softmax_label": (16,)}
    lowering, _ = lower_graph(graph, shapes, training=True, fused=True, own_kernels=True)
    operations = Counter(launch.operation for launch in lowering.program.launches)
    assert (operations["stem_pool"], operations["conv1x1_pair"]) == (1, 2)  # 3 - 1 pairs: one would begin with a sum
    check_memory(lowering.program)


@pytest.mark.parametrize("size, is_ours", [(224, True), (225, False), (1024, False)])
def test_the_stem_is_ours_where_its_rows_are_aligned_and_fit(size: int, is_ours: bool) -> None:
    lowering, _ = lower(18, 1, size, training=True)
    operations = [launch.operation for launch in lowering.program.launches if launch.node.startswith("stem_conv")]
    assert operations == (["stem_fprop", "stem_wgrad", "stem_wgrad_sum"] if is_ours else ["fprop_stats", "wgrad"])


def test_launches_of_the_fused_backward_pass() -> None:
    """Gradients of the data of 1x1 convolutions come with the sums of the BatchNorm that reads them. In stages 1 and 2
    one launch goes from a BatchNorm through a convolution to the preceding BatchNorm. Nothing is done twice or left
    out."""
    lowering, store = lower(50, 256, 224, training=True, fused=True)
    launches = lowering.program.launches
    operations = [launch.operation for launch in launches]
    assert operations.count("norm_backward") == 5 + 4
    assert operations.count("sum_parts") == 9 and operations.count("wgrad") == 53 - 9, "without the stem's"
    assert operations.count("batch_norm_pair_backward_apply") == 2, "in stage 2 one of the pair goes its own way"
    fused = operations.count("dgrad_reduce")
    assert fused == 11 + 1 and operations.count("dgrad") == 54 - 1 - 9 - fused
    taken = Counter(choice.kernel for choice in lowering.choices)
    assert taken["StemFprop"] == taken["StemWgrad"] == 1
    assert (taken["ConvolutionStatistics"], taken["DgradReduce"]) == (52, fused)
    assert (taken["NormBackwardReduce"], taken["NormBackward"]) == (7, 2)
    assert lowering.ready.keys() == store.parameters.keys()
    written = [buffer for launch in launches for buffer in launch.writes if buffer in store.gradients.values()]
    assert len(written) == len(set(written)) == len(store.parameters)
    plain, _ = lower(50, 256, 224, training=True)
    assert lowering.program.arena_bytes < plain.program.arena_bytes, "the gradients in stage 1 are not stored"


def test_a_grid_without_blocks_is_no_launch() -> None:
    """A grid is empty, for example, for the moving averages of running statistics if all of these are frozen."""
    launched: list[Any] = []
    kernel = Kernel.__new__(Kernel)
    kernel.__dict__.update(_gpu=SimpleNamespace(launch=lambda *arguments: launched.append(arguments[1])),
                           _kernel=SimpleNamespace(handle=1), _shared_bytes=0)
    kernel.launch((0, 1, 1), (256, 1, 1), 4096)
    kernel.launch((2, 1, 1), (256, 1, 1), 4096)
    assert launched == [(2, 1, 1)]


def test_launches_of_our_own_kernels() -> None:
    """Kernels for Hopper are used on Hopper GPUs, and not on a GPU that lacks their instructions."""
    graph, shapes = Graph.from_json(resnet(50, 1000).tojson()), {"data": (16, 224, 224, 3), "softmax_label": (16,)}
    folded = passes.fold_bn(pipeline.run(pipeline.FUSED, graph))
    sums = 3  # inference: in the first block of stages 1 to 3; in stage 4 the weights are too large for a block
    pairs = 3 - 1  # inference: in stage 1, except where the first convolution is in a sum
    norms = 3 + 4 + 5  # training: a block's first convolution, after each block of stages 1 and 2, and within stage 3
    within = 3 + 4 + 6  # training: a block's last convolution, except in stage 4, which has too many weights
    for capability, training, wanted in ((HOPPER, True, 34 - norms - within), (HOPPER, False, 34 - sums - 2 * pairs),
                                         ((8, 0), True, 0)):
        lowering, _ = lower_graph(pipeline.run(pipeline.FUSED, graph) if training else folded, shapes, training,
                                  fused=True, capability=capability, own_kernels=True)
        operations = Counter(launch.operation for launch in lowering.program.launches)
        assert operations["conv1x1_statistics" if training else "conv1x1_forward"] == wanted
        assert operations["stem_pool"] == (not training)
        on_hopper = training and capability == HOPPER
        assert operations["stem_forward"] == operations["stem_weights"] == on_hopper
        assert operations["stem_fprop"] == operations["stem_wgrad"] == (training and not on_hopper)
        assert operations["conv3x3_weights"] == (13 if on_hopper else 0), "those with stride 1"
        assert operations["dgrad_stream"] == (1 + 5 + 2 if on_hopper else 0), "to 256 and 512 channels"
        assert operations["conv1x1_pair"] == (0 if training else pairs)
        assert operations["conv3x3_forward"] == (3 if capability == HOPPER and not training else 0), "in stage 1"
        assert operations["norm_conv3x3"] == (3 if on_hopper else 0), "the same in training"
        assert operations["conv3x3_dgrad_reduce"] == (3 if on_hopper else 0)
        assert operations["norm_conv1x1"] == (norms if on_hopper else 0)
        assert operations["norm_relu_conv1x1"] == (within if on_hopper else 0)
        assert operations["norm_dgrad"] == (6 if on_hopper else 0), "in stage 3, also of a pair"
        assert lowering.graph.operators()["Conv1x1ForwardSumRelu"] == (0 if training else sums)
        for launch in lowering.program.launches:
            launch.enqueue()
        check_memory(lowering.program)


def test_what_the_sanitizers_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The networks for the sanitizers can be lowered, for training and inference, and contain each of our kernels for
    image operators."""
    used: set[str] = set()

    def get(self: FakeKernels, source: str, kernel: str) -> Any:
        used.add(kernel.partition("<")[0])
        return SimpleNamespace(launch=lambda *arguments, **options: None)

    monkeypatch.setattr(FakeKernels, "get", get)
    for case in test_sanitizer.networks():
        monkeypatch.setattr(prices, "deterministic", case.price)
        graph, shapes = test_sanitizer.graph_of(case)
        lower_graph(graph, shapes, True, case.dtype, deterministic=True)
        folded = passes.fold_bn(pipeline.run(pipeline.FUSED, passes.remove_dropout(graph)))
        lower_graph(folded, shapes, False, case.dtype, deterministic=True)
    # kernels for groups, words, updates, INT8
    others = ("batch_norm_group.cu", "embedding.cu", "optimizer.cu", "quantised")
    around = {"convert_input", "copy", "exchange", "exchange_boxes", "fold_batch_norm", "mix_images", "widen"}
    wanted = {kernel.strip("!") for source, kernel in all_kernels() if not source.startswith(others)} - around
    assert wanted <= used, wanted - used


@pytest.mark.parametrize("depth, training, fused", [(18, True, False), (18, False, False), (50, True, True)])
def test_no_two_living_buffers_of_a_network_share_memory(depth: int, training: bool, fused: bool) -> None:
    lowering, _ = lower(depth, 4, 64, training, fused)
    check_memory(lowering.program)


def check_memory(program: Program) -> None:
    """Execute the plan: every read must see the whole of what was last written to that buffer."""
    writers: list[Buffer] = []  # in the order in which they were written
    memory = np.full(-(-program.arena_bytes // 256), -1)  # for each page of 256 bytes, the latest write in that order
    written: dict[Buffer, int] = {}

    def pages(buffer: Buffer) -> slice:
        return slice(buffer.address // 256, -(-(buffer.address + buffer.num_bytes) // 256))

    for launch in program.launches:
        for buffer in launch.reads:
            if not buffer.persistent:
                assert (memory[pages(buffer)] == written[buffer]).all(), (launch.node, buffer.name)
        for one, other in combinations([b for b in launch.writes if not b.persistent], 2):
            apart = pages(one).stop <= pages(other).start or pages(other).stop <= pages(one).start
            assert apart, (launch.node, one.name, other.name)
        for buffer in launch.writes:
            if buffer.persistent:
                continue
            assert buffer.address + buffer.num_bytes <= program.arena_bytes
            overwritten = {writers[i] for i in np.unique(memory[pages(buffer)]) if i >= 0} & set(launch.reads)
            allowed = {launch.in_place[0]} if launch.in_place and launch.in_place[1] is buffer else set()
            assert overwritten - {buffer} <= allowed, (launch.node, buffer.name)
            written[buffer] = len(writers)
            memory[pages(buffer)] = len(writers)
            writers.append(buffer)


def test_memory_of_random_programs() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        program, alive = Program(), []
        for number in range(40):
            reads = [alive[i] for i in random.permutation(len(alive))[:2]]
            write = Buffer(f"b{number}", (int(random.integers(1, 5000)),), "uint8")
            if reads and random.random() < 0.5:
                write.shape = reads[0].shape
            in_place = (reads[0], write) if reads and write.shape == reads[0].shape else None
            program.launches.append(Launch("n", "o", lambda: None, tuple(reads), (write,), in_place=in_place))
            alive = [*alive[-4:], write]
        program.plan_memory()
        check_memory(program)
        total = sum(buffer.num_bytes for buffer in program.buffers())
        assert program.arena_bytes < total, "memory is used again"


@pytest.mark.parametrize("shape, device_shape", [
    ((64, 7, 7, 3), (64, 7, 7, 4)), ((10, 512), (16, 1, 1, 512)), ((10,), (16,)), ((8, 3, 3, 8), (8, 3, 3, 8))])
def test_parameters_keep_their_values(shape: tuple[int, ...], device_shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(1, 1, shape).astype(np.float32)
    parameter = Parameter("p", shape, device_shape, is_weight=True)
    flat = parameter.to_device(values)
    assert flat.size == np.prod(device_shape) and np.count_nonzero(flat) == values.size
    assert np.array_equal(parameter.to_canonical(flat), values)


@pytest.mark.parametrize("depth, dtype", [(18, "float32"), (50, "float16")])
def test_too_little_memory_names_the_largest_batch_that_fits(depth: int, dtype: str, rng: np.random.Generator) -> None:
    """For any free memory, the step that is really lowered fits with the batch in the message, which is at least 3/4 of
    what the memory would hold."""
    graph = passes.bn_relu(passes.bn_add_relu(Graph.from_json(resnet(depth, 1000).tojson())))
    free = int(rng.uniform(1.5, 20) * 2**30)
    print("free", free)

    def check(batch: int, free: int = free) -> ParameterStore:
        shapes = {"data": (batch, 224, 160, 3), "softmax_label": (batch,)}
        inferred = graph.infer_shapes(shapes)
        statistics = {name: inferred[Ref(name)] for name in graph.aux}
        store = ParameterStore(parameters_of(graph, inferred, tuple(shapes)), statistics, dtype)
        step = pipeline.training_step(graph, shapes, dtype, plain)
        check_fits(step, shapes, store, free, 80 * 2**30)
        return store

    with pytest.raises(GraphError, match=r"of 80.0 GiB free, but batches of 5000 images of 224x160 need "
                                         r"[\d.]+ GiB: use a batch size of at most (\d+)$") as error:
        check(5000)
    largest = int(str(error.value).rsplit(" ", 1)[1])
    store = check(largest)
    fixed = sum(array.num_bytes for array in store.arrays.values())
    lowered = lower_graph(graph, {"data": (largest, 224, 160, 3), "softmax_label": (largest,)}, True, dtype)[0]
    images = largest * 224 * 160 * 4 * np.dtype(dtype).itemsize
    assert 0.75 * free < lowered.program.arena_bytes + images + fixed < free
    with pytest.raises(GraphError, match="free memory on it, or use smaller images"):
        check(1, free=2**27)


@pytest.mark.parametrize("free_gib, batch, wanted", [
    (1000, 2674, None), (1000, 2675, 2674), (140, 4000, 2674), (20, 4000, 443)])
def test_no_batch_that_kernels_cannot_number_is_taken_or_advised(free_gib: int, batch: int, wanted: int | None) -> None:
    """ResNet-50's first convolution has 112 x 112 x 64 numbers per image: 2^31 with 2,675 images."""
    graph = passes.bn_relu(passes.bn_add_relu(Graph.from_json(resnet(50, 1000).tojson())))
    shapes = {"data": (batch, 224, 224, 3), "softmax_label": (batch,)}
    store = ParameterStore([], {}, "float16")
    step = pipeline.training_step(graph, shapes, "float16", plain)
    with pytest.raises(GraphError, match=f"use a batch size of at most {wanted}$") if wanted else nullcontext():
        check_fits(step, shapes, store, free_gib * 2**30, 1000 * 2**30)


def test_the_largest_batch_is_one_that_kernels_can_number(make_step: Callable[..., training_step.TrainingStep]) -> None:
    """On a GPU with a TiB of memory, the indices limit the batch: ResNet-18 has 32 x 32 x 64 numbers per image of 64
    pixels."""
    assert make_step(64).largest_batch() == (2**31 - 1) // 2**16
    assert make_step(32, largest_image_size=64).largest_batch() == (2**31 - 1) // 2**16, "when images have grown"


@pytest.mark.parametrize("training", [True, False])
def test_a_tensor_that_kernels_cannot_number_is_named(training: bool) -> None:
    graph = passes.bn_relu(Graph.from_json(bottlenecks(stem=7).tojson()))
    shapes = {"data": (2675, 224, 224, 3), "softmax_label": (2675,)}
    with pytest.raises(GraphError, match=r"'stem_conv' has 2,147,532,800 elements \(2675, 112, 112, 64\), more than "
                                         "the 2,147,483,647 of the cuda executor: use a smaller batch size"):
        lower_graph(graph, shapes, training)


def test_counts_are_not_cut_off() -> None:
    assert kernel_library.count(2**32 - 1).value == 2**32 - 1
    for value in (2**32, -1):
        with pytest.raises(GraphError, match="does not fit into a kernel's 32-bit argument"):
            kernel_library.count(value)


def test_refusals_name_the_node() -> None:
    data = mx.sym.LeakyReLU(mx.sym.Variable("data"), act_type="prelu", name="squash")
    head = mx.sym.FullyConnected(mx.sym.Flatten(data), num_hidden=8, name="fc")
    graph = Graph.from_json(mx.sym.SoftmaxOutput(head, name="softmax").tojson())
    with pytest.raises(GraphError, match="cannot run LeakyReLU 'squash': use the executor mxnet"):
        lower_graph(graph, {"data": (2, 8, 8, 8), "softmax_label": (2,)}, training=False)
    data = mx.sym.Variable("data")
    data = mx.sym.Concat(data, mx.sym.relu(data), dim=1, name="rows")
    head = mx.sym.FullyConnected(mx.sym.Flatten(data), num_hidden=8, name="fc")
    graph = Graph.from_json(mx.sym.SoftmaxOutput(head, name="softmax").tojson())
    with pytest.raises(GraphError, match=r"Concat 'rows' works along dimension 1 of .*: there is a kernel for the"):
        lower_graph(graph, {"data": (2, 8, 8, 8), "softmax_label": (2,)}, training=True)


def test_networks_of_the_zoo(tmp_path: Path) -> None:
    """Each network is lowered, or refused in a sentence that names one of the network's operators."""
    refusals = {
        "resnet18_v1": "",
        "resnet50_v1": "",
        "resnet18_v2": "BatchNorm '.*' has fix_gamma=True, .*: set it to False$",
        "mobilenet1_0": "",
        "mobilenet_v2_1_0": "",
        "vgg11": "",
        "densenet121": "",
        "squeezenet1_0": "",
    }
    shapes = {"data": (2, 224, 224, 3), "softmax_label": (2,)}
    for name, refusal in refusals.items():
        scores = getattr(mx.gluon.model_zoo.vision, name)()(mx.sym.var("data"))
        nchw = Graph.from_json(mx.sym.SoftmaxOutput(scores, name="softmax").tojson())
        if not refusal:
            with pytest.raises(GraphError, match=r"^Convolution '.*' is not NHWC: run passes.layout"):
                check_operators(nchw)
        graph = passes.bn_relu(passes.bn_add_relu(passes.layout(nchw, "NHWC", inputs=["data"])))
        with pytest.raises(GraphError, match=refusal) if refusal else nullcontext():
            check_operators(graph)
            lower_graph(graph, shapes, training=True)


@pytest.mark.parametrize("fused", [False, True])
def test_random_networks(fused: bool, rng: np.random.Generator) -> None:
    """Operators in any order: every timed problem has a unique name, every tensor has the graph's shape, every gradient
    is written except those of biases before a BatchNorm, which are 0, and no memory is shared."""
    shapes: dict[str, tuple[int, ...]] = {"data": (3, 17, 22, 4), "softmax_label": (3,)}
    planner = FakePlanner(fused)
    for _ in range(20):
        graph = passes.bn_relu(passes.bn_add_relu(Graph.from_json(random_network(rng).tojson())))
        lowering, store = lower_graph(graph, shapes, training=True, planner=planner)
        sizes = lowering.graph.infer_shapes(shapes)
        for ref, buffer in lowering.buffers.items():
            if len(sizes.get(ref, ())) == 4 and ref.node not in graph.variables:
                assert buffer.shape == sizes[ref], ref
        in_vain = {f"{node.name}_bias" for node in graph if node.op == "Convolution" and not node["no_bias"] and
                   graph.consumers[Ref(node.name)][0].op.startswith("BatchNorm")}
        assert lowering.ready.keys() == store.parameters.keys() - in_vain
        check_memory(lowering.program)


@pytest.mark.parametrize("last", ["Convolution", "Pooling"])
def test_the_gradient_of_what_was_flattened_has_its_shape(last: str) -> None:
    shapes = {"data": (5, 12, 9, 3), "softmax_label": (5,)}
    graph = passes.bn_relu(Graph.from_json(flattened(last).tojson()))
    lowering, _ = lower_graph(graph, shapes, training=True)
    expected = graph.infer_shapes(shapes)[Ref("last")]
    (backward,) = (node for node in lowering.graph if node.op == "FlattenBackward")
    gradient, same = (lowering.buffers[ref] for ref in (*backward.refs(), *backward.inputs))
    assert lowering.buffers[Ref("last")].shape == expected == gradient.shape
    assert gradient.whole is same.whole, "in the same memory"
    check_memory(lowering.program)


class FakeGpu:
    """Memory is only counted, launches do nothing, CUDA graphs record when they run."""

    name, driver_version, num_multiprocessors, capability = "fake", 1, 132, (9, 0)
    max_shared_bytes = 232448

    def __init__(self, device_id: int) -> None:
        self.sizes: dict[int, int] = {}  # by address
        self.graphs: dict[int, bool] = {}  # whether replayed
        self.numbers = count(1 << 40, 1 << 40)

    def memory(self) -> tuple[int, int]:
        return (1 << 40) - sum(self.sizes.values()), 1 << 40

    def allocate(self, num_bytes: int) -> int:
        address = next(self.numbers)
        self.sizes[address] = num_bytes
        return address

    def free(self, address: int) -> None:
        del self.sizes[address]

    def capture(self, enqueue: Any) -> int:
        enqueue()
        self.graphs[number := next(self.numbers)] = False
        return number

    def replay(self, graph: int) -> None:
        self.graphs[graph] = True

    def destroy(self, graph: int) -> None:
        del self.graphs[graph]

    def download(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.ones(shape, dtype)

    def tensor_map(self, *arguments: Any) -> bytes:
        return b""

    def timing_event(self) -> None: ...
    def check_free(self, num_bytes: int) -> None: ...
    def synchronize(self) -> None: ...
    def fill(self, address: int, byte: int, num_bytes: int) -> None: ...
    def upload(self, address: int, array: np.ndarray) -> None: ...
    def fill_random(self, address: int, num_bytes: int, dtype: str) -> None: ...

    def time_ms(self, enqueue: Any) -> float:
        enqueue()
        return 1.0

    def copy(self, to: int, source: int, num_bytes: int) -> None: ...
    def write_word(self, address: int, value: Any) -> None: ...


@pytest.fixture
def make_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., training_step.TrainingStep]:
    """Makes a ResNet-18's training step for square images of this many pixels. Nothing is computed."""
    monkeypatch.setattr(network, "Gpu", FakeGpu)
    monkeypatch.setattr(toolchain, "KernelLibrary", lambda *_: FakeKernels())
    monkeypatch.setattr(toolchain, "ConvolutionLibrary", lambda *_: FakeConvolutions())
    monkeypatch.setattr(toolchain, "_machine", lambda gpu: "fake")
    graph = passes.bn_relu(passes.bn_add_relu(Graph.from_json(resnet(18, 10).tojson())))

    def make(size: int, change: Callable[[Graph], Graph] = lambda same: same,
             **options: Any) -> training_step.TrainingStep:
        shapes = {"data": (4, size, size, 3), "softmax_label": (4,)}
        return training_step.TrainingStep(change(graph), shapes, StepOptions(num_buckets=3, **options),
                                          cache_folder=tmp_path)

    return make


def test_a_training_batch_is_read_where_it_lies(make_step: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stem's forward pass and weight gradient read it there; they run between the CUDA graphs. Without a batch
    the loaded one is read. If cuDNN reads the images, they are copied."""
    monkeypatch.setattr(compiled, "LEAST_READ", 0)
    copies: list[int] = []
    monkeypatch.setattr(FakeGpu, "copy", lambda self, to, source, num_bytes: copies.append(source))
    step = make_step(64, dtype="float16")
    assert step.take(520, "float16", (4, 64, 64, 4)) == 0 and copies == [520], "not where vectors begin"
    ran: list[Any] = []
    monkeypatch.setattr(FakeGpu, "replay", lambda self, graph: ran.append("graph"))
    data = step.persistent.data
    loaded = data.address
    for launch in step.training.program.launches:
        monkeypatch.setattr(launch, "enqueue", lambda name=launch.operation: ran.append((name, data.address)))
    for place in (step.take(512, "float16", (4, 64, 64, 4)), 0):
        step.forward_backward(batch=place)
    assert place == 0 and copies == [520]
    parts = [("stem_fprop", 512), "graph", "graph", "graph", ("stem_wgrad", 512), "graph"]
    assert ran == [*parts, *((each[0], loaded) if each != "graph" else each for each in parts)]

    step = make_step(64, dtype="float32")
    step.forward_backward(batch=step.take(512, "float32", (4, 64, 64, 4)))
    assert copies == [520, 512]


def train(step: training_step.TrainingStep, size: int) -> None:
    step.load_from_device(1, "float16", (4, size, size, 4))
    step.forward_backward()


def infer(step: training_step.TrainingStep, size: int, num_images: int = 4) -> None:
    step.load_from_device(1, "float16", (num_images, size, size, 4))
    step.infer(num_images)


def check_arena(step: training_step.TrainingStep) -> None:
    """Everything compiled is in the one arena at its present address, and its CUDA graphs were captured there."""
    gpu: Any = step.gpu
    compiled = [step._training, *(step._inference._compiled.values() if step._inference else ())]
    start, end = step._arena._address, step._arena._address + step._arena.num_bytes
    assert gpu.sizes[start] == step._arena.num_bytes
    pieces = {piece for graph in compiled for segment in graph._segments for piece in segment}
    assert {piece for piece in pieces if isinstance(piece, int)} <= gpu.graphs.keys()
    for program in (graph.lowering.program for graph in compiled):
        placed = {buffer for buffer in (*program.buffers(), *program.scratch) if not buffer.persistent}
        assert all(start <= buffer.address and buffer.address + buffer.num_bytes <= end for buffer in placed)
        behind = min(buffer.address for buffer in program.scratch)
        assert all(buffer.address + buffer.num_bytes <= behind for buffer in placed - set(program.scratch))


def test_sizes_of_images_share_one_arena(make_step: Callable[..., training_step.TrainingStep]) -> None:
    """A step goes through sizes of training and inference, some of which make the arena grow and move. It ends up like
    a step made for the last sizes, except that the arena has the largest size."""
    step = make_step(64)
    gpu: Any = step.gpu
    largest = 0
    for size, larger in ((64, 64), (96, 128), (32, 256), (160, 96), (64, 96)):
        train(step, size)
        check_arena(step)
        infer(step, larger)
        infer(step, larger, num_images=3)
        check_arena(step)
        assert step.training.program.launches[0].reads[0].shape == (4, size, size, 4)
        assert step.persistent.data.dtype == "float16"
        assert step._arena.num_bytes >= largest
        largest = step._arena.num_bytes
    expected = make_step(64)
    train(expected, 64)
    infer(expected, 96)
    infer(expected, 96, num_images=3)
    assert largest > expected._arena.num_bytes > 0
    sizes, wanted = (Counter(s.gpu.sizes.values()) for s in (step, expected))  # type: ignore[attr-defined]
    assert sizes - wanted == Counter([largest]) and wanted - sizes == Counter([expected._arena.num_bytes])
    # CUDA graphs: 3 buckets, inference on whole and partial batches, the folding for inference, the optimizer.
    assert len(gpu.graphs) == len(expected.gpu.graphs) == 3 + 2 * 1 + 2


def test_another_optimizer_takes_the_place_of_the_one_before(make_step: Callable[..., training_step.TrainingStep]
                                                              ) -> None:
    """Tables and CUDA graphs do not pile up."""
    step = make_step(64)
    gpu: Any = step.gpu
    sizes, graphs = Counter(gpu.sizes.values()), len(gpu.graphs)
    for _ in range(3):
        step.set_optimizer(OptimizerConfig(SGD(momentum=0.5)))
        assert Counter(gpu.sizes.values()) == sizes and len(gpu.graphs) == graphs
    step.update(0.1)
    assert gpu.graphs[step._update], "the new one runs"


@pytest.mark.parametrize("window, training, refused", [((16, 16), True, False), ((17, 16), True, True),
                                                       ((17, 16), False, False)])
def test_windows_of_too_many_places_are_refused(window: tuple[int, int], training: bool, refused: bool) -> None:
    x = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(1, 1), num_filter=8, no_bias=True, layout="NHWC")
    x = mx.sym.Pooling(x, kernel=window, pool_type="max", layout="NHWC", name="large")
    x = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=8), name="softmax")
    shapes = {"data": (2, 20, 20, 8), "softmax_label": (2,)}
    sentence = r"^Pooling 'large' has kernel=\(17, 16\), but training stores .*: use a kernel of at most 256 elements$"
    with pytest.raises(GraphError, match=sentence) if refused else nullcontext():
        lower_graph(Graph.from_json(x.tojson()), shapes, training)


def test_images_of_other_types_are_refused(make_step: Callable[..., training_step.TrainingStep]) -> None:
    with pytest.raises(GraphError, match="data has the dtype float64: give one of float16, bfloat16, float32"):
        make_step(64).load_from_device(1, "float64", (4, 64, 64, 4))


def test_what_mixes_a_batch(make_step: Callable[..., training_step.TrainingStep], monkeypatch: pytest.MonkeyPatch
                            ) -> None:
    """Mixing is one launch with as many blocks as the pairs of images need. The share that the loss reads is written
    only if it has changed."""
    step = make_step(64)
    launched: list[Any] = []
    monkeypatch.setattr(step.kernels, "get", lambda source, name: SimpleNamespace(
        launch=lambda grid, block, address, *rest: launched.append((name, grid[0], [each.value for each in rest]))))
    monkeypatch.setattr(step.gpu, "write_word", lambda address, value: launched.append(float(value)))
    for draws in (Draws(), Draws(cutmix=Box(5, 5, 5, 9)), Draws(0.75), Draws(cutmix=Box(8, 0, 24, 64)), Draws()):
        step.mix(draws)
    image = 64 * 64 * 4
    assert launched == [0.75, ("mix_images<half>", 2 * image // 1024, [image, 4, 0.75]),
                        ("exchange_boxes<half, 4>", 2 * 16 * 64 // 256, [4, 64, 64, 8, 0, 24, 64]), 1.0]
    with pytest.raises(GraphError, match="for images of 64x64: give a box inside the image"):
        step.mix(Draws(cutmix=Box(0, 0, 65, 64)))


def test_the_loss_scale_begins_higher_where_gradients_are_of_a_mean_over_the_classes(
        make_step: Callable[..., training_step.TrainingStep]) -> None:
    assert make_step(64).optimizer.config.initial_loss_scale == 1024
    step = make_step(64, change=passes.binary_cross_entropy)
    assert step.optimizer.config.initial_loss_scale == 8192, "10 classes"
    step.set_optimizer(OptimizerConfig())
    assert step.optimizer.config.initial_loss_scale == 8192


def test_validation_takes_no_memory_but_that_of_its_weights(make_step: Callable[..., training_step.TrainingStep]
                                                            ) -> None:
    step = make_step(64)
    gpu: Any = step.gpu
    train(step, 64)
    before, graphs = Counter(gpu.sizes.values()), set(gpu.graphs)
    for num_images in (4, 1):
        infer(step, 64, num_images)
    taken = Counter(gpu.sizes.values()) - before
    assert 0 < sum(size * number for size, number in taken.items()) < 1.1 * step.store.copies.num_bytes
    assert graphs < gpu.graphs.keys(), "training has not moved"
    check_arena(step)


@pytest.mark.long
def test_memory_for_images_that_grow_is_asked_for_at_once(make_step: Callable[..., training_step.TrainingStep],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(64, largest_image_size=160)
    reserved = step._arena.num_bytes
    train(step, 160)
    partial_sums = step.training.program.scratch[1].num_bytes
    assert reserved < step._arena.num_bytes < 1.1 * reserved + partial_sums, "but for what single kernels need"
    small = make_step(64)
    assert make_step(160)._arena.num_bytes == step._arena.num_bytes > small._arena.num_bytes
    capacity = sum(small.gpu.sizes.values()) + reserved // 4  # type: ignore[attr-defined]
    monkeypatch.setattr(FakeGpu, "memory", lambda self: (capacity - sum(self.sizes.values()), 1 << 40))
    with pytest.raises(GraphError, match="batches of 4 images of 160x160 need"):
        make_step(64, largest_image_size=160)
    with pytest.raises(GraphError, match="batches of 4 images of 512x512 need"):
        train(make_step(64), 512)
