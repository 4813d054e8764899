"""gpu-report on the CPU: its sections alone and together, resuming, the page, comparisons, and user errors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common import environment
from common.files import lock
from gpu_report import command, comparison, cost, deepbench, inference, kernels, recurrent, section, training
from gpu_report.figures import Figure, Report, Section
from gpu_report.page import write_page
from graph_passes.errors import GraphError
from train.__main__ import main
from train.commands import benchmark_inference
from train.commands.compare_precision import run_arguments
from train.devices import Placement
from train.presets import load_preset
from train.report.inference import Point

PUBLISHED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu_report"

pytestmark = pytest.mark.usefixtures("narrow_network")


@pytest.fixture(autouse=True)
def drawn_once(request: pytest.FixtureRequest) -> None:
    """Only one test draws the plots of the pages."""
    if request.function is not test_sections_one_after_the_other:
        request.getfixturevalue("undrawn")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds instead of minutes."""
    monkeypatch.setattr(kernels, "SMALL_GEMMS", (deepbench.Gemm(64, 16, 32),))
    monkeypatch.setattr(kernels, "SMALL_CONVOLUTIONS", (deepbench.Convolution(9, 7, 3, 2, 4, 3, 3, 1, 1, 1, 1),))
    monkeypatch.setattr(command, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(section, "CPU_LIMIT_SECONDS", 0.02)
    monkeypatch.setattr(recurrent, "SMALL_LAYERS", (recurrent.Layer("gru", 8, 3, 5),))
    monkeypatch.setattr(training, "CPU_LIMIT_SECONDS", 0.02)
    monkeypatch.setattr(training, "CPU_MODELS", (18,))
    monkeypatch.setattr(training, "CPU_BATCH", 2)
    monkeypatch.setattr(inference, "CPU_SECONDS", 0.02)
    monkeypatch.setattr(inference, "CPU_BATCHES", (1,))


def figure(value: float, what: str = "GEMM", size: str = "1 x 1 x 1 NN", precision: str = "fp16", unit: str = "ms",
           **more: float) -> Figure:
    return Figure(what, size, precision, value, unit, 0.005, more=more)


def report(device: str, **sections: tuple[Figure, ...]) -> Report:
    return Report(device, {name: Section(figures) for name, figures in sections.items()}, {"commit": "0" * 40})


# --- measuring ---


def test_sections_one_after_the_other(run_train, tmp_path):
    """Each section is kept. The page has the figures measured so far, and names the missing sections."""
    folder = tmp_path / "report"
    command = ("gpu-report", "--device", "cpu", "--output", folder, "--sections")
    code, out, err = run_train(*command, "kernels")
    assert code == 0, err
    assert "== kernels (1 of 1)" in out and "GEMM, 64 x 16 x 32 NN, fp32: " in out
    first = json.loads((folder / "report.json").read_text())
    assert first["version"] == 1 and list(first["sections"]) == ["kernels"]
    found = {(figure["what"], figure["unit"]) for figure in first["sections"]["kernels"]["figures"]}
    assert found == {("copy", "GB/s"), ("GEMM", "ms"), ("convolution forward", "ms"), ("convolution, total", "ms"),
                     ("convolution data gradient", "ms"), ("convolution weight gradient", "ms")}

    code, out, err = run_train(*command, "training", "kernels", "inference", "recurrent")
    assert code == 0, err
    assert "== kernels: already complete, skipped" in out
    second = json.loads((folder / "report.json").read_text())
    assert second["sections"]["kernels"] == first["sections"]["kernels"]
    layers = second["sections"]["recurrent"]
    assert layers["figures"] == [] and "correctly only with oneDNN" in layers["notes"][0]  # the tests turn it off
    (trained,) = second["sections"]["training"]["figures"]
    assert (trained["what"], trained["size"], trained["precision"]) == ("ResNet-18, 224 pixels", "batch 2", "fp32")
    assert trained["value"] > 0 and trained["more"]["memory_gib"] > 0 and "joules_per_image" not in trained["more"]
    assert trained["limit"].startswith("ended after ")
    (inferred,) = second["sections"]["inference"]["figures"]
    assert inferred["size"] == "batch 1" and inferred["more"]["latency_p50_ms"] > 0
    page = (folder / "report.md").read_text()
    for words in ("Kernels", "Training", "Inference", "Not known to 1 %", "Left out"):
        assert f"## {words}" in page
    assert "| cost | not measured" in page
    assert "<h2>Training</h2>" in (folder / "report.html").read_text()
    for name in ("gemm", "convolution", "training", "inference"):
        with Image.open(folder / f"{name}.png") as picture:
            assert picture.width > 800


@pytest.mark.long
def test_no_time(run_train, tmp_path, monkeypatch):
    """Measurements that would begin too late are left out and noted; the same command measures them later."""
    command = ("gpu-report", "--device", "cpu", "--output", tmp_path / "report", "--sections", "kernels", "training")
    with monkeypatch.context() as patch:
        patch.setattr(section.Bench, "spent", property(lambda self: 1e9))
        code, out, err = run_train(*command, "kernels")
    assert code == 0, err
    assert out.count("== kernels (1 of 2)") == 1 and out.count("(2 of 2)") == 1, "each once, though one is given twice"
    found = Report.read(tmp_path / "report" / "report.json").sections
    assert [figure.what for figure in found["kernels"].figures] == ["copy"]
    assert found["training"].figures == () and not found["training"].complete
    (note,) = found["training"].notes
    assert note.startswith("ResNet-18, 224 pixels in fp32: the section had used up its ")
    assert "repeat the command" in note
    assert "## Left out" in (tmp_path / "report" / "report.md").read_text()

    code, out, err = run_train(*command)
    assert code == 0, err
    assert "copy" not in out, "that was measured before"
    again = Report.read(tmp_path / "report" / "report.json").sections
    assert again["kernels"].figures[0] == found["kernels"].figures[0]
    assert len(again["kernels"].figures) == 6 and len(again["training"].figures) == 1
    assert all(each.complete and each.notes == () for each in again.values())


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_within_a_section(run_train, tmp_path, monkeypatch, number):
    command = ("gpu-report", "--device", "cpu", "--output", tmp_path, "--sections", "kernels")
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "totals", lambda figures: signal.raise_signal(number))
        code, out, _ = run_train(*command)
    assert code == 128 + number and out.endswith("stopped: repeat the command to resume\n")
    found = Report.read(tmp_path / "report.json").sections["kernels"]
    assert len(found.figures) == 5 and not found.complete
    assert run_train(*command)[0] == 0
    again = Report.read(tmp_path / "report.json").sections["kernels"]
    assert again.complete and [each.value for each in again.figures[:5]] == [each.value for each in found.figures]


@pytest.mark.long
def test_stopped_within_a_precision_of_inference(run_train, tmp_path, monkeypatch):
    """A batch is on disk before the next one begins, so a kill loses none, and none is measured again."""
    command = ("gpu-report", "--device", "cpu", "--output", tmp_path, "--sections", "inference")
    measure, sizes, kept = benchmark_inference.measure, [], []

    def counted(executor: Any, precision: str, batches: Any, seconds: float) -> Any:
        sizes.append(len(batches[0]))
        kept.append([each.size for each in Report.read(tmp_path / "report.json").figures().values()])
        if len(sizes) == 3:
            signal.raise_signal(signal.SIGTERM)
        return measure(executor, precision, batches, seconds)

    monkeypatch.setattr(inference, "CPU_BATCHES", (1, 2, 12, 16))
    monkeypatch.setattr(benchmark_inference, "measure", counted)
    code, out, _ = run_train(*command)
    assert code == 143 and out.endswith("stopped: repeat the command to resume\n")
    assert sizes == [16, 1, 2] and kept == [[], ["batch 16"], ["batch 16", "batch 1"]]
    found = Report.read(tmp_path / "report.json").sections["inference"]
    assert len(found.figures) == 2 and not found.complete and found.notes == ()
    assert run_train(*command)[0] == 0 and sizes == [16, 1, 2, 2, 12]
    again = Report.read(tmp_path / "report.json").sections["inference"]
    assert again.figures[:2] == found.figures and len(again.figures) == 4 and again.complete


def test_int8_on_a_gpu(tmp_path, monkeypatch):
    """INT8 is measured in turn with the other precisions. A precision without kernels on this GPU is left out with the
    reason, as is a batch that does not fit."""
    asked = []

    def sweep(precision: str, config: Any, placement: Any, classes: int, batches: Any, seconds: float) -> Iterator[Any]:
        asked.append((precision, list(batches)))
        if precision == "bf16":
            raise GraphError("bfloat16 needs another GPU")
        for batch in batches[: 1 if precision == "int8" else None]:
            yield Point(precision, batch, 100.0, np.full(8, 10.0), np.array([]), 1.0, 2.0, 200.0, 1980.0)

    monkeypatch.setattr(inference, "sweep", sweep)
    monkeypatch.setattr(inference, "GPU_BATCHES", (1, 8, 32))
    monkeypatch.setattr(section.Bench, "free_memory", lambda self: None)
    found = inference.measure(section.Bench(Placement("cuda", "gpu(0)", ""), "some GPU", tmp_path, 60.0))
    names = ["fp16", "bf16", "tf32", "fp32", "int8"]
    assert asked == [(name, [32]) for name in names] + [(name, [1, 8]) for name in names]
    assert [figure.size for figure in found.figures if figure.precision == "int8"] == ["batch 32", "batch 1"]
    assert found.notes == ("bf16 with batch 32; bf16 with batch 1 and bf16 with batch 8: bfloat16 needs another GPU",
                           "int8 with batch 8: there is no room for it in memory")


@pytest.mark.long
def test_no_time_for_the_larger_batches_of_inference(run_train, tmp_path, monkeypatch):
    command = ("gpu-report", "--device", "cpu", "--output", tmp_path, "--sections", "inference")
    monkeypatch.setattr(inference, "CPU_BATCHES", (1, 2, 12))
    with monkeypatch.context() as patch:
        # the first section takes all the time
        patch.setattr(section.Bench, "spent", property(lambda self: 1e9 * len(self.figures)))
        code, out, err = run_train(*command)
    assert code == 0, err
    found = Report.read(tmp_path / "report.json").sections["inference"]
    assert [each.size for each in found.figures] == ["batch 12"] and not found.complete
    (note,) = found.notes
    assert note.startswith("fp32 with batch 1, 2: the section had used up its ")
    assert note in (tmp_path / "report.md").read_text()
    assert "no room" not in out

    assert run_train(*command)[0] == 0
    again = Report.read(tmp_path / "report.json").sections["inference"]
    assert again.figures[0] == found.figures[0] and len(again.figures) == 3 and again.complete


@pytest.mark.long
def test_cost(run_train, tiny_data, tmp_path, monkeypatch):
    # In this process. A complete run is not repeated.
    monkeypatch.setattr(cost, "run_training", lambda config, folder: folder.exists() or main(run_arguments(config)))
    monkeypatch.setattr(cost, "CIFAR10", cost.Recipe("tiny", "cpu_sample", 2, 0.0))  # any network reaches it
    monkeypatch.setattr(cost, "CIFAR10_IMAGES", {})
    monkeypatch.setattr(cost, "load_preset", lambda name: replace(load_preset(name), batch_size=4, model="resnet18",
                                                                 val_split=0.25))
    arguments = ("gpu-report", "--device", "cpu", "--output", tmp_path, "--sections", "cost", "--data", tiny_data,
                 "--price-per-hour", "3.6")
    code, _, err = run_train(*arguments)
    assert code == 0, err
    figures = Report.read(tmp_path / "report.json").sections["cost"].figures
    epochs = [each for each in figures if each.unit == "top-1 %"]
    assert [each.size for each in epochs] == ["epoch 1", "epoch 2"]
    reached, price, whole, _ = figures[2:]
    assert (reached.size, reached.unit, whole.size) == ("to 0% top-1", "s", "the whole run")
    assert 0 < reached.value <= whole.value == epochs[-1].more["seconds"] and reached.more["startup_seconds"] > 0
    assert price.value == pytest.approx(reached.value / 1000), "3.6 an hour is a thousandth a second"
    assert len(figures) == 6 and price.unit == "price"

    again = (*arguments[:-1], "7.2", "--target-accuracy", "1")
    code, _, err = run_train(*again)
    assert code == 0, err
    section = Report.read(tmp_path / "report.json").sections["cost"]
    assert section.figures[:2] == figures[:2] and len(section.figures) == 4
    assert section.figures[2].value == whole.value
    assert section.figures[3].value == pytest.approx(whole.value / 500)
    assert section.notes[0].startswith("the time to 100%: 2 epochs reach only")
    assert "2 epochs, which end at" in " ".join((tmp_path / "report.md").read_text().split())

    # Options that are not given stay as they were.
    for options, count, wanted in ((("--price-per-hour", "3.6"), 4, 1000), (("--target-accuracy", "0"), 6, 1000),
                                   (("--price-per-hour", "0"), 4, None)):
        code, _, err = run_train(*arguments[:-4], *options)
        assert code == 0, err
        found = Report.read(tmp_path / "report.json").sections["cost"].figures
        prices = [each.value for each in found if each.unit == "price"]
        assert len(found) == count and prices[-1:] == ([pytest.approx(whole.value / wanted)] if wanted else [])


def test_cost_begins_no_run_when_its_time_is_over(tmp_path):
    """Nor when the remaining time is far too short for a run."""
    for seconds, why in ((-1.0, "the section had used up its -1 s"),
                         (9.0, "it takes at least 30 s, and the section had only 9 s")):
        bench = section.Bench(Placement("mxnet", "cpu(0)", ""), "some CPU", tmp_path, seconds)
        found = cost.measure(bench)
        assert found.notes == (f"time and cost to accuracy: {why}; repeat the command to measure it",)
        assert not found.complete and not (tmp_path / "cost_run").exists()


@pytest.mark.parametrize("errors, error, limit", [
    ((0.004, 0.002, 0.003), 0.004, ""), ((0.004, None, 0.003), None, "as one of its passes"),
    ((None, None, None), None, "as one of its passes"),
])
def test_error_of_a_sum_is_known_with_those_of_its_parts(errors, error, limit):
    passes = [Figure(f"convolution {direction}", "1", "fp32", 2.0, "ms", own, "" if own else "ended", {"tflops": 1.0})
              for direction, own in zip(kernels.PASSES, errors, strict=True)]
    (total,) = kernels.totals(passes)
    assert (total.value, total.error, total.limit) == (6.0, error, limit)


def test_validations_without_checkpoints():
    lines: list[dict[str, Any]] = [
        {"event": "session", "step": 0}, {"event": "phase", "name": "checkpoint", "time": 5.0, "seconds": 2.0},
        {"event": "epoch", "epoch": 1, "time": 10.0, "val_top1": 0.5},
        {"event": "phase", "name": "validation", "seconds": 1.0}, {"event": "epoch", "epoch": 2, "time": 15.0,
                                                                   "val_top1": None},
        {"event": "epoch", "epoch": 1, "time": 20.0, "val_top1": 0.6},  # repeated after a kill
    ]
    assert cost.validations(lines) == [cost.Validation(1, 18.0, 0.6)]


def test_target_that_is_not_reached(tmp_path):
    bench = section.Bench(Placement("mxnet", "cpu(0)", ""), "some CPU", tmp_path, 1.0, target_accuracy=0.9)
    found = list(cost._figures(bench, cost.SAMPLE, [cost.Validation(1, 2.0, 0.5)], "fp32", 0.0))
    assert [each.size for each in found] == ["epoch 1", "the whole run"]
    assert bench.found().notes == ("the time to 90%: 1 epochs reach only 50.0%",)


def test_targets_have_all_their_digits(tmp_path):
    """The names of targets have all digits, so that times to different targets are never compared."""
    def sizes(target: float) -> list[str]:
        bench = section.Bench(Placement("mxnet", "cpu(0)", ""), "", tmp_path, 1.0, target_accuracy=target)
        return [each.size for each in cost._figures(bench, cost.SAMPLE, [cost.Validation(1, 2.0, 0.7)], "fp32", 0.0)]

    assert [sizes(target)[1] for target in (0.646, 0.65, 0.6512)] == ["to 64.6% top-1", "to 65% top-1",
                                                                      "to 65.12% top-1"]


@pytest.mark.parametrize("percent, is_said", [(24.0, False), (57.0, True)])
def test_other_programs_on_the_machine_are_told(run_train, percent, is_said, tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: percent)
    code, out, _ = run_train("gpu-report", "--device", "cpu", "--sections", "recurrent", "--output", tmp_path)
    said = ("other programs use 57% of the processor, so the figures will be too slow: end them, and begin anew "
            "with another --output\n")
    assert code == 0 and out.startswith(said) == is_said and ("other programs" in out) == is_said
    for page in ("report.md", "report.html"):
        said = "Other programs used 57% of the processor at the start on 20"
        assert (tmp_path / page).read_text().count(said) == is_said


# --- comparing ---


def test_pages_of_others_stay_as_they_are(run_train, tmp_path):
    for name in ("one", "two"):
        report(name, kernels=(figure(8.0),)).write(tmp_path / f"{name}.json")
    compare = ("gpu-report", "--compare", tmp_path / "one.json", tmp_path / "two.json", "--output", tmp_path / "to")
    (tmp_path / "to").mkdir()
    page = tmp_path / "to" / "comparison.md"
    page.write_text("precious")
    code, _, err = run_train(*compare)
    assert (code, page.read_text()) == (2, "precious")
    assert err == (f"error: {tmp_path / 'to'} has a comparison.md that this command did not write (there is no "
                   "comparison.json beside it): give another --output, or move it away\n")
    page.unlink()
    assert [run_train(*compare)[0] for _ in range(2)] == [0, 0]


def test_compare(run_train, tmp_path):
    """Files of reports, and their folders. Ratios above 1 are faster, whatever the unit; networks are also compared by
    their best batch; missing figures are named."""
    old = report("Old", kernels=(figure(8.0), figure(2.0, size="2 x 2 x 2 NN")),
                 training=(figure(100.0, "ResNet-50", "batch 32", unit="images/sec"),),
                 cost=(figure(9.0, "CIFAR-10", "to 88% top-1", unit="s"),),
                 inference=(figure(2.0, "ResNet-50", "batch 1", unit="images/sec"),))
    new = report("New", kernels=(figure(2.0), figure(2.0, size="2 x 2 x 2 NN"), figure(1.0, precision="int8")),
                 inference=(figure(7.0, "ResNet-50", "batch 1", unit="images/sec"),), cost=(),
                 training=(figure(900.0, "ResNet-50", "batch 256", unit="images/sec"),
                           figure(300.0, "ResNet-50", "batch 32", unit="images/sec")))
    old.write(tmp_path / "Old.json")
    beside = "Other programs used the GPU."
    replace(new, about={**new.about, "beside": [beside]}).write(tmp_path / "New" / "report.json")
    code, out, err = run_train("gpu-report", "--compare", tmp_path / "Old.json", tmp_path / "New", "--output",
                               tmp_path / "compared")
    assert code == 0, err
    found = json.loads((tmp_path / "compared" / "comparison.json").read_text())
    ratios = {(row["section"], row["size"], row["precision"]): row["ratios"] for row in found["rows"]}
    assert ratios == {("kernels", "1 x 1 x 1 NN", "fp16"): [1.0, 4.0], ("kernels", "2 x 2 x 2 NN", "fp16"): [1.0, 1.0],
                      ("inference", "batch 1", "fp16"): [1.0, 3.5],
                      ("training", "batch 32", "fp16"): [1.0, 3.0], ("training", "best batch", "fp16"): [1.0, 9.0]}
    assert found["summary"]["kernels, GEMM, fp16"] == [1.0, pytest.approx(2.0)]  # the geometric mean of 4 and 1
    page = (tmp_path / "compared" / "comparison.md").read_text()
    assert page.startswith("# Old beside New") and "| New | cost |" in page and page.count(beside) == 1
    assert "900 images/sec (batch 256)" in page and "comparison.html" in out


def test_prices_are_compared_apart_from_times(run_train, tmp_path):
    for name, per_hour in (("dear", 3600.0), ("$\\frac{$ cheap", 900.0)):
        spans = [(size, seconds) for size, seconds in (("to 88% top-1", 10.0), ("the whole run", 20.0))]
        run = [figure(seconds, "CIFAR-10", size, unit="s") for size, seconds in spans]
        run += [figure(seconds * per_hour / 3600, "CIFAR-10", size, unit="price") for size, seconds in spans]
        report(name, cost=tuple(run)).write(tmp_path / f"{per_hour}.json")
    code, _, err = run_train("gpu-report", "--compare", tmp_path / "3600.0.json", tmp_path / "900.0.json", "--output",
                             tmp_path / "compared")
    assert code == 0, err
    found = json.loads((tmp_path / "compared" / "comparison.json").read_text())["summary"]
    assert found == {"cost, CIFAR-10, fp16": [1, 1], "cost, CIFAR-10, price, fp16": [1, pytest.approx(4)]}
    page = (tmp_path / "compared" / "comparison.md").read_text()
    assert "Ratios are times as fast as dear (prices: as cheap): above 1 is better." in page


def test_compare_with_what_was_published(run_train, tmp_path):
    own = report("NVIDIA H200", kernels=(figure(0.4, size="5124 x 9124 x 2560 TN"),),
                 inference=(figure(2000.0, "ResNet-50, 224 pixels", "batch 1", "fp32", "images/sec"),))
    own.write(tmp_path / "own.json")
    published = sorted(PUBLISHED.glob("*_published.json"))
    code, _, err = run_train("gpu-report", "--compare", tmp_path / "own.json", *published, "--output",
                             tmp_path / "compared")
    assert code == 0, err
    found = json.loads((tmp_path / "compared" / "comparison.json").read_text())
    assert found["devices"] == ["NVIDIA H200", "Tesla P100 (published)", "Tesla V100 (published)"]
    (row,) = (row for row in found["rows"] if row["size"] == "5124 x 9124 x 2560 TN" and row["precision"] == "fp16")
    assert row["ratios"] == [1.0, None, pytest.approx(0.4 / 8.73)]
    assert "https://github.com/baidu-research/DeepBench" in (tmp_path / "compared" / "comparison.md").read_text()


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*_published.json")), ids=lambda path: path.stem)
def test_published_figures(path):
    """Each published figure names its source, and the kernels have sizes that a report has."""
    published = Report.read(path)
    assert all(figure.source for figure in published.figures().values())
    sizes = {str(size) for size in (*deepbench.GEMMS, *deepbench.CONVOLUTIONS)}
    assert {figure.size for figure in published.sections["kernels"].figures} <= sizes
    layers = {(f"{recurrent.NAMES[layer.mode]}, forward and backward", str(layer)) for layer in recurrent.LAYERS}
    if "recurrent" in published.sections:
        assert {(figure.what, figure.size) for figure in published.sections["recurrent"].figures} <= layers
    for figure in published.sections["kernels"].figures:  # DeepBench's own TFLOP/s agree, within the rounding of ms
        if figure.what == "GEMM":
            (gemm,) = (size for size in deepbench.GEMMS if str(size) == figure.size)
            assert figure.more["tflops"] == pytest.approx(gemm.flops / figure.value / 1e9, rel=0.2)


def test_devices_of_one_name_are_told_apart(tmp_path):
    same = [report("GPU", kernels=(figure(1.0),)), report("GPU", kernels=(figure(2.0),))]
    same[1].about["commit"] = "f" * 40  # type: ignore[index]
    assert comparison._names(same) == ["GPU (0000000)", "GPU (fffffff)"]
    assert comparison._names([same[0], same[0]]) == ["GPU (0000000) (1)", "GPU (0000000) (2)"]


# --- mistakes ---


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """One file for each kind of report."""
    good = report("GPU", kernels=(figure(1.0),)).to_dict()
    contents = {
        "good": good, "newer": {**good, "version": 2}, "version": {**good, "version": "1"},
        "other": {"name": "inference"}, "list": [1],
        "damaged": {**good, "sections": {"kernels": {"figures": [{"what": "GEMM"}]}}},
        "empty": {**good, "sections": {}}, "nameless": {**good, "device": None}, "about": {**good, "about": [1]},
        **{name: {**good, "sections": {"kernels": {"figures": [
            {"what": "GEMM", "size": "1", "precision": "fp16", "unit": "ms", "value": 1.0, **wrong}]}}}
           for name, wrong in {"zero": {"value": 0}, "negative": {"value": -1.0}, "nan": {"value": float("nan")},
                               "words": {"value": "1 ms"}, "number": {"size": 1}, "more": {"more": None},
                               "huge": {"value": 1e300}, "tiny": {"error": 1e-300}, "long": {"value": 10**400},
                               "list of numbers": {"value": [1.0]}, "tflops": {"more": {"tflops": "NaN"}},
                               "other name": {"speed": 1}}.items()},
        **{name: {**good, "sections": {"kernels": {**good["sections"]["kernels"], **wrong}}}
           for name, wrong in {"notes": {"notes": ["one", 2]}, "seconds": {"seconds": "NaN"},
                               "figures": {"figures": {}}}.items()},
        **{name: {**good, "device": device} for name, device in {
            "no device": "", "half": "A\ud800", "control": "A\x07"}.items()},
        "true": {**good, "version": True}, "note": {**good, "about": {"note": [1]}},
        "section": {**good, "sections": {"kernels": 1e300}},
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    yield lambda name: tmp_path / f"{name}.json"


@pytest.mark.parametrize("name, sentence", [
    ("newer", "newer.json is a report of version 2, but this program reads version 1: make it anew"),
    ("other", "other.json is not a GPU report"),
    ("list", "list.json is not a GPU report"),
    ("text", "text.json is not JSON: give the report.json of a report"),
    ("absent", "absent.json (No such file or directory): give the report.json of a report"),
    ("deep", "deep.json is not JSON"),
    ("damaged", "damaged.json is damaged, or was edited by hand (sections.kernels.figures[0].size is "),
    ("nameless", "(device is None, where words belong): make it anew"),
    ("no device", "(device is empty): make it anew"),
    ("half", r"(device is 'A\ud800', which has characters that cannot be shown): make it anew"),
    ("control", r"(device is 'A\x07', which has characters that cannot be shown): make it anew"),
    ("true", "true.json is a report of version True, but this program reads version 1: make it anew"),
    ("about", "about.json is damaged, or was edited by hand (about is [1], where an object belongs): make"),
    ("note", "(about.note is [1], where words belong): make it anew"),
    ("section", "(sections.kernels is 1e+300, where an object belongs): make it anew"),
    ("figures", "(sections.kernels.figures is {}, where a list belongs): make it anew"),
    ("notes", "(sections.kernels.notes[1] is 2, where words belong): make it anew"),
    ("seconds", "(sections.kernels.seconds must be a number, not 'NaN'): make it anew"),
    ("zero", "(sections.kernels.figures[0].value is 0 ms): make it anew"),
    ("negative", "(sections.kernels.figures[0].value is -1.0, which no measurement can give): make it anew"),
    ("nan", "(sections.kernels.figures[0].value is nan, which no measurement can give): make it anew"),
    ("huge", "(sections.kernels.figures[0].value is 1e+300, which no measurement can give): make it anew"),
    ("long", "(sections.kernels.figures[0].value is 1000000"),
    ("tiny", "(sections.kernels.figures[0].error is 1e-300, which no measurement can give): make it anew"),
    ("list of numbers", "(sections.kernels.figures[0].value must be a number, not [1.0]): make it anew"),
    ("words", "(sections.kernels.figures[0].value must be a number, not '1 ms'): make it anew"),
    ("number", "(sections.kernels.figures[0].size is 1, where words belong): make it anew"),
    ("more", "(sections.kernels.figures[0].more is None, where an object belongs): make it anew"),
    ("tflops", "(sections.kernels.figures[0].more.tflops must be a number, not 'NaN'): make it anew"),
    ("other name", "(sections.kernels.figures[0] has 'speed', which is not a field of a figure): make it anew"),
    ("version", "version.json is a report of version '1', but this program reads version 1: make it anew"),
    ("empty", "the reports have no figure in common (GPU: kernels; GPU: no section): measure the same sections"),
])
def test_files_that_cannot_be_compared(run_train, files, name, sentence, tmp_path):
    code, _, err = run_train("gpu-report", "--compare", files("good"), files(name), "--output", tmp_path / "compared")
    assert code == 2 and err.startswith("error: ") and sentence in err and err.count("\n") == 1
    assert not (tmp_path / "compared").exists()


@pytest.mark.parametrize("options, sentence", [
    (("--device", "gpu"), "--device gpu: no NVIDIA GPU was found here; use --device cpu\n"),
    (("--sections", "speed"), "--sections speed is not one of"),
    (("--minutes", "0"), "--minutes 0.0 must be above 0"),
    (("--price-per-hour", "-1"), "--price-per-hour -1.0 must be 0, or from 0.0001 to 1000000000"),
    (("--price-per-hour", "1e30"), "--price-per-hour 1e+30 must be 0, or from 0.0001 to 1000000000"),
    (("--compare", "a.json"), "--compare a.json is a single report: give two or more"),
    (("--compare", "a.json", "b.json", "--minutes", "3"), "--minutes has no effect with --compare"),
    (("--data", "/nowhere"), "data path /nowhere does not exist; give "),
    (("--data", "samples"), "--data samples is not CIFAR-10: leave it out"),
    (("--data", "synthetic"), "data path 'synthetic' is not a place with image files"),
    (("--sections", "kernels", "--data", "x"), "--data belongs to the section cost, which is not in --sections"),
])
def test_mistakes(run_train, options, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr("train.devices.find_gpus", list)
    code, _, err = run_train("gpu-report", "--output", tmp_path / "report", *options)
    assert code == 2 and err.startswith("error: ") and sentence in err and err.count("\n") == 1
    assert not (tmp_path / "report").exists()


def test_other_data_is_not_measured_under_the_name_of_cifar10(run_train, tiny_data, tmp_path):
    code, out, err = run_train("gpu-report", "--device", "cpu", "--output", tmp_path / "report", "--data", tiny_data)
    assert code == 2 and out == "" and not (tmp_path / "report").exists()
    assert err == (f"error: --data {tiny_data} is not CIFAR-10, on which the section cost trains: its split train has "
                   "27 images of 3 classes, not 50,000 of 10; give the path of CIFAR-10, or leave --data out\n")


def test_folder_that_cannot_be_written_is_found_out_before_anything_is_measured(run_train, tmp_path):
    (tmp_path / "file").touch()
    code, out, err = run_train("gpu-report", "--device", "cpu", "--output", tmp_path / "file" / "report")
    assert code == 2 and err.startswith("error: cannot write ") and "give another --output" in err
    assert "==" not in out


def test_two_at_once_are_refused(run_train, tmp_path):
    """Two reports in one folder would overwrite each other's figures."""
    command = ("gpu-report", "--device", "cpu", "--output", tmp_path, "--sections", "recurrent")
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        assert lock(other)
        code, out, err = run_train(*command)
    finally:
        os.close(other)
    assert (code, err.startswith(f"error: another process is measuring into {tmp_path}: wait until")) == (2, True)
    assert "==" not in out and list(tmp_path.iterdir()) == []
    assert run_train(*command)[0] == 0


@pytest.mark.parametrize("about, sections, reason", [
    ({}, {"kernels": (figure(1.0),)}, "sections.kernels.figures[0] is GEMM, 1 x 1 x 1 NN, fp16, in ms"),
    ({}, {"kernels": (figure(1.0, "pooling", tflops=1.0),)}, "sections.kernels.figures[0] is pooling, "),
    ({}, {"recurrent": (figure(1.0, "LSTM, inference"),)}, "sections.recurrent.figures[0] is LSTM, inference, "),
    ({}, {"training": (figure(1.0, "VGG-16", unit="images/sec"),)}, "sections.training.figures[0] is VGG-16, "),
    ({}, {"inference": (figure(1.0, "ResNet-50", "all", unit="images/sec"),)}, "ResNet-50, all, fp16, in images/sec"),
    ({}, {"cost": (figure(1.0, "CIFAR-10", "epoch 1", unit="top-1 %"),)}, "CIFAR-10, epoch 1, fp16, in top-1 %"),
    ({}, {"music": (figure(1.0),)}, "sections.music.figures[0] is GEMM, "),
    ({"versions": 3}, {}, "about.versions is 3"),
])
def test_report_that_was_written_by_hand(run_train, about, sections, reason, tmp_path):
    """A report that was written by hand cannot be shown as a page. This error is raised before anything is measured."""
    device, commit = environment.hardware()["cpu"], environment.git_commit()
    Report(device, {name: Section(figures) for name, figures in sections.items()},
           {"commit": commit, **about}).write(tmp_path / "report.json")
    before = (tmp_path / "report.json").read_bytes()
    code, out, err = run_train("gpu-report", "--device", "cpu", "--output", tmp_path, "--sections", "recurrent")
    assert code == 2 and err.startswith(f"error: the report in {tmp_path} was not measured by this command (")
    assert reason in err
    assert err.endswith("): give another --output\n") and "==" not in out
    assert (tmp_path / "report.json").read_bytes() == before


def test_prices_of_a_part_of_the_spans(tmp_path):
    """report.json may contain only part of the prices: the page shows these."""
    run = (figure(50.0, "CIFAR-10", "epoch 1", unit="top-1 %", seconds=1.0),
           figure(2.0, "CIFAR-10", "to 88% top-1", unit="s"), figure(3.0, "CIFAR-10", "the whole run", unit="s"),
           figure(0.5, "CIFAR-10", "to 88% top-1", unit="price"))
    write_page(tmp_path, report("some CPU", cost=run))
    page = (tmp_path / "report.md").read_text()
    assert "| to 88% top-1 | 2.0 s | 0.5 | - |" in page and "| the whole run | 3.0 s | - | - |" in page


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_damaged_report_is_not_measured_into(run_train, content, tmp_path):
    (tmp_path / "report.json").write_text(content)
    code, _, err = run_train("gpu-report", "--device", "cpu", "--output", tmp_path)
    assert code == 2 and err.startswith(f"error: {tmp_path / 'report.json'} is no") and err.count("\n") == 1
    assert err.endswith(": to measure anew, give another --output\n") and err.count(": ") == 2
    assert (tmp_path / "report.json").read_text() == content


@pytest.mark.parametrize("page", ["report.md", "report.html"])
def test_pages_of_others_are_not_written_over(run_train, page, tmp_path):
    (tmp_path / page).write_text("mine")
    code, out, err = run_train("gpu-report", "--device", "cpu", "--output", tmp_path)
    assert (code, err) == (2, f"error: {tmp_path} has a {page} that this command did not write (there is no "
                              "report.json beside it): give another --output, or move it away\n")
    assert (tmp_path / page).read_text() == "mine" and "==" not in out


@pytest.mark.long
def test_a_start_that_adds_to_a_report_is_in_it(run_train, tmp_path):
    """The report gets the command of the start, below earlier commands, and its date. A start that measures nothing
    adds neither.
    """
    command = ("gpu-report", "--device", "cpu", "--output", tmp_path, "--sections", "kernels", "--minutes")
    first = Report("", {}, {"command": "another one", "date": "2020-01-01T00:00:00+00:00",
                            "commit": environment.git_commit(), "versions": environment.versions()})
    replace(first, device=environment.hardware()["cpu"]).write(tmp_path / "report.json")
    assert run_train(*command, "1")[0] == 0
    about = Report.read(tmp_path / "report.json").about
    before, here = about["command"].splitlines()
    assert before == "another one" and here and about["date"] > "2026"
    assert f"    another one\n    {here}\n" in (tmp_path / "report.md").read_text()
    assert run_train(*command, "2")[0] == 0
    assert Report.read(tmp_path / "report.json").about == about


def test_report_of_other_versions(run_train, tmp_path):
    versions = {**environment.versions(), "numpy": "0.1"}
    Report(environment.hardware()["cpu"], {}, {"commit": environment.git_commit(), "versions": versions}).write(
        tmp_path / "report.json")
    code, _, err = run_train("gpu-report", "--device", "cpu", "--output", tmp_path)
    assert (code, err) == (2, f"error: the report in {tmp_path} was measured with another version of numpy: give "
                              "another --output\n")


@pytest.mark.parametrize("has_run", [True, False])
def test_a_price_for_a_run_of_another_commit(run_train, tmp_path, monkeypatch, has_run):
    """The price is counted from the existing run; otherwise the run would be repeated."""
    monkeypatch.setattr(cost, "measure", lambda bench: bench.found())
    sections = {"cost": Section((figure(50.0, "CIFAR-10", "epoch 1", unit="top-1 %", seconds=1.0),))}
    Report(environment.hardware()["cpu"], sections, {"commit": "0" * 40}).write(tmp_path / "report.json")
    if has_run:
        (tmp_path / cost.RUN_FOLDER).mkdir()
    code, _, err = run_train("gpu-report", "--device", "cpu", "--output", tmp_path, "--sections", "cost",
                             "--price-per-hour", "4")
    assert (code, "was measured with the commit 0000000" in err) == ((0, False) if has_run else (2, True))


def test_report_of_another_device(run_train, tmp_path):
    report("NVIDIA H200", kernels=(figure(1.0),)).write(tmp_path / "report.json")
    code, _, err = run_train("gpu-report", "--device", "cpu", "--output", tmp_path)
    assert code == 2 and f"the report in {tmp_path} was measured with the device NVIDIA H200, not " in err
