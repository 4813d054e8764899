"""Recurrent layers on the cuda executor without a GPU: calls of cuDNN, trials and refusals; and the choice of the
algorithm."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_without_gpu import lower_graph

from common.disk_cache import Cache
from graph_passes import VARIABLE, Graph, GraphError, Node, Ref, passes, pipeline
from graph_passes.choice import repeatable
from graph_passes.errors import TransientError
from graph_passes.executors.cuda import recurrent
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.function import DeviceFunction
from graph_passes.executors.cuda.planner import Planner
from graph_passes.executors.cuda.recurrent import RecurrentLibrary, RecurrentProblem
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.operators.rnn import ALGORITHMS, GATES, num_parameters
from train.language_model import LanguageModel

MILLISECONDS = dict(zip(ALGORITHMS, (3.0, 1.0, 2.0), strict=True))
NUMBERS = {0: "standard", 1: "persist_static", 3: "persist_static_small_h"}  # as in cudnn_graph.h
RESERVE, WORKSPACE = 1000, 3000  # bytes


class FakeGpu:
    """Counts memory only; time passes with the calls of cuDNN."""

    def __init__(self) -> None:
        self.next, self.taken, self.captured, self.clock = 1 << 20, {}, 0, 0.0
        self.filled: list[tuple[int, int, int]] = []

    def allocate(self, num_bytes: int) -> int:
        address, self.next = self.next, self.next + -(-num_bytes // 256) * 256
        self.taken[address] = num_bytes
        return address

    def free(self, address: int) -> None:
        del self.taken[address]

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        enqueue()
        return enqueue

    def replay(self, executable: Callable[[], None]) -> None:
        executable()

    def time_ms(self, enqueue: Callable[[], None]) -> float:
        start = self.clock
        enqueue()
        return self.clock - start

    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        self.filled.append((address, byte, num_bytes))

    def check_free(self, num_bytes: int) -> None: ...
    def synchronize(self) -> None: ...
    def destroy(self, executable: Any) -> None: ...
    def fill_random(self, address: int, num_bytes: int, dtype: str) -> None: ...


class FakeCudnn:
    """A pass takes MILLISECONDS by algorithm. `refusals`: the error of an algorithm when it runs."""

    refusals: dict[str, str] = {}  # noqa: RUF012  a test replaces it
    shift = 0  # bytes by which the second matrix has another offset

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.handle = gpu, 7
        self.calls: list[tuple[Any, ...]] = []

    def create(self, kind: str) -> Any:
        return SimpleNamespace(kind=kind)

    def size(self, function: str, handle: int, rnn: Any) -> int:
        return sum(rnn.sizes) * rnn.item_bytes

    def __call__(self, function: str, *arguments: Any) -> None:
        self.calls.append((function, *arguments))
        if function == "cudnnSetRNNDescriptor_v8":
            rnn, algorithm, mode, _, both, _, dtype = arguments[:7]
            features, hidden, _, layers = arguments[9:13]
            gates = GATES[("rnn_relu", "rnn_tanh", "lstm", "gru")[mode]]
            rnn.algorithm, rnn.item_bytes = NUMBERS[algorithm], 4 if dtype == 0 else 2
            widths = [features if layer < 1 + both else (1 + both) * hidden for layer in range(layers * (1 + both))]
            rnn.matrices = [hidden * size for width in widths for size in (width, hidden) for _ in range(gates)]
            rnn.sizes, rnn.gates = rnn.matrices + [hidden] * len(rnn.matrices), 2 * gates
        elif function == "cudnnGetRNNWeightParams":
            _, rnn, layer, _, base, gate, _, matrix, _, bias = arguments
            number = layer * rnn.gates + gate
            matrix._obj.value = base + sum(rnn.sizes[:number]) * rnn.item_bytes + self.shift * (number == 1)
            bias._obj.value = base + sum(rnn.sizes[: len(rnn.matrices) + number]) * rnn.item_bytes
        elif function == "cudnnGetRNNTempSpaceSizes":
            use, workspace, reserve = arguments[2], *arguments[4:]
            workspace._obj.value, reserve._obj.value = WORKSPACE, RESERVE * use
        elif function in ("cudnnRNNForward", "cudnnRNNBackwardData_v8"):
            rnn = arguments[1]
            if rnn.algorithm in self.refusals:
                raise RuntimeError(self.refusals[rnn.algorithm])
            self.gpu.clock += MILLISECONDS[rnn.algorithm]


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> type[FakeCudnn]:
    fake = type("Fake", (FakeCudnn,), {"refusals": {}, "shift": 0})
    monkeypatch.setattr(recurrent, "_Cudnn", fake)
    return fake


def tools(folder: Path) -> tuple[Toolchain, FakeGpu]:
    gpu = FakeGpu()
    arena = Arena(gpu)  # type: ignore[arg-type]
    library = RecurrentLibrary(gpu, arena)  # type: ignore[arg-type]
    planner = Planner(gpu, Cache("machine", folder), arena, "variant")  # type: ignore[arg-type]
    made: Any = SimpleNamespace(gpu=gpu, kernels=None, convolutions=None, recurrent=library, planner=planner,
                                arena=arena, group=None)
    return made, gpu


def problem(algorithm: str = "standard", num_layers: int = 2, bidirectional: bool = True) -> RecurrentProblem:
    node = Node("RNN", "rnn", (), {"mode": "lstm", "state_size": 9, "num_layers": num_layers,
                                   "bidirectional": bidirectional})
    return RecurrentProblem("lstm", num_layers, bidirectional, 5, 3, 7, 9, num_parameters(node, 7), "float16", True,
                            algorithm)


def test_a_plan_has_run_alone_and_captured(cudnn: type[FakeCudnn], tmp_path: Path) -> None:
    """Each pass in separate memory, one after the other; the parameters' gradient starts from 0."""
    made, gpu = tools(tmp_path)
    plan = made.recurrent.plan(problem())
    assert (plan.workspace_bytes, plan.reserve_bytes) == (WORKSPACE, RESERVE)
    fake: Any = made.recurrent._cudnn
    assert Counter(call[0] for call in fake.calls if "RNNForward" in call[0] or "Backward" in call[0]) == {
        "cudnnRNNForward": 2, "cudnnRNNBackwardData_v8": 2, "cudnnRNNBackwardWeights_v8": 2}
    assert gpu.captured == 2
    assert (0, plan.weight_bytes) in {(byte, size) for _, byte, size in gpu.filled}
    backward = next(call for call in fake.calls if call[0] == "cudnnRNNBackwardData_v8")
    addresses = [each for each in backward if isinstance(each, int) and each >= 1 << 20]
    assert len(set(addresses)) == len(addresses) == 10, "y, dy, dx, h, dh, c, dc, parameters, workspace, reserve"
    assert made.recurrent.plan(problem()) is plan


def test_what_cudnn_refuses_is_not_tried_again(cudnn: type[FakeCudnn], tmp_path: Path) -> None:
    made, _ = tools(tmp_path)
    cudnn.refusals = {"standard": "cudnnRNNForward: NOT_SUPPORTED"}
    for _ in range(2):
        with pytest.raises(GraphError, match=r"cannot run lstm of 2 x 9, both directions for 5 steps of 3 x 7, float16,"
                                             r" algorithm standard \(cudnnRNNForward: NOT_SUPPORTED\)"):
            made.recurrent.plan(problem())
        cudnn.refusals = {}


def test_want_of_memory_is_no_verdict(cudnn: type[FakeCudnn], tmp_path: Path) -> None:
    made, _ = tools(tmp_path)
    cudnn.refusals = {"standard": "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"}
    with pytest.raises(TransientError):
        made.recurrent.plan(problem())
    cudnn.refusals = {}
    made.recurrent.plan(problem())


@pytest.mark.parametrize("num_layers, bidirectional", [(2, False), (1, True)])
def test_what_cudnn_computes_wrongly_is_refused(cudnn: type[FakeCudnn], tmp_path: Path, num_layers: int,
                                                bidirectional: bool) -> None:
    recurrent = tools(tmp_path)[0].recurrent
    recurrent.plan(problem("persist_static_small_h", num_layers=1, bidirectional=False))
    with pytest.raises(GraphError, match=r"wrong gradients of lstm.*use another algorithm"):
        recurrent.plan(problem("persist_static_small_h", num_layers=num_layers, bidirectional=bidirectional))


def test_parameters_in_another_order_are_refused(cudnn: type[FakeCudnn], tmp_path: Path) -> None:
    cudnn.shift = 2
    with pytest.raises(GraphError, match="another order of parameters"):
        tools(tmp_path)[0].recurrent.plan(problem())


def test_parameters_of_another_number_are_refused(cudnn: type[FakeCudnn], tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="another order of parameters"):
        tools(tmp_path)[0].recurrent.plan(dataclasses.replace(problem(), num_parameters=1))


def layer(training: bool) -> tuple[Graph, dict[str, tuple[int, ...]]]:
    attrs = {"mode": "gru", "state_size": 8, "num_layers": 1}
    inputs = (Ref("data"), Ref("parameters"), Ref("state"))
    variables, shapes = [Node(VARIABLE, ref.node) for ref in inputs], {"data": (5, 3, 16)}
    if not training:
        return Graph([*variables, Node("RNN", "rnn", inputs, attrs)], [Ref("rnn")]), shapes
    forward = Node("RNNTrain", "rnn", inputs, attrs)
    backward = Node("RNNBackward", "back", (Ref("head"), *inputs, Ref("rnn"), forward.output("reserve")), attrs)
    return (Graph([*variables, Node(VARIABLE, "head"), forward, backward], [Ref("rnn"), *backward.refs()]),
            shapes | {"head": (5, 3, 8)})


@pytest.mark.parametrize("training", [True, False])
def test_the_fastest_algorithm_is_taken_and_remembered(cudnn: type[FakeCudnn], tmp_path: Path, training: bool) -> None:
    graph, shapes = layer(training)
    for again in (False, True):
        made, gpu = tools(tmp_path)
        function = DeviceFunction(partial(pipeline.cover, passes.precision(graph, "bfloat16")), shapes, "bfloat16",
                                  made)
        taken = {node["algorithm"] for node in function.graph if not node.is_variable}
        assert taken == {"persist_static"}
        passes_run = 2 if training else 1
        names = ("RNNTrain", "RNNBackward") if training else ("RNN",)
        assert [choice.kernel for choice in function.choices] == [f"{name} persist_static" for name in names]
        assert all((f"{choice.kernel.split()[0]} standard", 3.0) in choice.rivals for choice in function.choices)
        fake: Any = made.recurrent._cudnn
        tried = {call[2] for call in fake.calls if call[0] == "cudnnSetRNNDescriptor_v8"}
        assert tried == ({1} if again else {0, 1, 3}), "the next process makes only what it takes"
        before = gpu.clock
        function()
        assert gpu.clock - before == MILLISECONDS["persist_static"] * passes_run
        kept = {*function.variables.values(), *function.outputs}
        assert all(buffer.address in gpu.taken for buffer in kept)
        function.close()
        assert not {buffer.address for buffer in kept} & gpu.taken.keys()


def test_what_cudnn_refuses_is_not_taken(cudnn: type[FakeCudnn], tmp_path: Path) -> None:
    cudnn.refusals = dict.fromkeys(ALGORITHMS[1:], "NOT_SUPPORTED")
    graph, shapes = layer(training=True)
    function = DeviceFunction(partial(pipeline.cover, passes.precision(graph, "float16")), shapes, "float16",
                              tools(tmp_path)[0])
    assert {node["algorithm"] for node in function.graph if not node.is_variable} == {"standard"}


def test_repeatable_runs_take_the_first() -> None:
    graph, _ = layer(training=True)
    chosen = pipeline.cover(graph, repeatable)
    assert {node["algorithm"] for node in chosen if not node.is_variable} == {"standard"}


def test_a_language_model_is_lowered(cudnn: type[FakeCudnn], tmp_path: Path) -> None:
    """Every launch finds its operands, in the right shapes. A matrix with two uses has the sum of two gradients. Word
    indices stay in fp32."""
    model = LanguageModel(words=24, hidden=16, layers=2, steps=5, sequences=3)
    made, _ = tools(tmp_path)
    lowered, store = lower_graph(model.graph, model.shapes, training=True, recurrent=made.recurrent)
    shapes = {name: buffer.shape for name, buffer in store.gradients.items()}
    assert shapes == {"embedding_weight": (24, 1, 1, 16), "scores_bias": (24,),
                      "rnn_parameters": (num_parameters(model.graph["rnn"], 16),)}
    assert store.values["rnn_parameters"].dtype == "float16"
    launches = {launch.operation: launch for launch in lowered.program.launches}
    assert [launch.operation for launch in lowered.program.launches] == [
        "embedding", "zeros", "zeros", "rnn_forward", "fprop", "softmax_cross_entropy", "add_metrics", "wgrad",
        "dgrad", "rnn_backward", "embedding_wgrad", "add", "bias_gradient"]
    assert launches["add"].writes == (store.gradients["embedding_weight"],)
    assert {buffer.shape for buffer in launches["add"].reads} == {(24, 1, 1, 16), (24, 16)}
    assert launches["fprop"].reads[0] is launches["rnn_forward"].writes[0], "the states, word by word"
    assert set(lowered.ready) == set(shapes)
    kernels = {each for choice in lowered.choices for each in (choice.kernel, *dict(choice.rivals))}
    assert kernels >= {f"{op} {algorithm}" for op in ("RNNTrain", "RNNBackward") for algorithm in ALGORITHMS[:2]}
    assert lowered.graph["rnn"]["algorithm"] == lowered.graph["rnn_backward"]["algorithm"]
    assert launches["rnn_backward"].flops == 2 * launches["rnn_forward"].flops
