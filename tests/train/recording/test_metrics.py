"""The recorder and its record, with a simulated clock: every time is known exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import random
import re
import shutil
import statistics
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common import plugins
from graph_passes.executors import Metrics
from train.errors import TrainError
from train.processes.signals import StoppedBySignal
from train.recording.gpu_monitor import GpuReadings
from train.recording.metrics import METRICS_FILE, UNITS, EpochRow, RunRecord, interval, shown_interval, speed
from train.recording.mlperf import PREFIX
from train.recording.recorder import Recorder
from train.report.page import write_report
from train.report.summary import summarize

IMAGES_PER_STEP = 24


@dataclass
class Clock:
    seconds: float = 100.0

    def __call__(self) -> float:
        return self.seconds


class Run:
    """A recorder with its clock and what it printed."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.clock = Clock()
        self.output = io.StringIO()
        terminal, width = options.pop("terminal", False), options.pop("width", 200)
        defaults = {"config": {"config": "test"}, "images_per_step": IMAGES_PER_STEP, "num_epochs": 3, "log_every": 4}
        self.recorder = Recorder(
            folder,
            **{**defaults, "warmup_steps": 2, "tensorboard": False, **options},
            console=Console(file=self.output, force_terminal=terminal, width=width, highlight=False),
            clock=self.clock,
        )

    def batches(self, waits: list[float]) -> Any:
        for wait in waits:
            self.clock.seconds += wait
            yield None

    def epoch(
        self, epoch: int, waits: list[float], computes: list[float], first_step: int = 0, loss: float = 2.0
    ) -> None:
        num_steps = first_step + len(waits)
        self.recorder.begin_epoch(epoch, num_steps, first_step)
        pending = 0
        for compute, _ in zip(computes, self.recorder.timed(self.batches(waits)), strict=True):
            self.clock.seconds += compute
            pending += IMAGES_PER_STEP
            self.recorder.end_step(0.1)
            if self.recorder.log_due:
                self.recorder.close_interval()
                self.recorder.log(Metrics(loss * pending, 0.25 * pending, 0.75 * pending, pending))
                pending = 0


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def test_speed_is_that_of_tf_cnn_benchmarks(rng: random.Random) -> None:
    times = [rng.uniform(50, 900) for _ in range(rng.randrange(3, 40))]
    speeds = [32 / (t / 1e3) for t in times]
    middle = statistics.median(speeds)
    found = speed(times, 32)
    assert found.mean == pytest.approx(32 / (statistics.fmean(times) / 1e3), rel=1e-12)
    assert found.uncertainty == pytest.approx(statistics.pstdev(speeds) / len(times) ** 0.5, rel=1e-9)
    assert found.jitter == pytest.approx(1.4826 * statistics.median(abs(s - middle) for s in speeds), rel=1e-9)
    assert re.fullmatch(r"\d+\.\d \+/- \d+\.\d \(jitter = \d+\.\d\)", str(found))


def test_a_device_that_works_a_step_ahead(tmp_path: Path, rng: random.Random) -> None:
    """Every step except a session's first has its own time, although reading the metrics waits for the latest one."""
    run, done, expected = Run(tmp_path, log_every=3), [100.5], []  # 0.5 s of other work come first
    with run.recorder as recorder:
        for epoch in range(3):
            recorder.begin_epoch(epoch, 5)
            for _ in recorder.timed(run.batches([0.0] * 5)):
                seconds = rng.uniform(1, 2)
                expected.append(1e3 * seconds)
                done.append(max(done[-1], run.clock.seconds) + seconds)
                run.clock.seconds = max(run.clock.seconds, done[-2])  # the previous step is done
                recorder.stop_clock()
                recorder.end_step(0.1)
                if recorder.log_due:
                    run.clock.seconds = done[-1]
                    recorder.close_interval()
                    recorder.log(Metrics(1.0, 0.0, 0.0, IMAGES_PER_STEP))
            with recorder.phase("validation"):
                run.clock.seconds += 7.0
                done.append(run.clock.seconds)
            recorder.end_epoch()
        assert recorder.record.step_ms[1:] == pytest.approx(expected[:-1], abs=1e-3)


@pytest.mark.parametrize(
    ("num_steps", "session_starts", "warmup", "expected"),
    [
        # steps; first step of each session; warm-up steps of a session; numbers of the steps that count
        (6, [0], 2, [2, 3, 4, 5]),
        (6, [0, 4], 1, [1, 2, 3, 5]),
        (3, [0], 10, [2]),  # a session shorter than its warm-up: its last step counts
        (5, [0, 3], 10, [2, 4]),
        (5, [0, 5], 2, [2, 3, 4]),  # a session that has not done a step yet
        (0, [0], 2, []),
    ],
)
def test_warm_up_of_every_session_is_left_out(
    num_steps: int, session_starts: list[int], warmup: int, expected: list[int]
) -> None:
    record = RunRecord({}, "", 1, warmup_steps=warmup, session_starts=session_starts, step_ms=[1.0] * num_steps)
    assert record.counted_steps.tolist() == expected


def test_step_times_split_into_wait_and_computation(tmp_path: Path, rng: random.Random) -> None:
    waits = [rng.uniform(0.001, 0.1) for _ in range(9)]
    computes = [rng.uniform(0.1, 0.7) for _ in range(9)]
    run = Run(tmp_path)
    with run.recorder as recorder:
        run.epoch(0, waits, computes)
    record = recorder.record
    # Times are written with four decimals of a millisecond.
    assert record.loader_wait_ms == pytest.approx([1e3 * w for w in waits], abs=1e-4)
    assert record.compute_ms == pytest.approx([1e3 * c for c in computes], abs=2e-4)
    assert record.step_ms == pytest.approx([1e3 * (w + c) for w, c in zip(waits, computes, strict=True)], abs=1e-4)
    assert record.seconds == pytest.approx(sum(waits) + sum(computes), abs=2e-3)
    assert record.speed().mean == pytest.approx(
        IMAGES_PER_STEP * 7 / (sum(waits[2:]) + sum(computes[2:])), rel=1e-5
    )  # two steps are warm-up


def test_several_batches_of_one_step_add_their_waits(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.recorder as recorder:
        recorder.begin_epoch(0, 1)
        for _ in recorder.timed(run.batches([0.25, 0.5])):  # gradient accumulation: two batches, one update
            run.clock.seconds += 1.0
        recorder.end_step(0.1)
    assert recorder.record.loader_wait_ms == [750.0]
    assert recorder.record.compute_ms == [2000.0]


def test_a_step_of_fewer_images_counts_those_that_it_has(tmp_path: Path) -> None:
    """The last step of an epoch whose batches --accumulate does not divide: all steps here have 24 images/sec."""
    run = Run(tmp_path, num_epochs=2, warmup_steps=0)
    with run.recorder as recorder:
        for epoch in range(2):
            recorder.begin_epoch(epoch, 3)
            for seconds, images in ((1.0, None), (1.0, None), (0.5, 12)):
                run.clock.seconds += seconds
                recorder.end_step(0.1, images)
                if recorder.log_due:
                    recorder.close_interval()
                    recorder.log(Metrics(1.0, 1, 1, 1))
            recorder.end_epoch()
    record = RunRecord.read_jsonl(tmp_path / METRICS_FILE)
    assert record == recorder.record == RunRecord.from_dict(json.loads(json.dumps(record.to_dict())))
    assert record.images.tolist() == [24, 24, 12] * 2
    found = summarize(record)
    assert record.speed() == found.total == (24.0, 0.0, 0.0)
    assert found.total_median == found.compute_images_per_sec == found.whole_run_images_per_sec == 24.0
    assert [row.images_per_sec for row in record.epochs] == [24.0, 24.0]
    assert run.output.getvalue().count("images/sec: 24.0 +/- 0.0") == 2
    assert [line["images_per_sec"] for line in lines(tmp_path) if line["event"] == "steps"] == [24.0] * 3

    again = Run(tmp_path, num_epochs=2, first_step=4, first_epoch=1)
    assert again.recorder.record.images.tolist() == [24, 24, 12, 24], "the rest is done again"


def test_bad_images_of_the_loader_are_named_once(tmp_path: Path) -> None:
    """Bad images are named once, whether the loader met them before the first batch was requested or later. A resumed
    run does not name them again."""
    class Loader:
        bad_images: Sequence[tuple[str, str]] = [("first.jpg", "empty")]

        def __iter__(self) -> Iterator[int]:
            yield 0
            self.bad_images = [("a.jpg", "truncated"), ("first.jpg", "empty")]
            yield 1
            yield 2

    for epoch in range(2):
        run, loader = Run(tmp_path), Loader()
        with run.recorder as recorder:
            recorder.begin_epoch(epoch, 6)
            for _ in itertools.chain(recorder.timed(loader), recorder.timed(loader)):
                run.clock.seconds += 1.0
                recorder.end_step(0.1)
        named = [(event["file"], event["step"]) for event in recorder.record.events if event["event"] == "bad_image"]
        assert named == [("first.jpg", 0), ("a.jpg", 1)]
        assert run.output.getvalue().count("skipped ") == 2 * (epoch == 0)


def test_time_of_a_phase_is_no_step_time(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.recorder as recorder:
        recorder.begin_epoch(0, 2)
        for wait in recorder.timed(run.batches([0.5, 0.5])):
            assert wait is None
            run.clock.seconds += 1.0
            with recorder.phase("checkpoint"):
                run.clock.seconds += 7.0
            recorder.end_step(0.1)
        with recorder.phase("checkpoint"):
            run.clock.seconds += 1.0
        recorder.end_epoch()
    assert recorder.record.step_ms == [1500.0, 1500.0]
    assert recorder.record.compute_ms == [1000.0, 1000.0]
    assert recorder.record.phase_seconds == {"checkpoint": 15.0}
    assert recorder.record.seconds == 18.0


def test_log_is_due_on_the_same_steps_on_every_rank(tmp_path: Path) -> None:
    due: dict[bool, list[int]] = {}
    for enabled in (True, False):
        folder = tmp_path / str(enabled)
        folder.mkdir()
        run = Run(folder, enabled=enabled)
        due[enabled] = []
        with run.recorder as recorder:
            for epoch in range(2):
                recorder.begin_epoch(epoch, 6)
                for step in range(6):
                    run.clock.seconds += 1.0
                    recorder.end_step(0.1)
                    if recorder.log_due:
                        due[enabled].append(6 * epoch + step)
                        recorder.close_interval()
                        recorder.log(Metrics(1.0, 1, 1, 1))
                with recorder.phase("validation"):
                    pass
                recorder.end_epoch(Metrics(1.0, 1, 1, 1))
            recorder.event("checkpoint", path="x")
            recorder.loader_speed(5.0)
        assert bool(run.output.getvalue()) == enabled
    # The first step, every 4 since the last, and at the end of an epoch.
    assert due[True] == due[False] == [0, 3, 5, 9, 11]
    assert list((tmp_path / "False").iterdir()) == []


def test_lines_read_back_as_the_record_and_have_units(tmp_path: Path, rng: random.Random) -> None:
    run = Run(tmp_path)
    with run.recorder as recorder:
        for epoch in range(2):
            run.epoch(epoch, [0.01] * 7, [rng.uniform(0.1, 0.2) for _ in range(7)])
            with recorder.phase("validation"):
                run.clock.seconds += 3.0
            recorder.end_epoch(Metrics(150.0, 40, 90, 100))
            recorder.event("checkpoint", path=f"checkpoints/{epoch}.npz")
        recorder.loader_speed(1234.5)
    written = lines(tmp_path)
    assert written[0]["event"] == "units" and written[0]["units"] == UNITS
    measured = {
        key
        for line in written[1:]
        for key, value in line.items()
        if isinstance(value, (float, list)) and not isinstance(value, bool)
    }
    without_unit = measured - UNITS.keys() - {"train_loss", "train_top1", "val_loss", "val_top1", "val_top5"}
    assert not without_unit
    assert RunRecord.read_jsonl(tmp_path / METRICS_FILE) == recorder.record
    assert RunRecord.from_dict(json.loads(json.dumps(recorder.record.to_dict()))) == recorder.record
    row = recorder.record.epochs[1]
    assert (row.val_loss, row.val_top1, row.val_top5) == (1.5, 0.4, 0.9)
    assert recorder.record.loader_images_per_sec == 1234.5
    assert [event["event"] for event in recorder.record.events] == ["checkpoint", "checkpoint", "end"]


def test_metrics_may_come_a_step_late(tmp_path: Path) -> None:
    """Times, losses and lines belong to the steps at which they were requested; none is lost at an end or an error."""
    run = Run(tmp_path, log_every=2)
    with pytest.raises(TrainError), run.recorder as recorder:
        recorder.begin_epoch(0, 9)
        for number in range(7):
            run.clock.seconds += 0.1 + 0.1 * number
            recorder.end_step(0.1 * number)
            if number in (1, 2, 4):
                recorder.log(Metrics(float(number), 0, 0, 1))
            if recorder.log_due:
                recorder.close_interval()
        raise TrainError("a reason")
    steps = [line for line in lines(tmp_path) if line["event"] == "steps"]
    assert [line["step"] for line in steps] == [1, 2, 4, 6, 7]
    assert [line["loss"] for line in steps] == [1.0, 2.0, 4.0, None, None]
    assert [line["step_ms"] for line in steps] == [[100.0], [200.0], [300.0, 400.0], [500.0, 600.0], [700.0]]
    assert [line["learning_rate"] for line in steps] == pytest.approx([0.0, 0.1, 0.3, 0.5, 0.6])
    assert [line.split("  ")[0] for line in run.output.getvalue().splitlines()] == [
        "epoch 1/3, step 1/9", "epoch 1/3, step 2/9", "epoch 1/3, step 4/9",
    ]


def test_gpu_readings_and_price(tmp_path: Path) -> None:
    run = Run(tmp_path, config={"price_per_hour": 36.0})
    with run.recorder as recorder:
        recorder.begin_epoch(0, 10)
        for number in range(4):
            run.clock.seconds += 50.0
            recorder.end_step(0.1)
            recorder.close_interval()
            memory = float("nan") if number == 1 else 10.0 + number
            readings = GpuReadings(100.0 * number, 0.25 * number, memory, 1900.0 - number, 0.5)
            recorder.log(Metrics(1.0, 0, 0, 1), readings if number else None)
    record = recorder.record
    assert [(point.step, point.power, point.utilization, point.memory) for point in record.gpu_curve] == [
        (2, 100.0, 0.25, None), (3, 200.0, 0.5, 12.0), (4, 300.0, 0.75, 13.0),
    ]
    assert record.price == pytest.approx(2.0)  # 200 s
    assert lines(tmp_path)[-1]["price"] == pytest.approx(2.0)
    assert RunRecord.read_jsonl(tmp_path / METRICS_FILE) == record
    assert RunRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    written = [line for line in lines(tmp_path) if line["event"] == "steps"]
    assert {f"gpu_{name}" for name in GpuReadings._fields} <= written[-1].keys() & UNITS.keys()
    assert (record.gpu_curve[-1].clock, record.gpu_curve[-1].power_capped) == (1897.0, 0.5)
    assert "gpu_power" not in written[0]
    resumed = Run(tmp_path, first_step=3).recorder
    assert [point.step for point in resumed.record.gpu_curve] == [2, 3]


def test_a_run_whose_end_nobody_knows(tmp_path: Path) -> None:
    run = Run(tmp_path, num_epochs=None)
    with run.recorder as recorder:
        recorder.begin_epoch(0, 1000)
        for _ in recorder.timed(run.batches([0.0] * 4)):
            run.clock.seconds += 0.5
            recorder.end_step(0.1)
        recorder.close_interval()
        recorder.log(Metrics(2.0, 0, 0, 1))
    (line, _) = run.output.getvalue().splitlines()
    assert line == "step 4  images/sec: 48.0 +/- 0.0 (jitter = 0.0)  loss 2.000  learning rate 0.1"


def test_epoch_means_weigh_log_lines_by_their_steps(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.recorder as recorder:
        recorder.begin_epoch(0, 5)
        losses = [1.0, 2.0, 3.0, 4.0, 10.0]
        total = Metrics(0, 0, 0, 0)
        for number, loss in enumerate(losses):
            image_metrics = Metrics(loss * IMAGES_PER_STEP, number, number, IMAGES_PER_STEP)
            total = Metrics(*(a + b for a, b in zip(total, image_metrics, strict=True)))
            run.clock.seconds += 1.0
            recorder.end_step(0.1)
            if recorder.log_due:  # after 4 steps, and after the fifth and last
                recorder.close_interval()
                recorder.log(total)
                total = Metrics(0, 0, 0, 0)
        recorder.end_epoch()
    row = recorder.record.epochs[0]
    assert row.train_loss == pytest.approx(statistics.fmean(losses))
    assert row.train_top1 == pytest.approx((0 + 1 + 2 + 3 + 4) / (5 * IMAGES_PER_STEP))
    assert row.val_top1 is None


def test_plain_output_has_speed_loss_and_time_left_but_no_control_codes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.recorder as recorder:
        run.epoch(0, [0.0] * 8, [0.5] * 8)
        with recorder.phase("validation"):
            run.clock.seconds += 10.0
        recorder.end_epoch(Metrics(100.0, 40, 90, 100))
        run.epoch(1, [0.0] * 8, [0.5] * 8)
    text = run.output.getvalue()
    assert "\x1b" not in text and "\r" not in text
    printed = text.splitlines()
    assert printed[0] == "epoch 1/3, step 1/8  loss 2.000  learning rate 0.1"
    assert printed[1] == (
        "epoch 1/3, step 4/8  images/sec: 48.0 +/- 0.0 (jitter = 0.0)  loss 2.000  learning rate 0.1  "
        "time left > 0:00:10"
    )
    assert "top-1 40.0%, top-5 90.0%" in printed[3]
    # 4 + 8 steps of half a second and two validations of ten seconds
    assert printed[4].endswith("time left 0:00:26")
    assert printed[-1] == "total images/sec: 48.0"


@pytest.mark.long(but=["5-False"])
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("num_classes, is_told", [(5, False), (6, True)])
def test_top5_of_five_classes_is_kept_but_not_shown(tmp_path: Path, num_classes: int, is_told: bool) -> None:
    """With five classes, top-5 is always 100 %."""
    run = Run(tmp_path, num_classes=num_classes)
    with run.recorder as recorder:
        run.epoch(0, [0.0] * 8, [0.5] * 8)
        recorder.end_epoch(Metrics(100.0, 40, 100, 100))
    assert ("top-5" in run.output.getvalue()) == is_told and "top-1 40.0%" in run.output.getvalue()
    record = RunRecord.read_jsonl(tmp_path / METRICS_FILE)
    assert record.epochs[-1].val_top5 == 1.0
    text = write_report(tmp_path / "report", record).read_text()
    assert ("top-5" in text) == is_told and "val top-1" in text


def test_time_left_of_very_short_epochs(tmp_path: Path) -> None:
    """Five epochs of two steps of half a second, with 4 s of validation and checkpoint after each, the first time 9 s.
    Before the end of the second epoch the printed time is a bound, afterwards it is the run's real time."""
    run = Run(tmp_path, num_epochs=5, log_every=100, warmup_steps=10)
    told, began = [], []
    with run.recorder as recorder:
        for epoch in range(5):
            run.epoch(epoch, [0.0] * 2, [0.5] * 2)
            began.append(run.clock.seconds)  # where the line of the epoch's last step is
            with recorder.phase("validation"):
                run.clock.seconds += 6.0 if epoch == 0 else 3.0
            with recorder.phase("checkpoint"):
                run.clock.seconds += 3.0 if epoch == 0 else 1.0
            recorder.end_epoch(Metrics(100.0, 40, 90, 100))
    for line in run.output.getvalue().splitlines():
        if "step 2/2" in line:
            told.append(line.partition("time left ")[2])
    left = [round(run.clock.seconds - time) for time in began]
    assert told[0] == "> 0:00:04" and left[0] == 29, "nobody knows yet what comes between two epochs"
    assert told[2:] == [f"0:00:{seconds:02}" for seconds in left[2:]] == ["0:00:14", "0:00:09", "0:00:04"]


def test_a_speed_of_warm_up_is_none_of_the_epoch(tmp_path: Path) -> None:
    run = Run(tmp_path, warmup_steps=4)
    with run.recorder as recorder:
        for epoch in range(3):
            run.epoch(epoch, [0.0] * 2, [5.0 if epoch < 2 else 0.5] * 2)
            recorder.end_epoch()
    assert [row.images_per_sec for row in recorder.record.epochs] == [None, None, pytest.approx(48)]


@pytest.mark.parametrize("remove", [lambda folder: (folder / METRICS_FILE).unlink(), shutil.rmtree],
                         ids=["file", "folder"])
def test_metrics_that_are_removed_are_written_again(tmp_path: Path, remove: Callable[[Path], None]) -> None:
    run = Run(tmp_path / "run")
    with run.recorder as recorder:
        run.epoch(0, [0.0] * 2, [0.5] * 2)
        remove(tmp_path / "run")
        run.epoch(1, [0.0] * 2, [0.5] * 2)
    assert recorder.all_removed == [METRICS_FILE]
    assert run.output.getvalue().count("removed while the run continues: metrics.jsonl in") == 1
    kept = RunRecord.read_jsonl(tmp_path / "run" / METRICS_FILE)
    assert kept == recorder.record and kept.step_ms == [500.0] * 4
    assert [event["event"] for event in kept.events] == ["removed", "end"]


@pytest.mark.parametrize("name, remove", [("tensorboard", shutil.rmtree), ("mlperf.log", Path.unlink)],
                         ids=["tensorboard", "mlperf"])
def test_other_logs_that_are_removed_are_named_and_written_again(
    tmp_path: Path, name: str, remove: Callable[[Path], None]
) -> None:
    run = Run(tmp_path, tensorboard=True, mlperf=True)
    with run.recorder as recorder:
        run.epoch(0, [0.0] * 4, [0.5] * 4)
        remove(tmp_path / name)
        run.epoch(1, [0.0] * 4, [0.5] * 4)
    recorder.event("behind the end")
    assert recorder.all_removed == [name]
    assert run.output.getvalue().count(f"removed while the run continues: {name} in") == 1
    losses = [event.step for event in tensorboard_events(tmp_path) for value in event.summary.value
              if value.tag == "train/loss"]
    assert losses == [1, 4, 8]
    content = (tmp_path / "mlperf.log").read_text()
    assert content.count(PREFIX) == content.count("\n") and content.count('"epoch_start"') == 2
    assert '"run_start"' in content and '"run_stop"' in content


def test_terminal_gets_a_progress_bar_that_80_columns_hold(tmp_path: Path) -> None:
    run = Run(tmp_path, terminal=True, width=80)
    with run.recorder:
        run.epoch(0, [0.0] * 8, [0.5] * 8)
        run.recorder._terminal.progress.refresh()  # type: ignore[union-attr]
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", run.output.getvalue())
    assert f"epoch 1/3 {'━' * 20} 8/8 48.0 images/sec  time left > 0:00:08" in text


def test_resume_drops_what_is_done_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.epoch(0, [0.0] * 6, [1.0] * 6)
    run.recorder.end_epoch()
    run.epoch(1, [0.0] * 5, [1.0] * 5)
    # Killed at step 11, 11 s into the run, in the middle of writing a line; the last checkpoint is at step 8.
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"event": "steps", "step_ms": [1')
    del run

    run = Run(tmp_path, first_step=8, first_epoch=1)
    run.epoch(1, [0.0] * 4, [2.0] * 4, first_step=2, loss=1.0)
    run.recorder.end_epoch()
    with run.recorder as recorder:
        pass
    record = recorder.record
    assert record.step_ms == [1000.0] * 8 + [2000.0] * 4
    assert record.steps_done == 12
    assert record.session_starts == [0, 8]
    assert [row.epoch for row in record.epochs] == [1, 2]
    assert record.seconds == 19.0  # the repeated steps took time, too
    assert [point.step for point in record.loss_curve] == [1, 4, 6, 9, 12]
    assert [event["event"] for event in record.events] == ["resume", "end"]
    assert RunRecord.read_jsonl(tmp_path / METRICS_FILE) == record


def test_each_session_counts_its_own_images(tmp_path: Path) -> None:
    """A session may have another --batch-size or --accumulate, or fewer processes: all steps here have 24
    images/sec."""
    for first, images in ((0, 24), (4, 48), (6, 12)):  # the second does 4 steps, and has a checkpoint of 2 of them
        run = Run(tmp_path, first_step=first, images_per_step=images, num_processes=images // 12, warmup_steps=0)
        with run.recorder as recorder:
            run.epoch(0, [0.0] * 4, [images / 24] * 4, first_step=first)
    record = RunRecord.read_jsonl(tmp_path / METRICS_FILE)
    assert record == recorder.record == RunRecord.from_dict(json.loads(json.dumps(record.to_dict())))
    assert record.images.tolist() == [24] * 4 + [48] * 2 + [12] * 4
    assert record.speed() == summarize(record).total == (24.0, 0.0, 0.0)
    resumed = [event for event in record.events if event["event"] == "resume"]
    assert [(event["processes"], event.get("steps_undone")) for event in resumed] == [
        ("4, before 2", None), ("1, before 4", 2)]


def test_resume_from_an_older_checkpoint_drops_the_epochs_after_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.recorder as recorder:
        for epoch in range(3):
            run.epoch(epoch, [0.0] * 5, [1.0] * 5)
            recorder.end_epoch(Metrics(1.0, epoch, epoch, 10))
    run = Run(tmp_path, first_step=5, first_epoch=1)
    assert [row.epoch for row in run.recorder.record.epochs] == [1]
    assert run.recorder.record.step_ms == [1000.0] * 5
    run.epoch(1, [0.0] * 5, [1.0] * 5)
    with run.recorder as recorder:
        recorder.end_epoch(Metrics(1.0, 9, 9, 10))
    assert [(row.epoch, row.val_top1) for row in recorder.record.epochs] == [(1, 0.0), (2, 0.9)]


@pytest.mark.parametrize("checkpoint_step", [3, 9])
def test_steps_that_are_missing_before_a_resume(tmp_path: Path, checkpoint_step: int) -> None:
    """A run that began at step 4 and recorded up to step 6 resumes from an earlier checkpoint, and from a later one."""
    with (run := Run(tmp_path, first_step=4)).recorder:
        run.epoch(0, [0.0] * 2, [1.0] * 2, first_step=4)
    run = Run(tmp_path, first_step=checkpoint_step)
    with run.recorder as recorder:
        run.epoch(0, [0.0] * 2, [2.0] * 2, first_step=checkpoint_step)
    record = recorder.record
    assert (record.steps_before, record.steps_done) == (checkpoint_step, checkpoint_step + 2)
    assert record.step_ms == [2000.0] * 2
    assert [p.step for p in record.loss_curve] == [checkpoint_step + 1, checkpoint_step + 2]
    assert record.counted_steps.tolist() == [1]
    assert record.seconds == 2 * 1.0 + 2 * 2.0


def test_a_run_keeps_the_command_that_began_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("python -m train --epochs 3", "python -m train --resume x"):
        monkeypatch.setattr("train.recording.run_logs.command_line", lambda command=command: command)
        with Run(tmp_path).recorder as recorder:
            pass
    assert recorder.record.command == "python -m train --epochs 3"
    assert [event["command"] for event in recorder.record.events if event["event"] == "resume"] == [command]


def test_resume_in_a_fresh_folder_counts_from_the_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, first_step=100, first_epoch=1)
    run.epoch(1, [0.0] * 3, [1.0] * 3)
    with run.recorder as recorder:
        recorder.end_epoch()
    assert recorder.record.steps_before == 100
    assert recorder.record.steps_done == 103
    assert recorder.record.loss_curve[-1].step == 103
    assert recorder.record.epochs[0].images_per_sec == pytest.approx(IMAGES_PER_STEP)


def test_nan_becomes_null_in_json(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.recorder:
        run.epoch(0, [0.0] * 2, [1.0] * 2, loss=float("nan"))
    text = (tmp_path / METRICS_FILE).read_text()
    assert "NaN" not in text
    assert [line["loss"] for line in lines(tmp_path) if line["event"] == "steps"] == [None, None]


def test_an_error_ends_the_log_as_not_completed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(TrainError), run.recorder:
        run.epoch(0, [0.0] * 3, [1.0] * 3)
        raise TrainError("the loss is NaN")
    assert lines(tmp_path)[-1]["completed"] is False
    assert "total images/sec" not in run.output.getvalue()


def test_foreign_or_unwritable_metrics_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"event": "units"}\nhello\n')
    with pytest.raises(TrainError, match=r"line 2 of .*metrics\.jsonl .*'hello'"):
        Run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"cannot write .*--output"):
        Run(tmp_path / "file" / "run")


def test_two_processes_do_not_write_into_one_run(tmp_path: Path) -> None:
    first = Run(tmp_path)
    with first.recorder:
        first.epoch(0, [0.0], [1.0])
        before = (tmp_path / METRICS_FILE).read_bytes()
        with pytest.raises(TrainError, match=f"^another process is at work on the run in {re.escape(str(tmp_path))}:"):
            Run(tmp_path)
        assert (tmp_path / METRICS_FILE).read_bytes() == before
    with Run(tmp_path, first_step=1).recorder as recorder:
        assert recorder.record.step_ms == [1000.0]


@pytest.mark.parametrize("first_step", [0, 2])
def test_the_first_step_of_a_session_is_in_no_speed_but_its_own(tmp_path: Path, first_step: int) -> None:
    run = Run(tmp_path, first_step=first_step, log_every=3, warmup_steps=5)
    with run.recorder:
        run.epoch(0, [9.0] + [0.0] * 5, [1.0] + [0.5] * 5, first_step)
    first, *others = [line for line in run.output.getvalue().splitlines() if "step" in line]
    assert "images/sec" not in first and "time left" not in first
    assert ["images/sec: 48.0 +/- 0.0" in line for line in others] == [True, False]
    assert "images/sec: 48.0 (a single step)" in others[1], "the first one after the warm-up"
    rows = [line for line in lines(tmp_path) if line["event"] == "steps"]
    assert [row["step_ms"] for row in rows] == [[10_000], [500] * 2, [500] * 3]
    assert [row["images_per_sec"] for row in rows] == pytest.approx([2.4, 48, 48])


def test_a_slow_validation_is_not_silent(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.recorder as recorder:
        recorder.begin_epoch(0, 1)
        with recorder.phase("validation"):
            for done in range(1, 6):
                run.clock.seconds += 6
                recorder.show_progress(done, 5)
    said = [line.partition("] ")[2] or line for line in run.output.getvalue().splitlines()]
    assert [line for line in said if "batch" in line] == ["validation: batch 2 of 5", "validation: batch 4 of 5"]


def test_slow_steps_are_not_silent(tmp_path: Path) -> None:
    """The terminal is never silent for more than ten seconds and a step. Lines between two log lines have no loss,
    which is only read for log lines."""
    run = Run(tmp_path, log_every=20)
    with run.recorder:
        run.epoch(0, [0.0] * 12, [4.0] * 12)
    printed = [line.split("  ")[:3] for line in run.output.getvalue().splitlines()[:-1]]
    assert printed == [
        ["epoch 1/3, step 1/12", "loss 2.000", "learning rate 0.1"],
        *([f"epoch 1/3, step {step}/12", "images/sec: 6.0 +/- 0.0 (jitter = 0.0)", "learning rate 0.1"]
          for step in (4, 7, 10)),
        ["epoch 1/3, step 12/12", "images/sec: 6.0 +/- 0.0 (jitter = 0.0)", "loss 2.000"],
    ]
    assert [line["step"] for line in lines(tmp_path) if line["event"] == "steps"] == [1, 12]


def test_a_first_step_that_is_all_there_is(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.recorder:
        run.epoch(0, [0.0], [2.0])
    assert "images/sec: 12.0 (a single step)  loss" in run.output.getvalue(), "which has neither error nor jitter"
    assert [line["images_per_sec"] for line in lines(tmp_path) if line["event"] == "steps"] == [pytest.approx(12)]


def test_mlperf_lines(tmp_path: Path) -> None:
    run = Run(tmp_path, mlperf=True, config={"optimizer": "sgd", "seed": 7, "weight_decay": 1e-4})
    with run.recorder as recorder:
        run.epoch(0, [0.0] * 2, [1.0] * 2)
        with recorder.phase("validation"):
            pass
        recorder.end_epoch(Metrics(100.0, 25, 90, 100))
    events = []
    for line in (tmp_path / "mlperf.log").read_text().splitlines():
        prefix, _, content = line.partition(" ")
        assert prefix == ":::MLLOG"
        event = json.loads(content)
        assert event.keys() == {"namespace", "time_ms", "event_type", "key", "value", "metadata"}
        assert event["metadata"]["file"].endswith(("run_logs.py", "mlperf.py")) and event["metadata"]["lineno"] > 0
        events.append((event["event_type"], event["key"], event["value"]))
    assert events == [
        ("POINT_IN_TIME", "submission_benchmark", "resnet"),
        ("POINT_IN_TIME", "global_batch_size", IMAGES_PER_STEP),
        ("POINT_IN_TIME", "opt_name", "sgd"),
        ("POINT_IN_TIME", "seed", 7),
        ("POINT_IN_TIME", "opt_weight_decay", 1e-4),
        ("INTERVAL_START", "run_start", None),
        ("INTERVAL_START", "epoch_start", None),
        ("INTERVAL_START", "eval_start", None),
        ("INTERVAL_END", "eval_stop", None),
        ("POINT_IN_TIME", "eval_accuracy", 0.25),
        ("INTERVAL_END", "epoch_stop", None),
        ("INTERVAL_END", "run_stop", None),
    ]


FULL = Path("/dev/full")  # a disk without room


def tensorboard_events(folder: Path) -> list[Any]:
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (folder / "tensorboard").glob("events.out.tfevents.*")
    data, events = path.read_bytes(), []
    while data:  # a TFRecord file: length (u64), its checksum (u32), content, its checksum (u32)
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def test_tensorboard_gets_the_curves(tmp_path: Path) -> None:
    run = Run(tmp_path, tensorboard=True)
    with run.recorder as recorder:
        run.epoch(0, [0.0] * 6, [0.5] * 6)
        recorder.end_epoch(Metrics(150.0, 40, 90, 100))
    scalars = {(value.tag, event.step, round(value.simple_value, 4))
               for event in tensorboard_events(tmp_path) for value in event.summary.value}
    assert {("train/loss", 4, 2.0), ("train/images_per_sec", 6, 48.0), ("train/learning_rate", 6, 0.1)} <= scalars
    assert {("validation/loss", 6, 1.5), ("validation/top1", 6, 0.4), ("validation/top5", 6, 0.9)} <= scalars


def test_tensorboard_hides_what_is_done_again_and_gets_no_nan(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import SessionLog

    run = Run(tmp_path, tensorboard=True, first_step=3)
    with run.recorder:
        run.epoch(0, [0.0] * 4, [0.5] * 4, first_step=3, loss=float("nan"))
    events = tensorboard_events(tmp_path)
    assert [(event.step, event.session_log.status) for event in events if event.HasField("session_log")] == [
        (3, SessionLog.START)]
    tags = {value.tag for event in events for value in event.summary.value}
    assert tags == {"train/top1", "train/images_per_sec", "train/learning_rate", "train/skipped_steps"}


@pytest.mark.parametrize("log", ["tensorboard", "mlperf"])
def test_a_full_disk_is_one_sentence_for_every_log(log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlperf.log").symlink_to(FULL)
    monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: FULL.open("wb"))
    with pytest.raises(TrainError, match=rf"^cannot write .*/{log}\S* \(No space left on device\): make room and"):
        Run(tmp_path, tensorboard=log == "tensorboard", mlperf=log == "mlperf")


def test_a_disk_that_fills_up_later_ends_the_run_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    monkeypatch.setattr("train.recording.tensorboard.FLUSH_SECONDS", 0.0)
    with pytest.raises(TrainError, match="^cannot write .*tensorboard .*No space left"), \
            (run := Run(tmp_path, tensorboard=True)).recorder as recorder:
        recorder._logs._tensorboard._file._writer = FULL.open("wb")  # type: ignore[union-attr]
        run.epoch(0, [0.0] * 6, [0.5] * 6)
    assert lines(tmp_path)[-1]["completed"] is False


def test_a_device_that_works_ahead_waits_only_while_it_stands_still(tmp_path: Path) -> None:
    """The loop fetches the next batch while the device computes: only the device's idle time counts as waiting."""
    run = Run(tmp_path)
    fetched = [0.02, 0.03, 0.01, 0.05]  # seconds that the loop spends on each batch
    idle = [None, 0.0, 0.012, 0.5]  # idle time in the previous step, as the device reports at the end of each step
    with run.recorder as recorder:
        recorder.begin_epoch(0, 4)
        for _, idle_seconds in zip(recorder.timed(run.batches(fetched)), idle, strict=True):
            run.clock.seconds += 0.1
            recorder.stop_clock(idle_seconds)
            recorder.end_step(0.1)
            recorder.close_interval()
            recorder.log(Metrics(1, 1, 1, IMAGES_PER_STEP))
    # The device has not reported anything for the first step. The last idle time has other causes than the 10 ms of the
    # batch.
    assert run.recorder.record.loader_wait_ms == pytest.approx([20, 0, 12, 10])
    assert run.recorder.record.step_ms == pytest.approx([120, 130, 110, 150])


# --- intervals, and why a session ends ---


@pytest.mark.parametrize(("right", "count", "low", "high"), [
    (30, 44, 0.5344, 0.8000), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 1, 0.2065, 1.0),
    (38_000, 50_000, 0.7562, 0.7637),
])
def test_wilson_interval(right: int, count: int, low: float, high: float) -> None:
    """The interval's ends are the shares from which `right` is 1.96 standard deviations away, which is its
    definition."""
    found = interval(right / count, count)
    assert found == pytest.approx((low, high), abs=5e-5)
    for bound in found:
        if 1e-9 < bound < 1 - 1e-9:
            assert abs(right / count - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / count))


def test_intervals_in_words() -> None:
    assert shown_interval(30 / 44, 44) == "53 to 80 %"
    assert shown_interval(0.76, 50_000) == shown_interval(0.76, None) == "", "narrow, or not known"


@pytest.mark.parametrize(("error", "reason"), [
    (None, "epochs"), (StoppedBySignal(2, "stopped"), "signal"), (KeyboardInterrupt(), "signal"),
    (ValueError(), "error"),
])
def test_why_a_session_ends(error: BaseException | None, reason: str, tmp_path: Path) -> None:
    with contextlib.suppress(BaseException), Recorder(
            tmp_path, config={}, images_per_step=4, num_epochs=1, log_every=1, tensorboard=False):
        if error:
            raise error
    last = lines(tmp_path)[-1]
    assert (last["event"], last["reason"], last["completed"]) == ("end", reason, error is None)
    assert RunRecord.read_jsonl(tmp_path / METRICS_FILE).is_over == (error is None)


def test_the_end_of_an_earlier_versions_run(tmp_path: Path) -> None:
    for completed in (True, False):
        (tmp_path / METRICS_FILE).write_text(json.dumps({"event": "end", "time": 1, "completed": completed}) + "\n")
        assert RunRecord.read_jsonl(tmp_path / METRICS_FILE).is_over == completed


def test_the_best_epoch_is_that_of_the_kept_weights() -> None:
    """After best.npz was removed, a lower accuracy is the best. Earlier versions did not record its epoch."""
    rows = [EpochRow(epoch, 0.1, None, val_loss=1.0, val_top1=top1, val_top5=1.0)
            for epoch, top1 in ((1, 0.3), (2, 0.6), (3, 0.5), (4, 0.4))]
    record = RunRecord({}, "", 1, epochs=rows, events=[{"event": "checkpoint", "time": 0, "is_best": True}])
    assert record.best is rows[1]
    record.events += [{"event": "checkpoint", "is_best": is_best, "epoch": epoch}
                      for epoch, is_best in ((2, True), (3, True), (4, False))]
    assert record.best is rows[2]
    record.epochs = rows[:2]  # resumed before that epoch
    assert record.best is rows[1]
    assert RunRecord({}, "", 1).best is None


def test_plugins_metrics_take_no_name_of_an_epochs_columns() -> None:
    import train.plugins  # noqa: F401  # reserves them

    assert {field.name for field in dataclasses.fields(EpochRow)} <= plugins._reserved["metric"]
