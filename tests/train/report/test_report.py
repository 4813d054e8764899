"""The report of a made-up run: every figure is computed again here, in plain Python."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.command_line import exit_code_of
from common.errors import UserError
from train.errors import TrainError
from train.recording.metrics import METRICS_FILE, EpochRow, GpuPoint, LossPoint, RunRecord
from train.recording.outcomes import Outcomes
from train.recording.recorder import Recorder
from train.report import classifier_plots, document, plots, predictions
from train.report import page as report
from train.report.classifier import Classifier
from train.report.predictions import Predictions
from train.report.summary import summarize, what_limits

IMAGES_PER_STEP = 48
FIRST_SESSION, SECOND_SESSION, WARMUP = 31, 24, 5
PLOTS = {"throughput.png", "time_split.png", "loss.png", "accuracy.png"}


@pytest.fixture
def record() -> RunRecord:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_steps = FIRST_SESSION + SECOND_SESSION
    wait = [rng.uniform(5, 40) for _ in range(num_steps)]
    compute = [rng.uniform(90, 200) for _ in range(num_steps)]
    steps = [w + c for w, c in zip(wait, compute, strict=True)]
    epochs = [EpochRow(1, 0.1, 300.0, 2.5, 0.30, 2.7, 0.25, 0.5), EpochRow(2, 0.2, 310.0, 1.5, 0.60)]
    epochs += [EpochRow(3, 0.3125, 305.0, 1.0, 0.7, 1.25, 0.61234, 0.9)]
    epochs += [EpochRow(4, 0.4, 1.0, 1.0, 0.8, 1.3, 0.6, 0.95)]
    return RunRecord(
        config={"config": "made_up", "model": "resnet34", "optimizer": {"momentum": 0.875},
                "models": ("resnet18", "resnet50")},
        command="python -m train train --config made_up --note 'a < b | c'",
        images_per_step=IMAGES_PER_STEP,
        num_processes=2,
        warmup_steps=WARMUP,
        start_date="2026-01-02T03:04:05+00:00",
        versions={"mxnet": "1.9.1"},
        hardware={"cpu": "Some CPU", "gpus": []},
        step_ms=steps,
        loader_wait_ms=wait,
        compute_ms=compute,
        session_starts=[0, FIRST_SESSION],
        seconds=sum(steps) / 1e3 + 10.0,
        phase_seconds={"validation": 4.0, "checkpoint": 1.0},
        loader_images_per_sec=5000.0,
        epochs=epochs,
        loss_curve=[LossPoint(5 * i, i / 3, 3.0 / i, 0.05 * i, 0.1) for i in range(1, 12)],
        events=[{"event": "bad_image", "time": 1.5, "step": 3, "file": "a.JPEG", "reason": "<truncated>"}],
    )


def counted(values: list[float]) -> list[float]:
    """The values of the steps that count: both sessions without their warm-up."""
    return values[WARMUP:FIRST_SESSION] + values[FIRST_SESSION + WARMUP :]


@pytest.mark.long
def test_gpu_figures_weigh_by_counted_time(record: RunRecord, tmp_path: Path) -> None:
    """Points every 5 steps, beginning with the warm-up, which counts neither joules nor images."""
    assert "GPU" not in report.write_report(tmp_path, record).read_text(), "a run on a CPU does not speak of it"
    record.config["price_per_hour"] = 3.5
    record.config |= {"mixup": 0.2, "cutmix": 1.0}
    points = range(5, FIRST_SESSION + SECOND_SESSION + 1, 5)
    record.gpu_curve = [GpuPoint(step, 10.0 * step, None if step == 20 else 0.5, step / 2, 1500.0, 0.25)
                        for step in points]
    counted = [*range(WARMUP, FIRST_SESSION), *range(FIRST_SESSION + WARMUP, FIRST_SESSION + SECOND_SESSION)]
    assert len(record.step_ms) == points[-1]
    joules = sum(10.0 * (5 * (i // 5) + 5) * record.step_ms[i] / 1e3 for i in counted)
    found = summarize(record)
    assert found.joules_per_image == pytest.approx(joules / (IMAGES_PER_STEP * len(counted)))
    assert found.gpu_power == pytest.approx(joules / sum(record.step_ms[i] / 1e3 for i in counted))
    assert (found.gpu_utilization, found.gpu_memory) == pytest.approx((0.5, 27.5))
    assert found.price == pytest.approx(3.5 * record.seconds / 3600)
    record.events.append({"event": "gpu_readings", "time": 2.0, "problem": "NVML does not give energy: Not Supported"})
    text = report.write_report(tmp_path, record).read_text()
    for cell in (f"| energy | {found.joules_per_image:.3g} J |", "| utilisation | 50% |", "at 3.5 an hour",
                 "| clock | 1,500 MHz |", "| at the power limit | 25% |",
                 "NVML does not give energy: Not Supported.", "those of mixed images (--mixup, --cutmix)"):
        assert cell in text, cell
    assert Image.open(tmp_path / "gpu.png").size[0] > 500


@pytest.mark.usefixtures("undrawn")
def test_a_gpu_that_tells_nothing(record: RunRecord, tmp_path: Path) -> None:
    record.gpu_curve = [GpuPoint(10, None, None, None)]
    text = report.write_report(tmp_path, record).read_text()
    assert "| power | not known |" in text and "gpu.png" not in text
    assert summarize(record).joules_per_image is None


def test_every_figure_of_the_summary(record: RunRecord) -> None:
    summary = summarize(record)
    steps, wait, compute = (counted(v) for v in (record.step_ms, record.loader_wait_ms, record.compute_ms))
    speeds = sorted(IMAGES_PER_STEP / (ms / 1e3) for ms in steps)
    quartiles = statistics.quantiles(speeds, n=4, method="inclusive")
    assert summary.total.mean == pytest.approx(IMAGES_PER_STEP * len(steps) / (sum(steps) / 1e3))
    assert summary.total.uncertainty == pytest.approx(statistics.pstdev(speeds) / len(steps) ** 0.5)
    assert summary.total_median == pytest.approx(statistics.median(speeds))
    assert summary.total_spread == pytest.approx((quartiles[2] - quartiles[0]) / 2)
    assert summary.compute_images_per_sec == pytest.approx(IMAGES_PER_STEP * len(compute) / (sum(compute) / 1e3))
    assert summary.loader_wait_share == pytest.approx(sum(wait) / sum(steps))
    assert summary.loader_images_per_sec == 5000.0
    all_images = IMAGES_PER_STEP * (FIRST_SESSION + SECOND_SESSION)
    assert summary.whole_run_images_per_sec == pytest.approx(all_images / (sum(record.step_ms) / 1e3 + 10.0))
    assert (summary.num_steps_counted, summary.num_steps_warmup) == (len(steps), 2 * WARMUP)
    assert summary.time_split_seconds == pytest.approx(
        {
            "computation": sum(record.compute_ms) / 1e3,
            "waiting for the loader": sum(record.loader_wait_ms) / 1e3,
            "validation": 4.0,
            "checkpoint": 1.0,
            "set-up and other": 5.0,
        }
    )
    assert summary.best is not None and summary.best.epoch == 3


@pytest.mark.parametrize(
    ("compute", "loader", "wait_share", "limit"),
    [
        (100.0, 250.0, 0.30, "computation"),
        (100.0, 99.0, 0.01, "loader"),
        (100.0, None, 0.11, "loader"),
        (100.0, None, 0.09, "computation"),
    ],
)
def test_what_limits_the_run_is_said_in_words(
    compute: float, loader: float | None, wait_share: float, limit: str
) -> None:
    found, text = what_limits(compute, loader, wait_share)
    assert found == limit
    assert text.startswith(f"{limit.replace('loader', 'The loader').replace('comp', 'Comp')} limits this run: ")
    assert f"{wait_share:.1%}" in text
    assert loader is None or f"{loader:,.1f}" in text


def test_report_folder(record: RunRecord, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "report"
    assert report.write_report(folder, record) == folder / "report.md"
    assert {path.name for path in folder.iterdir()} == PLOTS | {
        "report.md", "report.html", "report.json", "dawnbench.tsv"
    }
    summary = summarize(record)

    values = json.loads((folder / "report.json").read_text())
    assert values["step_ms"] == record.step_ms
    assert values["summary"]["total"][0] == summary.total.mean
    restored = RunRecord.from_dict(values)
    assert summarize(restored) == summary and restored.epochs == record.epochs

    markdown = (folder / "report.md").read_text()
    assert markdown.startswith("# resnet34, made_up: training report\n")
    assert f"**{summary.total.mean:,.1f}** images/sec in total" in markdown
    assert summary.limit_text in markdown
    assert "| loader-only | 5,000.0 |" in markdown
    assert f"{summary.num_steps_counted} steps are counted; the first 5 of each session (10 in all)" in markdown
    assert "| 3 | 61.23% | 90.00% | 1.2500 | 70.00% | 1.0000 | 305.0 | 0:18:45 |" in markdown
    assert "| optimizer.momentum | 0.875 |" in markdown
    assert set(re.findall(r"\]\((\w+\.png)\)", markdown)) == PLOTS

    page = (folder / "report.html").read_text()
    assert "a &lt; b | c" in page and "&lt;truncated&gt;" in page
    assert not re.search(r"""(src|href|srcset)=["'](?!data:)|url\(""", page)  # one file, nothing is fetched
    images = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    assert len(images) == 2 * len(PLOTS) and "image/png" not in page  # light and dark
    for data in images:
        assert ElementTree.fromstring(base64.b64decode(data)).get("width", "").endswith("pt")
    assert all(Image.open(folder / name).width > 700 for name in PLOTS)

    assert (folder / "dawnbench.tsv").read_text() == (
        "epoch\thours\ttop1Accuracy\ttop5Accuracy\n"
        "1\t0.100000\t25.000\t50.000\n"
        "3\t0.312500\t61.234\t90.000\n"
        "4\t0.400000\t60.000\t95.000\n"
    )


@pytest.mark.long(but=["theme0"])
@pytest.mark.parametrize("theme", [plots.LIGHT, plots.DARK])
def test_plots_show_something_in_the_colours_of_the_theme(record: RunRecord, theme: plots.Theme) -> None:
    def rgb(colour: str) -> tuple[int, ...]:
        return tuple(bytes.fromhex(colour[1:]))

    drawn = {
        theme.series[0]: plots.throughput(record, theme),
        theme.series[1]: plots.loss(record, theme),
        theme.series[2]: plots.accuracy(record, theme),
        theme.parts[3]: plots.time_split(summarize(record).time_split_seconds, theme),
    }
    for colour, drawing in drawn.items():
        image = Image.open(io.BytesIO(drawing.png)).convert("RGB")
        counts = {c: n for n, c in image.getcolors(image.width * image.height) or []}
        assert max(counts, key=lambda c: counts[c]) in (rgb(theme.background), rgb(theme.parts[0]))
        assert counts.get(rgb(colour), 0) > 100


def test_dark_plots_are_light_ones_in_other_colours(record: RunRecord, rng: np.random.Generator) -> None:
    """`darkened` gives what drawing in the dark colours gives, but for the names of markers and clips, which matplotlib
    makes from their colours."""
    def named_anew(svg: bytes) -> bytes:
        names: dict[bytes, bytes] = {}
        return re.sub(rb"\b[a-z][0-9a-f]{10}\b", lambda match: names.setdefault(match[0], b"n%d" % len(names)), svg)

    record.gpu_curve = [GpuPoint(step, 300.0 + step, 0.9, 2.0, 1500.0, 0.1) for step in range(5, 50, 5)]
    outcomes = Outcomes.of(rng.dirichlet(np.ones(4), 50), rng.integers(0, 4, 50), range(50), [])
    drawings = [lambda theme: plots.throughput(record, theme), lambda theme: plots.loss(record, theme),
                lambda theme: plots.accuracy(record, theme), lambda theme: plots.gpu(record, theme),
                lambda theme: plots.time_split(summarize(record).time_split_seconds, theme),
                lambda theme: classifier_plots.calibration(outcomes, theme)]
    for draw in drawings:
        dark = plots.darkened(draw(plots.LIGHT).svg)
        assert dark and named_anew(dark) == named_anew(draw(plots.DARK).svg)
    picture = classifier_plots.confusion(outcomes.confusion(4), list("abcd"), plots.LIGHT)
    assert plots.darkened(picture.svg) is None


def test_all_formats_of_a_plot_have_one_layout(record: RunRecord) -> None:
    """The bytes of a plot do not depend on which format is drawn first."""
    one, other = plots.accuracy(record, plots.LIGHT), plots.accuracy(record, plots.LIGHT)
    assert (one.png, one.svg) == (other.svg, other.png)[::-1]


def test_long_runs_are_drawn_with_few_points() -> None:
    rng = random.Random(5)
    steps = [rng.uniform(9, 11) for _ in range(20_000)]
    record = RunRecord({}, "", 1, step_ms=steps, loader_wait_ms=[0.0] * 20_000, compute_ms=steps)
    x, y = plots._thin(*([plots.np.arange(20_000.0)] * 2))
    assert len(x) == len(y) == plots.MAX_POINTS and x[0] < x[-1] < 20_000
    assert 10_000 < len(plots.throughput(record, plots.LIGHT).svg) < 150_000


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("sessions, words", [
    ([], f" {IMAGES_PER_STEP} images per step"), ([32, 32], " 32 images per step"),
    ([32, 224], " 32, then 224 images per step"),
])
def test_images_per_step_of_all_sessions(sessions: list[int], words: str, record: RunRecord, tmp_path: Path) -> None:
    record.session_images = sessions
    assert words in report.write_report(tmp_path, record).read_text()


@pytest.mark.usefixtures("undrawn")
def test_skipped_images_stand_at_its_head(record: RunRecord, tmp_path: Path) -> None:
    """Each skipped image is named once, although a resumed run may report an image again."""
    text = report.write_report(tmp_path, record).read_text()
    assert "1 image was skipped, which cannot be decoded (see the events): a.JPEG\n" in text
    record.events += [{"event": "bad_image", "time": 2.0, "file": f"{name}.png", "reason": "x"} for name in "bcdb"]
    text = report.write_report(tmp_path, record).read_text()
    assert "4 images were skipped, which cannot be decoded (see the events): a.JPEG, b.png, c.png, ...\n" in text
    record.events = []
    assert "skipped" not in report.write_report(tmp_path, record).read_text()


@pytest.mark.usefixtures("undrawn")
def test_skipped_images_of_each_epoch(record: RunRecord, tmp_path: Path) -> None:
    record.epochs[2].skipped_images = 1234
    text = report.write_report(tmp_path, record).read_text()
    table = [line.split("|")[-2].strip() for line in text[text.index("| epoch | ") :].split("\n\n")[0].splitlines()]
    assert table == ["skipped", "---:", "0", "0", "1,234", "0"]


def test_metrics_of_plugins(record: RunRecord, tmp_path: Path) -> None:
    """A tile of the best epoch's, a column of the table of epochs, and a plot."""
    for number, row in enumerate(record.epochs):
        row.plugin_metrics = {"brier": 0.5 - 0.125 * number} | ({"surest": 0.75} if number else {})
    assert record.best
    text = report.write_report(tmp_path, record).read_text()
    assert f"**{record.best.plugin_metrics['brier']:.4g}** brier of the same epoch" in text
    (heading,) = [line for line in text.splitlines() if line.startswith("| epoch |")]
    assert "| brier | surest | train top-1 |" in heading
    assert "](plugin_metrics.png)" in text and (tmp_path / "plugin_metrics.png").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_plugins_loss_is_named(record: RunRecord, tmp_path: Path) -> None:
    record.config |= {"loss": "focal", "plugin": [f"/x/focal.py#sha256={'0123456789abcdef' * 4}"]}
    text = report.write_report(tmp_path, record).read_text()
    assert "Trained with the loss focal of a plug-in (/x/focal.py (sha256 01234567...))." in text


@pytest.mark.usefixtures("undrawn")
def test_benchmark_without_epochs_or_losses(record: RunRecord, tmp_path: Path) -> None:
    record.epochs, record.loss_curve, record.events, record.loader_images_per_sec = [], [], [], None
    report.write_report(tmp_path, record)
    assert not (tmp_path / "loss.png").exists() and not (tmp_path / "accuracy.png").exists()
    markdown = (tmp_path / "report.md").read_text()
    assert "Learning" not in markdown and "| loader-only | not measured |" in markdown
    assert (tmp_path / "dawnbench.tsv").read_text().count("\n") == 1


@pytest.mark.long
def test_predictions_that_lie_there_become_a_picture(record: RunRecord, tmp_path: Path) -> None:
    pictures = np.zeros((7, 20, 20, 3), np.uint8)
    predictions.save(Predictions(pictures, ["cat"] * 7, ["cat"] * 6 + ["dog"], np.full(7, 0.75), epoch=4), tmp_path)
    text = report.write_report(tmp_path, record).read_text()
    caption = r"7 images, .* after 4 epochs, .*: 6 are right\."
    assert re.search(rf"## What it has learned\n\n!\[{caption}\]\(predictions.png\)", text)
    assert Image.open(tmp_path / "predictions.png").width == 1152
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/jpeg") == 7 and page.count('class="wrong"') == 1
    assert "<b>✗ dog</b> 75%<br>is: cat" in page and "image/png" not in page


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_one_step(tmp_path: Path) -> None:
    record = RunRecord({}, "python", 8, warmup_steps=10, session_starts=[0], seconds=1.0,
                       step_ms=[1000.0], loader_wait_ms=[250.0], compute_ms=[750.0])
    report.write_report(tmp_path, record)
    assert "| total | 8.0 | (a single step) |" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_bad_input_is_one_sentence(record: RunRecord, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="no finished step"):
        report.write_report(tmp_path / "a", RunRecord({}, "python", 8))
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/report/.*another place"):
        report.write_report(tmp_path / "file" / "report", record)


@pytest.mark.long
def test_command_line_makes_a_report_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path, config={}, images_per_step=4, num_epochs=1, log_every=1, tensorboard=False)
    with recorder as run:
        run.begin_epoch(0, 3)
        for _ in run.timed(range(3)):
            run.end_step(0.1)
    command = [sys.executable, "-m", "train.report.page"]
    made = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert Path(made.stdout.strip()) == tmp_path / "report" / "report.md"
    (tmp_path / METRICS_FILE).unlink()
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    assert exit_code_of(report.main) == 2
    assert capsys.readouterr().err == (
        f"error: there is no metrics.jsonl in {tmp_path}: give the output folder of a training run\n"
    )


def test_accuracy_comes_before_speed(record: RunRecord, tmp_path: Path, rng: np.random.Generator) -> None:
    """Tiles, sections and columns of the page show accuracy before speed. Numbers are right-aligned, and the page with
    all its pictures is small."""
    record.epochs = [replace(row, val_count=44) if row.val_top1 else row for row in record.epochs]
    record.epochs[2].val_top1 = 30 / 44
    rows = rng.integers(0, 5, (24, 3))
    pictures = rng.integers(0, 256, (24, 160, 160, 3)).astype(np.uint8)  # noise, the worst case of JPEG
    predictions.save(Predictions(pictures, ["a"] * 24, ["b"] * 24, np.full(24, 0.5), epoch=3), tmp_path)
    outcomes = Outcomes.of(np.eye(5)[rows[:, 0]], rows[:, 1], range(24))
    count = len(outcomes.mistakes)
    Classifier(outcomes, list("abcde"), ["f"] * count, pictures[:count], np.arange(count), "validation images",
               3).save(tmp_path)
    text = report.write_report(tmp_path, record).read_text()
    assert re.search(r"\n\n\*\*68.2%\*\* validation top-1, epoch 3; 95 % interval: 53 to 80 % · .* images/sec", text)
    assert "Accuracy, classifier and pictures are those of epoch 3, whose weights predict, validate and export" in text
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == [
        "Learning", "What it has learned", "The classifier", "Throughput", "Time", "Events", "Machine and versions",
        "Configuration"]
    assert ("| epoch | val top-1 | val top-5 | val loss | train top-1 | train loss | images/sec | time |\n"
            f"| {' | '.join(['---:'] * 8)} |") in text
    page = (tmp_path / "report.html").read_text()
    assert '<td class="short num">68.18%</td>' in page and '<td class="short">Some CPU</td>' in page
    assert "<th class=num>images/<wbr>sec</th>" in page
    assert page.count("data:image/jpeg") == 24 + count and len(page) < 2e6
    assert json.loads((tmp_path / "report.json").read_text())["summary"]["best_interval"] == pytest.approx(
        [0.534, 0.800], abs=5e-4)


@pytest.mark.usefixtures("undrawn")
def test_results_of_another_epoch_than_the_headlines_are_told(record: RunRecord, tmp_path: Path) -> None:
    """The page says so if its pictures are of another epoch, as in runs of earlier versions."""
    predictions.save(Predictions(np.zeros((1, 8, 8, 3), np.uint8), ["a"], ["b"], np.ones(1), epoch=4), tmp_path)
    text = report.write_report(tmp_path, record).read_text()
    assert "Accuracy is that of epoch 3, whose weights predict" in text and "after 4 epochs" in text


@pytest.mark.parametrize(("cells", "is_number"), [
    (["1", "", "1,234.5"], True), (["61.23%", "not measured"], True), (["0:18:45", "9.5 s"], True),
    (["53 to 80 %", "3 of 25"], True), (["12", "a"], False), (["", "-"], False), (["2 GPUs"], False),
])
def test_which_columns_are_numbers(cells: list[str], is_number: bool) -> None:
    assert document._numbers(document.Table(("",), [(cell,) for cell in cells])) == [is_number]
