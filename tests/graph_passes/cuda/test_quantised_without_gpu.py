"""The part of INT8 inference on a GPU that needs no GPU: passes, launches, memory."""

from __future__ import annotations

import threading
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from int8_networks import DIRECT, SQUARES, STREAMS, SUMS, TAPS, TILES, Int8, quantised
from step_networks import preferring, refusing
from test_without_gpu import FakeConvolutions, FakeGpu, FakeKernels

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, Ref, passes, pipeline
from graph_passes.choice import fewest, plain
from graph_passes.errors import TransientError
from graph_passes.executors import reference
from graph_passes.executors.cuda import compiled, network, prices, toolchain
from graph_passes.executors.cuda.executor import CudaExecutor
from graph_passes.executors.cuda.kernels.quantised import RESERVED_BYTES
from graph_passes.executors.cuda.kernels.quantised_conv_stream import MULTIPROCESSOR_SHARED_BYTES, Stream
from graph_passes.executors.cuda.kernels.quantised_conv_taps import QuantisedConvTaps
from graph_passes.executors.cuda.kernels.quantised_pair import QuantisedPair
from graph_passes.executors.cuda.quantised import QuantisedNetwork
from graph_passes.operators import window
from graph_passes.optimizers.sgd import SGD
from graph_passes.passes.quantise import Kept
from graph_passes.passes.quantise_squares import quantise_squares, quantise_squares_params

PAIRS = ("QuantisedPair", "QuantisedPairSum")
UNFUSED = refusing(fewest, *SUMS, *PAIRS)  # prices without these fusions
WITHOUT_PAIRS = refusing(fewest, *PAIRS)


@pytest.fixture(autouse=True)
def fake_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is computed."""
    monkeypatch.setattr(network, "Gpu", FakeGpu)
    monkeypatch.setattr(toolchain, "KernelLibrary", lambda *_: FakeKernels())
    monkeypatch.setattr(toolchain, "ConvolutionLibrary", lambda *_: FakeConvolutions())
    monkeypatch.setattr(toolchain, "_machine", lambda gpu: "fake")


@lru_cache(maxsize=4)
def case_of(name: str, size: int, kept: Kept) -> Int8:
    """A case for tests about launches, which do not depend on values."""
    return quantised(name, 2, size, np.random.default_rng(0), kept)


def launches(name: str, kept: Kept, tmp_path: Path, size: int = 64, deterministic: bool = False) -> Counter[str]:
    """The launches of inference, by operation."""
    case = case_of(name, size, kept)
    made = QuantisedNetwork(case.network, case.shapes, case.scales, kept, case.params, deterministic,
                            cache_folder=tmp_path)
    for images in (2, 1):
        made.load_from_device(1, "float16", (images, size, size, 4))
        made.infer(images)
    assert made._inference and made._inference._compiled.keys() == {1, 2}
    program = made._inference._compiled[2].lowering.program
    for launch in program.launches:
        launch.enqueue()
    return Counter(launch.operation for launch in program.launches)


def test_launches(tmp_path: Path) -> None:
    found = launches("resnet18", Kept(), tmp_path)
    assert found == {"quantise_squares": 1, "quantised_stem_pool": 1, "quantised_conv_taps": 16,
                     "quantised_conv": 3, "quantised_average_pool": 1, "fprop": 1,
                     "softmax_cross_entropy": 1, "add_metrics": 1}


@pytest.mark.long
def test_the_stem_with_its_pooling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fusion is taken, also in deterministic runs, if images are narrow enough."""
    for size, taken in ((64, 1), (33, 1), (256, 0)):  # 128 pixels are too wide
        found = launches("resnet18", Kept(), tmp_path, size, deterministic=True)
        assert (found["quantised_stem_pool"], found["quantised_max_pool"]) == (taken, 1 - taken)
    monkeypatch.setattr(FakeGpu, "capability", (8, 0))
    found = launches("resnet18", Kept(), tmp_path, deterministic=True)
    assert found["quantised_max_pool"] == 1


@pytest.mark.long
def test_sums_of_convolutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two convolutions are summed in one launch if the weights of both fit into a block."""
    monkeypatch.setattr(prices, "deterministic", plain)
    before = launches("resnet50", Kept(), tmp_path, deterministic=True)
    monkeypatch.setattr(prices, "deterministic", preferring(plain, *SUMS))
    streams = launches("resnet50", Kept(), tmp_path, deterministic=True)
    assert sum(before.values()) - sum(streams.values()) == 3, "and not in stage 4"
    monkeypatch.setattr(FakeGpu, "capability", (8, 0))
    assert sum(launches("resnet50", Kept(), tmp_path, deterministic=True).values()) == sum(before.values())


@pytest.mark.parametrize("channels, channels_2, adds, label, blocks, results, stages", [
    (64, 64, False, "QuantisedConvStream 2x128", 2, 1, 3), (256, 128, False, "QuantisedConvStream 2x128", 2, 1, 2),
    (512, 256, False, "QuantisedConvStream 2x128", 1, 1, 6), (64, 64, False, "QuantisedConvStream 2x256", 1, 2, 7),
    (512, 256, False, "QuantisedConvStream 4x128", 1, 1, 2), (1024, 512, False, "QuantisedConvStream 4x128", 1, 1, -1),
    (256, 0, True, "QuantisedConvStream 2x128", 2, 2, 2), (256, 0, True, "QuantisedConvStream 4x128", 1, 3, 3),
    (1024, 0, False, "QuantisedConvStream 4x128", 1, 1, 2), (512, 0, True, "QuantisedConvStream 4x128", 1, 3, 2)])
def test_what_a_stream_keeps_in_shared_memory(channels: int, channels_2: int, adds: bool, label: str, blocks: int,
                                              results: int, stages: int) -> None:
    stream = Stream(channels, *STREAMS[label], adds, channels_2)
    assert (stream.blocks, stream.results, stream.stages) == (blocks, results, stages)
    assert blocks * (stream.shared_bytes + RESERVED_BYTES) <= MULTIPROCESSOR_SHARED_BYTES
    assert stream.shared_bytes <= FakeGpu.max_shared_bytes


@pytest.mark.parametrize("size, stride, shape, filters, of_tile, groups, stay, stages, places", [
    (3, 1, (256, 56, 56, 64), 64, (30, 4, 1), 1, True, 9, 6),
    (3, 1, (256, 28, 28, 128), 128, (26, 7, 1), 2, True, 18, 2),
    (3, 1, (256, 14, 14, 256), 256, (28, 14, 1), 4, False, 10, 4),
    (3, 1, (256, 7, 7, 512), 512, (28, 7, 4), 4, False, 8, 4),
    (3, 2, (256, 56, 56, 128), 128, (26, 7, 1), 2, False, 7, 5),
    (3, 2, (256, 28, 28, 256), 256, (14, 7, 1), 4, False, 7, 10),
    (1, 1, (256, 14, 14, 256), 1024, (24, 192, 1), 16, False, 10, 4),
    (1, 1, (256, 7, 7, 512), 2048, (24, 192, 1), 16, False, 7, 5)])
def test_how_taps_are_divided(size: int, stride: int, shape: tuple[int, ...], filters: int, of_tile: tuple[int, ...],
                              groups: int, stay: bool, stages: int, places: int) -> None:
    way = QuantisedConvTaps.of(shape, filters, size, stride, size == 1, FakeGpu.num_multiprocessors)
    assert way and (way.eights, way.rows, way.together) == of_tile and way.groups == groups
    assert (way.stages, way.places, way.stages == groups * way.chunks) == (stages, places, stay)
    assert way.shared_bytes <= FakeGpu.max_shared_bytes


@pytest.mark.parametrize("shape, stride", [
    ((256, 8, 8, 2048), 1), ((2, 9, 240, 64), 1), ((2, 9, 8, 64), 2), ((2, 8, 8, 192), 1)])
def test_what_is_not_for_taps(shape: tuple[int, ...], stride: int) -> None:
    """Channels for which no tile fits into shared memory; a row too wide for any product; an odd number of rows with
    stride 2; channels that do not fill a part."""
    assert QuantisedConvTaps.of(shape, 64, 3, stride, False, FakeGpu.num_multiprocessors) is None


@pytest.mark.parametrize("channels, filters_z, channels_2, stages", [
    (64, 64, 0, 6), (64, 128, 0, 5), (320, 64, 0, 2), (64, 64, 64, 5), (256, 64, 64, 3)])
def test_what_a_pair_keeps_in_shared_memory(channels: int, filters_z: int, channels_2: int, stages: int) -> None:
    pair = QuantisedPair(channels, filters_z, channels_2)
    assert pair.stages == stages and pair.shared_bytes <= FakeGpu.max_shared_bytes


@pytest.mark.long
def test_pairs_of_convolutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only stage 1 has pairs, since its convolutions have few channels."""
    monkeypatch.setattr(prices, "deterministic", plain)
    before = launches("resnet50", Kept(), tmp_path, deterministic=True)
    assert before["quantised_pair"] == 0
    for preferred, fewer in (PAIRS[:1], 3), ((*PAIRS, *SUMS), 6):  # with the three sums
        monkeypatch.setattr(prices, "deterministic", preferring(plain, *preferred))
        found = launches("resnet50", Kept(), tmp_path, deterministic=True)
        assert (found["quantised_pair"], sum(before.values()) - sum(found.values())) == (3, fewer)
    monkeypatch.setattr(FakeGpu, "capability", (8, 0))
    assert launches("resnet50", Kept(), tmp_path, deterministic=True)["quantised_pair"] == 0


def test_launches_of_what_stays_in_floats(tmp_path: Path) -> None:
    found = launches("resnet18", Kept(first=True, classifier=False), tmp_path)
    assert found["fprop_bias_relu"] + found["bias_add_relu"] == 1 and found["quantised_conv"] == 3
    assert found["quantise"] == 2 and found["quantised_conv_direct"] == 1 and not found["quantise_squares"]


@pytest.mark.long
def test_a_network_with_groups_and_a_pre_activation_one(tmp_path: Path) -> None:
    found = launches("resnext50_32x4d", Kept(), tmp_path, size=32)
    assert found["quantised_conv_direct"] == 16
    assert (found["quantised_conv"], found["quantised_conv_taps"]) == (12, 15), "others in pairs and sums"
    found = launches("resnet18_v2", Kept(), tmp_path, size=32)
    assert found["batch_norm_apply"] == 9 and found["dequantise"] and found["quantise"]


@pytest.mark.long
def test_a_convolution_that_makes_floats_is_timed_by_itself(tmp_path: Path) -> None:
    """In the first network, kernels that write integers only are the fastest for the same shapes."""
    assert launches("resnet18", Kept(), tmp_path)["quantised_conv_taps"] == 16
    assert launches("resnet18_v2", Kept(), tmp_path)["quantised_conv"] > 0


def test_gpus_without_these_tensor_cores_take_the_kernel_for_all_shapes(tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGpu, "capability", (8, 0))
    assert launches("resnet18", Kept(), tmp_path / "8.0", size=32)["quantised_conv"] == 20
    monkeypatch.setattr(FakeGpu, "capability", (7, 5))
    assert launches("resnet18", Kept(), tmp_path / "7.5", size=32)["quantised_conv_direct"] == 20


def test_parameters_that_do_not_fit(tmp_path: Path, rng: np.random.Generator) -> None:
    case = quantised("resnet18", 2, 32, rng)
    for params, sentence in (
            ({**case.params, "classifier_weight": np.zeros((3, 512), np.float32)}, r"has the shape \(3, 512\)"),
            ({name: array for name, array in case.params.items() if name != "classifier_weight"}, "is missing")):
        with pytest.raises(GraphError, match=f"'classifier_weight' {sentence}: the network in INT8 needs"):
            QuantisedNetwork(case.network, case.shapes, case.scales, case.kept, params, cache_folder=tmp_path)


# --- the passes ---


@pytest.mark.long(but=["resnet18-33"])
@pytest.mark.parametrize("name, size", [("resnet18", 40), ("resnet18", 33), ("resnet50d", 38)])
def test_squares_change_no_integer(name: str, size: int, rng: np.random.Generator) -> None:
    case = quantised(name, 2, size, rng)
    graph = pipeline.run(pipeline.quantised_passes("float32", case.scales, case.kept), case.network)
    in_squares, params = quantise_squares(graph), quantise_squares_params(graph, case.params)
    first = next(node for node in in_squares if node.op == "QuantisedConvolution")
    assert window(first).stride == (1, 1) and params[first.inputs[1].node].shape[3] == 16
    values = params | {"data": case.images, "softmax_label": np.zeros(2)}
    found = reference.forward(in_squares, {Ref(each): values[each] for each in in_squares.variables}, training=False)
    for ref, want in case.expected().items():
        if not graph[ref.node].is_variable and graph[ref.node].op != "Quantise":
            np.testing.assert_array_equal(found[ref], want)


@pytest.mark.parametrize("name, size", [("resnet18", 40), ("resnet18", 33)])
def test_pooling_in_the_stem_changes_no_integer(name: str, size: int, rng: np.random.Generator) -> None:
    case = quantised(name, 2, size, rng)
    graph = pipeline.run(pipeline.quantised_passes("float32", case.scales, case.kept), case.network)
    pooled = pipeline.cover(quantise_squares(graph), preferring(fewest, "QuantisedStemPool"))
    assert sum(node.op == "QuantisedStemPool" for node in pooled) == 1
    table = pipeline.candidates(graph)
    assert not any(each.op == "QuantisedStemPool" for each in table), "which reads no squares"
    values = quantise_squares_params(graph, case.params) | {"data": case.images, "softmax_label": np.zeros(2)}
    found = reference.forward(pooled, {Ref(each): values[each] for each in pooled.variables}, training=False)
    for ref, want in case.expected().items():
        if not graph[ref.node].is_variable and graph[ref.node].op != "Quantise" and ref in found:
            np.testing.assert_array_equal(found[ref], want)


@pytest.mark.long(but=["resnet18-*"])
@pytest.mark.parametrize("name, strides", [("resnet50", [1, 2, 2, 2]), ("resnet50d", [1] * 4), ("resnet18", [])])
def test_sums_of_convolutions_change_no_integer(name: str, strides: list[int], rng: np.random.Generator) -> None:
    case = quantised(name, 2, 33, rng)
    graph = pipeline.run(pipeline.quantised_passes("float32", case.scales, case.kept), case.network)
    summed = pipeline.cover(graph, WITHOUT_PAIRS)
    assert [node["stride"] for node in summed if node.op == "QuantisedConvStreamSum"] == [(s, s) for s in strides]
    assert Graph.from_json(summed.to_json()) == summed and pipeline.cover(graph, UNFUSED) == graph
    assert {*summed.variables} == {*graph.variables}
    values = case.params | {"data": case.images, "softmax_label": np.zeros(2)}
    found = reference.forward(summed, {Ref(each): values[each] for each in summed.variables}, training=False)
    for ref, want in case.expected().items():
        if ref in found:
            np.testing.assert_array_equal(found[ref], want)


@pytest.mark.long(but=["resnet18*"])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("name, pairs", [("resnet50", 15), ("resnet50d", 15), ("resnet18", 0)])
def test_pairs_of_convolutions_change_no_integer(name: str, pairs: int, summed: bool, rng: np.random.Generator) -> None:
    """Pairs change no integer, also at the end of a block with a projection shortcut, where the first convolution is a
    sum."""
    case = quantised(name, 2, 33, rng)
    graph = pipeline.run(pipeline.quantised_passes("float32", case.scales, case.kept), case.network)
    paired = pipeline.cover(graph, preferring(UNFUSED if not summed else fewest, *PAIRS[: 1 + summed]))
    made = [node for node in paired if node.op in PAIRS]
    sums = sum(node.op == "QuantisedPairSum" for node in made)
    assert (len(made), sums) == (pairs, 4 if summed and pairs else 0)
    assert Graph.from_json(paired.to_json()) == paired and pipeline.cover(graph, UNFUSED) == graph
    dtypes, shapes = passes.tensor_dtypes(paired), paired.infer_shapes(case.shapes)
    values = case.params | {"data": case.images, "softmax_label": np.zeros(2)}
    found = reference.forward(paired, {Ref(each): values[each] for each in paired.variables}, training=False)
    for node in made:
        for ref in node.refs():
            assert (dtypes[ref], shapes[ref]) == ("int8", found[ref].shape) == (found[ref].dtype, found[ref].shape)
    for ref, want in case.expected().items():
        if ref in found:
            np.testing.assert_array_equal(found[ref], want)


def test_a_first_convolution_at_stride_1_reads_pixels(rng: np.random.Generator) -> None:
    case = quantised("resnet18", 1, 32, rng)
    graph = pipeline.run(pipeline.quantised_passes("float32", case.scales, case.kept), case.network)
    plain = graph.rewrite(lambda node: node.with_attrs(stride=(1, 1)) if node.op == "QuantisedConvolution" else None)
    assert quantise_squares(plain) == plain and quantise_squares_params(plain, case.params).keys() == case.params.keys()


def test_each_convolution_has_a_candidate_for_each_kernel(rng: np.random.Generator) -> None:
    case = quantised("resnet18", 1, 32, rng)
    graph = pipeline.run(pipeline.quantised_passes("float32", case.scales, case.kept), case.network)
    table = pipeline.candidates(graph)
    labels = {DIRECT, TAPS, SQUARES, *TILES, *STREAMS}
    by_name = Counter(each.node.name for each in table if each.label in labels)
    assert len(by_name) == 20 and set(by_name.values()) == {len(labels)}
    second = [*TILES][1]
    chosen = pipeline.cover(graph, preferring(fewest, second))
    assert {op for op in chosen.operators() if op.startswith("QuantisedConv")} == {"QuantisedConv"}
    chosen = pipeline.cover(graph, refusing(plain, *labels - {DIRECT}))
    assert {op for op in chosen.operators() if op.startswith("QuantisedConv")} == {DIRECT}


def test_short_memory_does_not_lead_to_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow kernel for all shapes is not taken because memory was short: the user would not know why the network is
    slow."""
    def time_ms(gpu: FakeGpu, enqueue: Any) -> float:
        raise TransientError("the GPU has no memory left")

    monkeypatch.setattr(FakeGpu, "time_ms", time_ms)
    with pytest.raises(TransientError, match="no memory left"):
        launches("resnet18", Kept(), tmp_path)


# --- on MXNet's arrays ---


@pytest.fixture
def event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Provides what executors need besides, on CPU arrays: this object stands for every event of the GPU."""
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path))
    monkeypatch.setattr(mx, "gpu", lambda number: mx.cpu(number))
    event = SimpleNamespace(sync=lambda: None)
    for name, value in {
            "device": SimpleNamespace(pci_bus_id="0000:00:00.0"), "record_event": lambda self: event,
            "pinned": lambda self, num_bytes: np.zeros(num_bytes, np.uint8), "record": lambda self, event: None,
            "elapsed_ms": lambda self, start, end: 0.0,
            "start_download": lambda self, pinned, address, beside=False: event, "free_all": lambda self: None}.items():
        monkeypatch.setattr(FakeGpu, name, value, raising=False)
    return event


def test_the_next_batch_waits_for_no_answer(rng: np.random.Generator, event: SimpleNamespace) -> None:
    """The host starts two passes before the GPU has finished the first, each with its own result; it waits in the
    third."""
    case = quantised("resnet18", 4, 32, rng)
    executor = CudaExecutor(case.network, case.shapes, int8=case.int8)
    data, done = mx.nd.array(case.images), threading.Event()
    part = data[:3].copy()
    part.wait_to_read()
    event.sync = done.wait
    hurry = threading.Timer(20, done.set)  # otherwise a wait would never end
    hurry.start()
    answers = [executor.forward(data), executor.forward(part)]
    assert not done.is_set()
    hurry.cancel()
    threading.Timer(0.1, done.set).start()
    answers.append(executor.forward(data))
    assert done.is_set()
    for number, answer in enumerate(answers):
        answer[:] = number
    assert [answer.asnumpy().max() for answer in answers] == [0, 1, 2] and answers[1].shape == (3, 24)
    executor.close()


def test_places_of_answers_are_used_again(rng: np.random.Generator, event: SimpleNamespace,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result that has not been taken yet has its own memory on the GPU and on the host."""
    case = quantised("resnet18", 4, 32, rng)
    executor = CudaExecutor(case.network, case.shapes, int8=case.int8)
    downloads: list[tuple[int, int]] = []

    def start_download(self: Any, pinned: np.ndarray, address: int, beside: bool = False) -> SimpleNamespace:
        assert beside
        pinned.view(np.float32)[:] = len(downloads)
        downloads.append((address, pinned.nbytes))
        return event

    monkeypatch.setattr(FakeGpu, "start_download", start_download)
    executor.infer(mx.nd.array(case.images))
    whole = executor.request_probabilities()
    executor.infer(mx.nd.array(case.images[:3]))
    part = executor.request_probabilities()
    assert part().tolist() == [[1] * 24] * 3
    third = executor.request_probabilities()
    assert (whole().tolist(), third().tolist()) == ([[0] * 24] * 4, [[2] * 24] * 3)
    (first, *sizes), (other, *_), (again, *_) = downloads
    assert first != other == again and sizes == [4 * 4 * 24] and downloads[1][1] == 3 * 4 * 24
    executor.close()


@pytest.mark.long(but=["512*"])
@pytest.mark.parametrize("where, is_read", [(512, True), (520, False)])
def test_a_batch_is_read_where_it_lies(where: int, is_read: bool, tmp_path: Path, rng: np.random.Generator,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch, which is outside the CUDA graphs, reads it there. A batch that is not aligned for vector loads
    is copied. Without a batch the loaded one is read."""
    case = quantised("resnet18", 2, 64, rng)
    monkeypatch.setattr(compiled, "LEAST_READ", 0)
    copies: list[int] = []
    monkeypatch.setattr(FakeGpu, "copy", lambda self, to, source, num_bytes: copies.append(source), raising=False)
    made = QuantisedNetwork(case.network, case.shapes, case.scales, case.kept, case.params, cache_folder=tmp_path)
    made.infer(2, made.take(where, "float16", (2, 64, 64, 4)))
    assert made._inference and copies == ([] if is_read else [where])
    first, *others = made._inference._compiled[2].lowering.program.launches
    (data,) = (buffer for buffer in first.reads if buffer.name == "data")
    read: list[int] = []
    for launch in (first, *others):
        monkeypatch.setattr(launch, "enqueue", lambda: read.append(data.address))
    loaded = made.persistent.data.address
    made.infer(2, made.take(where, "float16", (2, 64, 64, 4)))
    made.infer(2)
    assert read == [where if is_read else loaded, loaded] and data.address == loaded


@pytest.mark.long(but=["kept0*"])
@pytest.mark.parametrize("kept, least", [(Kept(), compiled.LEAST_READ), (Kept(first=True), 0)])
def test_a_batch_that_is_copied(kept: Kept, least: int, tmp_path: Path, rng: np.random.Generator,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch is copied, and so is one that a cuDNN plan reads: outside a CUDA graph the plan would take the host
    longer."""
    case = quantised("resnet18", 2, 64, rng, kept)
    monkeypatch.setattr(compiled, "LEAST_READ", least)
    copies: list[int] = []
    monkeypatch.setattr(FakeGpu, "copy", lambda self, to, source, num_bytes: copies.append(source), raising=False)
    made = QuantisedNetwork(case.network, case.shapes, case.scales, kept, case.params, cache_folder=tmp_path)
    for where in (512, 1024):
        made.infer(2, made.take(where, "float16", (2, 64, 64, 4)))
    assert copies == [512, 1024]


@pytest.mark.long(but=["True"])
@pytest.mark.usefixtures("event")
@pytest.mark.parametrize("is_int8", [False, True])
def test_inference_prepared_for_a_size_compiles_nothing(is_int8: bool, rng: np.random.Generator,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step of another size in between compiles nothing either."""
    case = quantised("resnet18", 4, 32, rng)
    executor = CudaExecutor(case.network, case.shapes, int8=case.int8 if is_int8 else None)
    training, larger, label = mx.nd.zeros((4, 32, 32, 3)), mx.nd.zeros((4, 64, 32, 3)), mx.nd.zeros(4)
    executor.prepare_inference((64, 32))
    compile_anew = compiled.CompiledGraph.__init__
    compiled_for: list[tuple[int, ...]] = []

    def counted(self: Any, passes: Any, shapes: Any, *others: Any) -> None:
        compiled_for.append(tuple(shapes["data"]))
        compile_anew(self, passes, shapes, *others)

    monkeypatch.setattr(compiled.CompiledGraph, "__init__", counted)
    if not is_int8:
        executor.forward_backward(training, label)
        executor.optimizer.step(0.1)
    executor.infer(larger, label, 4)
    executor.prepare_inference((64, 32))
    assert not compiled_for
    executor.infer(larger[:3], label[:3], 3)
    assert compiled_for == [(3, 64, 32, 3)]
    executor.close()


def test_executors_go_through_mxnet_arrays(rng: np.random.Generator, event: SimpleNamespace) -> None:
    """Both take batches and return results, metrics and an end event; nothing is computed."""
    case = quantised("resnet18", 4, 32, rng)
    executors = [CudaExecutor(case.network, case.shapes, int8=int8) for int8 in (None, case.int8)]
    data, label = mx.nd.array(case.images), mx.nd.zeros(4)
    for executor in executors:
        assert executor.forward(data).shape == (4, 24) and executor.forward(data[:3], label[:3]).shape == (3, 24)
        assert executor.request_probabilities()().shape == (3, 24)
        executor.infer(data, label, 2)
        assert executor.read_metrics() == executor.request_metrics()() == (0, 0, 0, 0)
        assert executor.gpu_bus_id == "0000:00:00.0" and executor.skipped_steps == 0
        with pytest.raises(GraphError, match="'data' has the shape"):
            executor.forward(mx.nd.zeros((4, 32, 32, 5)))
        executor.synchronize()
        executor.close()
    step, int8 = executors
    step.forward_backward(data, label)
    step.optimizer.step(0.1)
    step.end_step()
    assert step.params.keys() == step.grads.keys() and step.aux and step.optimizer.state and not step.optimizer.ema
    optimizer = step.create_optimizer(SGD(), ema=True)
    assert optimizer is step.optimizer and optimizer.ema.keys() == step.params.keys() | step.aux.keys()
    optimizer.swap_ema()
    optimizer.scalars = optimizer.scalars
    optimizer.step(0.1, ema_decay=0.9)
    assert not (int8.params or int8.aux or int8.grads)
    for train in (lambda: int8.forward_backward(data, label), lambda: int8.create_optimizer(SGD())):
        with pytest.raises(GraphError, match="a network in INT8 cannot be trained"):
            train()
    with pytest.raises(GraphError, match="the cuda executor cannot run on the device 'cpu"):
        CudaExecutor(case.network, case.shapes, "cpu(0)")
