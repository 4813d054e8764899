"""The page of a report on a GPU: every section has its table and its plot, and empty ones have none."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from common.errors import UserError
from gpu_report import plots as gpu_plots
from gpu_report.figures import Figure, Report, Section
from gpu_report.kernels import CONVOLUTION, PASSES, totals, with_shares
from gpu_report.page import check_page, write_page
from train.report import plots
from train.report.plots import DARK

NETWORK, CIFAR10 = "ResNet-50, 224 pixels", "CIFAR-10, ResNet-18, 128 pixels"


@pytest.fixture
def report() -> Report:
    """The report of a GPU, with round numbers."""
    timed = [Figure("GEMM", "1 x 2 x 3 NN", precision, 1.0, "ms", 0.004, more={"tflops": tflops})
             for precision, tflops in (("fp32", 33.5), ("fp16", 500.0), ("int8", 1000.0))]
    timed += [Figure(f"{CONVOLUTION} {direction}", "4 x 5 x 6 x 7, 8 of 3 x 3, stride 1", "fp16", 2.0, "ms", 0.004,
                     more={"tflops": 250.0}) for direction in PASSES]
    timed += [Figure("copy", "2,048 MiB", "", 3600.0, "GB/s", 0.001)]
    kernels = tuple(with_shares([*timed, *totals(timed)], "NVIDIA H200"))
    layer = Figure("LSTM, inference", "hidden 8, batch 3, 5 steps", "fp16", 0.5, "ms", 0.02, "ended after 1 s and 12 "
                   "timings", {"tflops": 3.0})
    steps = tuple(Figure(NETWORK, "batch 256", precision, speed, "images/sec", 0.002, more=more)
                  for precision, speed, more in (("fp32", 1000.0, {}), ("fp16", 10_500.0, {
                      "memory_gib": 12.25, "largest_batch": 2674.0, "joules_per_image": 0.0654})))
    passes = tuple(Figure(NETWORK, f"batch {batch}", "fp16", 100.0 * batch, "images/sec", 0.002,
                          more={"latency_p50_ms": 1.5} if batch < 64 else {}) for batch in (1, 32, 256))
    run = (*(Figure(CIFAR10, f"epoch {epoch}", "fp16", 40.0 * epoch, "top-1 %", more={"seconds": 5.0 * epoch})
             for epoch in (1, 2)),
           Figure(CIFAR10, "the whole run", "fp16", 10.0, "s"), Figure(CIFAR10, "the whole run", "fp16", 0.02, "price"))
    sections = {"kernels": Section(kernels, ("GEMM 1 x 2 x 3 NN in fp8: there is none",), 60.0),
                "recurrent": Section((layer,)), "training": Section(steps), "inference": Section(passes),
                "cost": Section(run)}
    about = {"command": "python -m train gpu-report", "date": "2027-01-02T03:04:05+00:00"}
    return Report("NVIDIA H200", sections, about)


@pytest.mark.long
def test_page(report, tmp_path):
    write_page(tmp_path, report)
    page = (tmp_path / "report.md").read_text()
    for line in (
        "**1,000** TFLOP/s in the best product of matrices, int8 · **3,600** GB/s in a copy within its memory · "
        "**10,500** images/sec in training, ResNet-50, fp16 · **25,600** images/sec in inference, ResNet-50, fp16",
        "Measured 2027-01-02 03:04:05 UTC, by:",
        "| fp16 | 500 TFLOP/s | 51% | 250 TFLOP/s | 25% | 50% |",
        "3,600 GB/s, read and written, 75% of the datasheet's bandwidth",
        "| 4 x 5 x 6 x 7, 8 of 3 x 3, stride 1 | fp16 | 6 | 0.4% | 250 | 25% | 50% |",  # all three passes
        "| LSTM, inference | hidden 8, batch 3, 5 steps | fp16 | 0.5 | 2.0% | 3 |",
        "| recurrent | LSTM, inference | hidden 8, batch 3, 5 steps | fp16 | 2.0% | ended after 1 s and 12 timings |",
        "| ResNet-50, 224 pixels | fp16 | 256 | 10,500.0 | 0.2% | 10.50 | 12.2 | 2,674 | 0.0654 | - | - |",
        "| fp16 | 32 | 3,200.0 | 0.2% | 1.50 | - | - | - | - |",
        "| the whole run | 10.0 s | 0.02 | - |",
        "| kernels | GEMM 1 x 2 x 3 NN in fp8: there is none |",
    ):
        assert line in page, line
    html = (tmp_path / "report.html").read_text()
    for name in ("gemm", "convolution", "recurrent", "training", "inference", "accuracy"):
        assert f"({name}.png)" in page
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.width > 700 and picture.height > 150
    assert html.count("<img ") == 6 and html.count("prefers-color-scheme: dark)") == 7  # in the style's colours
    assert Report.read(tmp_path / "report.json") == report


@pytest.mark.long
def test_large_batches_alone_have_no_latency(report, tmp_path):
    """A report whose time sufficed only for the largest batch has no latencies."""
    section = report.sections["inference"]
    write_page(tmp_path, report.with_section("inference", Section(section.figures[-1:])))
    assert "| fp16 | 256 | 25,600.0 | 0.2% | - |" in (tmp_path / "report.md").read_text()
    with Image.open(tmp_path / "inference.png") as picture:
        assert picture.width > 800


@pytest.mark.parametrize("name, change", [
    ("inference", {"precision": "FP16"}), ("inference", {"size": f"batch {10**20}"}), ("kernels", {"unit": "s"}),
    ("recurrent", {"unit": "s"}), ("recurrent", {"precision": ""}), ("training", {"precision": ""}),
    ("inference", {"precision": ""}),
])
def test_what_no_page_can_show(report, tmp_path, name, change):
    first, *others = report.sections[name].figures
    damaged = report.with_section(name, Section((replace(first, **change), *others)))
    damaged.write(tmp_path / "report.json")
    with pytest.raises((UserError, ValueError), match=rf"sections\.{name}\.figures\[0\]"):
        check_page(Report.read(tmp_path / "report.json"))


def test_what_is_missing_is_named(tmp_path):
    """No section at all, and sections without figures."""
    sections = {"training": Section((), ("all of it: no time",)), "cost": Section(())}
    write_page(tmp_path, Report("some CPU", sections))
    page = (tmp_path / "report.md").read_text()
    assert "| kernels | not measured: add it with --sections |" in page and "| training | all of it: no time |" in page
    assert "## Training" not in page and not list(tmp_path.glob("*.png"))


def test_what_is_timed_once_is_not_said_to_be_repeated(report, tmp_path):
    """A whole training run is a single timing, whose error is unknown."""
    words = "Each timing was repeated until the standard error"
    for section, is_repeated in (("cost", False), ("training", True)):
        write_page(tmp_path, Report("some CPU", {section: report.sections[section]}))
        assert (words in (tmp_path / "report.md").read_text()) == is_repeated, section


def test_kernels_that_were_stopped_have_no_shares_yet(tmp_path):
    """The GPU has a datasheet. The page shows another section, which was measured alone afterwards."""
    copy = Figure("copy", "2,048 MiB", "", 3600.0, "GB/s", 0.001)
    write_page(tmp_path, Report("NVIDIA H200", {"kernels": Section((copy,), complete=False)}))
    page = (tmp_path / "report.md").read_text()
    assert "Copy of 2,048 MiB within the memory: 3,600 GB/s, read and written.\n" in page


def test_ratios_of_which_some_are_not_known(tmp_path: Path):
    nan = float("nan")
    values = {"GEMM, fp16": [1.0, 4.0, nan], "copy": [1.0, nan, 0.25]}
    with Image.open(io.BytesIO(gpu_plots.ratios(values, ["A", "B", "C"], "times as fast as A", DARK).png)) as picture:
        assert picture.width > 800


def test_plots_have_room_and_ticks():
    """The highest point is within its axes, and a narrow logarithmic axis has enough ticks."""
    points = [Figure("ResNet-50", f"batch {batch}", "fp32", 2.0 * batch, "images/sec", more={"latency_p50_ms": batch})
              for batch in (1, 8)]
    images, latency = gpu_plots.over_batches(points, plots.LIGHT).figure.axes
    assert images.get_ylim()[0] == 0 and images.get_ylim()[1] > 1.05 * images.dataLim.ymax
    (low, high), shown = latency.get_ylim(), latency.dataLim
    assert low < shown.ymin < shown.ymax < high and sum(low <= tick <= high for tick in latency.get_yticks()) >= 4
    layers = [Figure("LSTM", str(size), "fp32", 1.0, "ms", more={"tflops": size}) for size in (0.066, 0.151)]
    (axes,) = gpu_plots.kernels(layers, {}, plots.LIGHT).figure.axes
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 4
    layers += [Figure("GRU", str(size), "fp32", 1.0, "ms", more={"tflops": size}) for size in (100.0, 200.0)]
    for axes in gpu_plots.kernels(layers, {}, plots.LIGHT).figure.axes:
        low, high = axes.get_xlim()
        assert sum(low <= tick <= high for tick in axes.get_xticks()) <= 5, "of all panels, one of which is narrow"


@pytest.mark.parametrize("speeds", [
    (0.000965,), (0.00445,), (30.0,), (0.0007, 0.0032), (0.0066, 0.0151), (0.11, 0.53), (7.0, 34.0), (90.0, 950.0),
    (1.0, 990.0), (0.088, 0.162), (0.09, 0.11)])
def test_ticks_of_kernels_do_not_overlap(speeds):
    """Ticks of several kernels or of a single one do not overlap, and none is written as a power of ten."""
    drawn = gpu_plots.kernels([Figure("GEMM", f"{speed} x {speed}", "fp32", 1.0, "ms", more={"tflops": speed})
                               for speed in speeds], {"GEMM": "products"}, plots.LIGHT).figure
    drawn.canvas.draw()
    (axes,) = drawn.axes
    low, high = axes.get_xlim()
    shown = [label for label in axes.get_xticklabels() if label.get_text() and low <= label.get_position()[0] <= high]
    places = [label.get_window_extent() for label in shown]
    assert len(shown) >= 2 and not any("e" in label.get_text() for label in shown)
    assert all(left.x1 < right.x0 for left, right in pairwise(places)), [label.get_text() for label in shown]


@pytest.mark.parametrize("device", ["NVIDIA H200", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, of a rented host"])
def test_long_names_in_ratios_are_whole_and_colors_differ(device):
    """Reports of the same device and commit are told apart by their position."""
    devices = [f"{device} (369a32a) ({place})" for place in range(1, 9)]
    values = {"recurrent, RNN with ReLU, forward and backward, fp16": [float(place) for place in range(1, 9)]}
    drawn = gpu_plots.ratios(values, devices, f"times as fast as {devices[0]} (prices: as cheap)", plots.LIGHT).figure
    drawn.canvas.draw()
    (axes,) = drawn.axes
    for part in (axes.xaxis.label, axes.get_legend()):
        place = part.get_window_extent()
        assert drawn.bbox.x0 <= place.x0 and place.x1 <= drawn.bbox.x1, part
    assert len({bar.get_facecolor() for bar in axes.patches}) == 7
