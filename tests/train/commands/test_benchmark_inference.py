"""The sweep of inference: every size and precision is measured, sizes that do not fit are left out, and the figures
agree."""

from __future__ import annotations

import io
import json
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from common.mxnet_compat import mx
from graph_passes import passes, pipeline
from graph_passes.choice import plain
from graph_passes.errors import CapacityError
from train import models
from train.commands import benchmark_inference
from train.commands.benchmark_inference import images, measure, precisions
from train.config import Config
from train.devices import Placement
from train.errors import TrainError
from train.report.inference import Point, error_of_passes, plot, scenarios

TINY = ("--model", "resnet18", "--image-size", "32", "--num-classes", "3")

pytestmark = pytest.mark.usefixtures("narrow_network")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WARM_UP_SECONDS", "SECONDS", "CPU_SECONDS"):
        monkeypatch.setattr(benchmark_inference, name, 0.02)


def point(precision: str = "fp16", batch: int = 1, images_per_sec: float = 100.0, passes: int = 200,
          milliseconds: float = 10.0, watts: float = 500.0) -> Point:
    latency = milliseconds * (1 + np.arange(passes) / passes)
    return Point(precision, batch, images_per_sec, np.full(5, 1e3 * batch / images_per_sec), latency, 1.5,
                 watts / images_per_sec, watts, 1800.0)


def test_sweep_on_the_cpu(run_train, tmp_path):
    folder = tmp_path / "run"
    code, out, err = run_train("benchmark", "--inference", *TINY, "--device", "cpu", "--batch-sizes", "2", "1", "64",
                               "--output", folder)
    assert code == 0, err
    found = json.loads((folder / "inference.json").read_text())
    assert (found["model"], found["image_size"], found["num_classes"], found["complete"]) == ("resnet18", 32, 3, True)
    assert [(each["precision"], each["batch"]) for each in found["points"]] == [("fp32", 1), ("fp32", 2), ("fp32", 64)]
    for each in found["points"]:
        assert len(each["pass_ms"]) >= 5
        assert each["images_per_sec"] == pytest.approx(each["batch"] * 1e3 / np.mean(each["pass_ms"]), rel=1e-2)
        assert each["joules_per_image"] is None and each["memory_gib"] > 0
    one, _, large = found["points"]
    assert len(one["pass_latency_ms"]) >= 10 and large["latency_ms"]["p50"] is None
    assert one["latency_ms"]["p50"] <= one["latency_ms"]["p90"] == found["scenarios"]["single stream"]["value"]
    assert found["scenarios"]["offline"]["value"] == max(each["images_per_sec"] for each in found["points"])
    assert "single stream: " in out and "offline: " in out and "J/image" not in out
    with Image.open(folder / "inference.png") as picture:
        assert picture.width > 1000

    code, _, err = run_train("benchmark", "--inference", *TINY, "--device", "cpu", "--output", folder)
    assert code == 2 and "already holds a measurement: give another --output" in err


@pytest.mark.parametrize("options, sentence", [
    (("--inference", "--data", "photos"), "--data has no effect with --inference"),
    (("--inference", "--batch-size", "8"), "--batch-size has no effect with --inference, which measures the network "
                                           "alone: give --batch-sizes"),
    (("--inference", "--batch-sizes", "4", "0"), "--batch-sizes 4 0 must be at least 1 each"),
    (("--batch-sizes", "4"), "--batch-sizes is for --inference"),
    (("--inference", "--dtype", "float16", "--device", "cpu"), "--dtype float16 needs the cuda executor"),
    (("--inference", "--int8", "--device", "cpu"), "--int8 needs a GPU for the cuda executor, and there is none here"),
    (("--inference", "--int8", "--dtype", "float16"), "--dtype float16 is not for --int8, which computes with"),
    (("--int8",), "--int8 is for --inference, as training computes in floats"),
])
def test_mistakes(run_train, options, sentence, tmp_path):
    code, _, err = run_train("benchmark", *options, "--output", tmp_path / "run")
    assert code == 2
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_is_left_out(run_train, tmp_path, monkeypatch):
    """Sizes that do not fit are left out; earlier measurements are kept."""
    check = benchmark_inference.check_memory

    def check_memory(config: Config, *arguments: object) -> None:
        if config.batch_size > 2:
            raise CapacityError("the machine has no memory for it")
        check(config, *arguments)

    monkeypatch.setattr(benchmark_inference, "check_memory", check_memory)
    line = ("benchmark", "--inference", *TINY, "--device", "cpu", "--output", tmp_path / "run", "--batch-sizes")
    code, _, err = run_train(*line, "8")
    assert code == 2 and "no batch of 8 images fits into memory: give smaller --batch-sizes" in err
    code, out, err = run_train(*line, "1", "4", "8")
    assert code == 0, err
    assert "fp32, batch 4: left out, there is no room for it in memory" in out and "batch 8" not in out
    assert len(json.loads((tmp_path / "run" / "inference.json").read_text())["points"]) == 1


def stop_after(count: int, end: Callable[[], object]) -> Callable[..., Iterator[Point]]:
    """A sweep of this many points, and the exception that ends it."""
    def sweep(*arguments: object) -> Iterator[Point]:
        yield from (point("fp32", batch) for batch in range(1, count + 1))
        end()
        raise AssertionError("it goes on")

    return sweep


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_measured_outlasts_a_signal(run_train, tmp_path, monkeypatch, number):
    monkeypatch.setattr(benchmark_inference, "sweep", stop_after(2, lambda: signal.raise_signal(number)))
    folder = tmp_path / "run"
    line = ("benchmark", "--inference", *TINY, "--device", "cpu", "--output", folder)
    code, out, err = run_train(*line)
    assert (code, err) == (128 + number, "")
    assert out.splitlines()[-1] == f"stopped: the points measured so far are in {folder / 'inference.json'}"
    found = json.loads((folder / "inference.json").read_text())
    assert [each["batch"] for each in found["points"]] == [1, 2] and not found["complete"]

    code, _, err = run_train(*line)
    assert code == 2 and "already holds a measurement: give another --output" in err


def test_a_signal_before_the_first_point(run_train, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_inference, "sweep", stop_after(0, lambda: signal.raise_signal(signal.SIGTERM)))
    code, out, err = run_train("benchmark", "--inference", *TINY, "--device", "cpu", "--output", tmp_path / "run")
    assert (code, err) == (128 + signal.SIGTERM, "")
    assert out.splitlines()[-1] == "stopped before the first point was measured"
    assert not (tmp_path / "run").exists()


def test_what_is_measured_outlasts_a_failure(run_train, tmp_path, monkeypatch):
    def fail() -> None:
        raise TrainError("the GPU is gone")

    monkeypatch.setattr(benchmark_inference, "sweep", stop_after(1, fail))
    code, _, err = run_train("benchmark", "--inference", *TINY, "--device", "cpu", "--output", tmp_path)
    assert code == 2 and err == "error: the GPU is gone\n"
    assert len(json.loads((tmp_path / "inference.json").read_text())["points"]) == 1


def test_a_folder_that_cannot_be_written_is_told_first(run_train, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_inference, "sweep", stop_after(0, lambda: None))
    (tmp_path / "file").touch()
    code, _, err = run_train("benchmark", "--inference", *TINY, "--device", "cpu", "--output", tmp_path / "file/run")
    assert code == 2 and err.startswith("error: cannot write ") and err.endswith(": give another --output\n")


def test_a_throughput_that_is_repeated_until_it_is_known(monkeypatch):
    """Ten pairs of passes determine the error of their median."""
    executor = Delayed(monkeypatch)
    point = measure(executor, "fp16", [np.zeros((64, 1))], seconds=0.2)
    assert len(point.pass_ms) == 20 and np.median(point.pass_ms) == pytest.approx(20)


def test_passes_that_end_together_are_no_error():
    """Two passes in flight may end together, as on a CPU, which computes them in parallel."""
    passes = np.tile([1.0, 39.0], 20)
    assert error_of_passes(passes) == 0 and error_of_passes(passes[:19]) == np.inf
    assert error_of_passes(passes + np.repeat([0, 10], 20)) > 0.05


class Delayed:
    """An executor and its clock: the device takes 20 ms per batch, and fetching a result takes 10 ms."""

    gpu_bus_id = ""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, probability: float = 0.5) -> None:
        self.now = self.free_at = 0.0
        self.probability, self.seen = probability, []
        monkeypatch.setattr(benchmark_inference, "perf_counter", lambda: self.now)

    def infer(self, data: mx.nd.NDArray) -> None:
        self.seen.append(data)
        self.free_at = max(self.free_at, self.now) + 0.02

    def request_probabilities(self) -> Callable[[], np.ndarray]:
        ready, count = self.free_at, len(self.seen[-1])

        def take() -> np.ndarray:
            self.now = max(self.now, ready) + 0.01
            return np.full((count, 2), self.probability, np.float32)

        return take


CPU = Placement("mxnet", "cpu(0)", "")


def test_throughput_overlaps_and_latency_does_not(monkeypatch):
    batches = images(Config(image_size=32), CPU, 3)
    assert len({batch.asnumpy().tobytes() for batch in batches}) == 6
    executor = Delayed(monkeypatch)
    found = measure(executor, "fp32", batches)
    assert found.latency_ms == pytest.approx(30)  # device and fetching, one after the other
    assert found.pass_ms[1:] == pytest.approx(20)  # fetching runs beside the next batch
    assert found.images_per_sec == pytest.approx(3e3 / found.pass_ms.mean())
    assert len({id(batch) for batch in executor.seen}) == 6


def test_no_figure_without_probabilities(monkeypatch):
    with pytest.raises(benchmark_inference.ProgramError, match="gave no probabilities: .* 0.8 to 0.8; that point is"):
        measure(Delayed(monkeypatch, 0.4), "fp32", images(Config(image_size=32), CPU, 2))


def test_precisions_of_an_executor():
    cuda, config = Placement("cuda", "gpu(0)", ""), Config()
    assert list(precisions(config, CPU, False)) == ["fp32"]
    assert list(precisions(config, cuda, False)) == ["fp16", "bf16", "tf32", "fp32"]
    assert [each.tf32 for each in precisions(config, cuda, False).values()][2:] == [True, False]
    assert list(precisions(replace(config, dtype="float32"), cuda, True)) == ["tf32"]
    assert list(precisions(replace(config, dtype="float32", tf32=False), cuda, True)) == ["fp32"]


def test_percentiles_need_enough_passes():
    known = point(passes=200)
    assert known.p50 == pytest.approx(np.percentile(known.latency_ms, 50)) and known.p99 > known.p90 > known.p50
    assert point(passes=99).p99 is None and point(passes=99).p90
    assert point(passes=9).p90 is None and point(passes=0).p50 is None
    values = point(watts=math.nan).to_dict()
    assert values["watts"] is None and values["joules_per_image"] is None


def test_scenarios_are_the_best_points():
    points = [point(milliseconds=3.0), point("bf16", milliseconds=2.0), point("fp16", 256, 900.0, passes=0),
              point("bf16", 256, 800.0, passes=0), point("bf16", 2, milliseconds=1.0)]
    found = scenarios(points)
    assert (found["single stream"].precision, found["single stream"].batch) == ("bf16", 1)
    assert found["single stream"].value == points[1].p90
    assert str(found["offline"]) == "900.00 images/sec (fp16, batch 256)"
    assert list(scenarios(points[2:])) == ["offline"]


def test_plot_shows_every_precision():
    """Each precision has its colour in both halves; without latencies only in the left half."""
    points = [point(name, batch, factor * 100.0 * batch**0.8, 200 if batch <= 32 else 0, batch**0.8 / factor)
              for name, factor in (("fp16", 2), ("tf32", 1)) for batch in benchmark_inference.GPU_BATCHES]
    without = [replace(each, latency_ms=np.empty(0)) for each in points]
    for shown, has_latency in ((points, True), (without, False)):
        pixels = np.asarray(Image.open(io.BytesIO(plot(shown, "title"))).convert("RGB")).astype(int)[60:]  # no legend
        half = pixels.shape[1] // 2
        for colour in ((0x0B, 0x62, 0xC4), (0xD9, 0x62, 0x2B)):
            left, right = ((np.abs(part - colour).max(axis=-1) < 8).sum() > 100
                           for part in (pixels[:, :half], pixels[:, half:]))
            assert (left, right) == (True, has_latency)


def test_a_frozen_network_infers_by_the_same_graph():
    """The sweep's executors are made for training too, of the classifier only. Inference must not differ from that of
    other executors."""
    graph = models.create("resnet50", 1000).graph
    frozen = passes.freeze(graph, passes.BACKBONE)
    ours, whole = (pipeline.inference(each, "float16", plain) for each in (frozen, graph))
    without_marks = [node.replace(attrs={name: value for name, value in node.attrs.items() if name != "__lr_mult__"})
                     for node in ours]
    assert without_marks == list(whole)
    shapes = {"data": (2048, 224, 224, 3), "softmax_label": (2048,)}
    step = pipeline.training_step(frozen, shapes, "float16", plain)
    assert passes.memory(step, shapes).arena_bytes < 10 * 2**30  # a whole training step would take about 80 GiB


@pytest.mark.gpu
def test_sweep_on_the_gpu(run_train, tmp_path):
    """All precisions, from one executor each; energy and memory come from NVML."""
    folder = tmp_path / "run"
    code, out, err = run_train("benchmark", "--inference", *TINY, "--device", "gpu", "--batch-sizes", "1", "2", "64",
                               "--output", folder)
    assert code == 0, err
    found = json.loads((folder / "inference.json").read_text())["points"]
    assert [(each["precision"], each["batch"]) for each in found] == [
        (name, batch) for name in ("fp16", "bf16", "tf32", "fp32") for batch in (1, 2, 64)]
    assert all(each["memory_gib"] > 0 for each in found) and "J/image" in out


@pytest.mark.gpu
@pytest.mark.alone
def test_too_large_a_batch_on_the_gpu(run_train, tmp_path):
    code, out, err = run_train("benchmark", "--inference", *TINY, "--device", "gpu", "--dtype", "float16",
                               "--batch-sizes", "2", "100000000", "--output", tmp_path / "run")
    assert code == 0, err
    assert "fp16, batch 100,000,000: left out" in out and "fp16, batch 2: " in out
