"""The training loop: accumulation, limits, schedules, validation over processes' shards, and the benchmark."""

from __future__ import annotations

import gc
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError
from graph_passes.executors import create_executor
from graph_passes.executors.mxnet import MXNetExecutor
from graph_passes.optimizers import ArrayOptimizer
from graph_passes.optimizers.sgd import SGD
from pipelines import Batch
from train import checkpoint, loop
from train.commands.benchmark import standard_error_of_median
from train.loop import Trainer
from train.models.network import init_params
from train.models.resnet import resnet
from train.recording.gpu_monitor import GpuReadings
from train.recording.metrics import RunRecord
from train.recording.recorder import Recorder
from train.validation import printed_progress, validate

pytestmark = pytest.mark.usefixtures("narrow_network")


def read_lines(folder: Path, event: str) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def test_accumulation_averages_the_gradients_of_its_batches(rng):
    """One step on two accumulated batches moves the weights by the mean of the two batches' gradients.

    BatchNorm normalises each batch by itself, so this is not a batch of twice the size. The result is compared with the
    gradients of the two batches, computed one by one. Tolerance: one fp32 rounding, which the float64 oracle does not
    have.
    """
    symbol = resnet(18, num_classes=4)
    params, aux = init_params(symbol, seed=int(rng.integers(1000)))
    shapes = {"data": (3, 32, 32, 3), "softmax_label": (3,)}
    executor = create_executor("mxnet", Graph.from_json(symbol.tojson()), shapes)
    batches = [(mx.nd.array(rng.standard_normal((3, 32, 32, 3))), mx.nd.array(rng.integers(0, 4, 3))) for _ in range(2)]

    alone = []
    for batch in batches:
        executor.set_params(params, aux)
        executor.forward_backward(*batch)
        alone.append({name: executor.to_canonical(name, grad).copy() for name, grad in executor.grads.items()})

    executor.set_params(params, aux)
    optimizer = executor.create_optimizer(SGD(momentum=0.9))
    executor.forward_backward(*batches[0])
    executor.forward_backward(*batches[1], accumulate=True)
    optimizer.step(learning_rate=0.1, scale=0.5)
    for name in params:
        step = -0.1 * (alone[0][name].astype(np.float64) + alone[1][name]) / 2
        got = executor.to_canonical(name, optimizer.state["momentum"][name])
        np.testing.assert_allclose(got, step, rtol=1e-5, atol=1e-6 * np.abs(step).max() + 1e-12, err_msg=name)


def test_accumulating_run(run_train, tiny_options, tmp_path):
    """6 batches of 4 images form steps of 4 and 2 batches in an epoch; the learning rate counts 16 images."""
    folder = tmp_path / "run"
    code, _, err = run_train("--output", folder, *tiny_options, "--accumulate", "4", "--log-every", "1",
                             "--schedule", "polynomial", "--decay-power", "1")
    assert code == 0, err
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == 4
    rates = [line["learning_rate"] for line in read_lines(folder, "steps")]
    assert rates == pytest.approx([0.5 * 16 / 256 * (1 - k / 4) for k in range(4)])
    assert RunRecord.read_jsonl(folder / "metrics.jsonl").images.tolist() == [16, 8] * 2


def test_no_step_is_longer_than_an_epoch(run_train, tiny_options, tmp_path):
    """Otherwise the step's learning rate and images/sec would count images that the step does not have."""
    options = [*tiny_options, "--validate-every", "0"]
    code, _, err = run_train("--output", tmp_path / "longer", *options, "--accumulate", "7")
    assert (code, err) == (2, "error: --accumulate 7 is more than the 6 batches of an epoch, but a step cannot span "
                              "epochs: lower --accumulate\n")
    code, _, err = run_train("--output", tmp_path / "whole", *options, "--accumulate", "6")
    assert code == 0, err


@pytest.mark.long
def test_validation_is_prepared_before_the_first_step(run_train, tiny_options, tmp_path, monkeypatch):
    """Validation is prepared for its image size, if it has one of its own. Errors come before anything is written."""
    asked: list[Any] = []
    prepare, train = MXNetExecutor.prepare_inference, MXNetExecutor.forward_backward

    def prepared(self, image_size):
        asked.append(image_size)
        prepare(self, image_size)

    def trained(self, *arguments, **options):
        asked.append("step")
        train(self, *arguments, **options)

    monkeypatch.setattr(MXNetExecutor, "prepare_inference", prepared)
    monkeypatch.setattr(MXNetExecutor, "forward_backward", trained)
    options = [*tiny_options, "--max-steps", "1", "--val-image-size", "48"]
    assert run_train("--output", tmp_path / "validated", *options)[0] == 0
    assert run_train("--output", tmp_path / "not_validated", *options, "--validate-every", "0")[0] == 0
    assert asked == [(48, 48), "step", "step"]

    def too_large(self, image_size):
        raise GraphError("the GPU has no memory left")

    monkeypatch.setattr(MXNetExecutor, "prepare_inference", too_large)
    code, _, err = run_train("--output", tmp_path / "failed", *options)
    assert (code, err) == (2, "error: the GPU has no memory left\n") and not (tmp_path / "failed").exists()


def test_skipped_validation_images_are_named_once(run_train, tiny_data, tiny_options, tmp_path):
    for split in ("train", "val"):
        shutil.copytree(tiny_data, tmp_path / "data" / split)
    broken = tmp_path / "data" / "val" / "class1" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    folder = tmp_path / "run"
    code, out, err = run_train(*tiny_options, "--output", folder, "--data", tmp_path / "data", "--on-bad-image", "skip")
    assert code == 0, err
    (bad,) = read_lines(folder, "bad_image")
    assert str(broken) in bad["file"]
    assert out.count(f"skipped {broken}") == 1


@pytest.mark.long
def test_skipped_images_are_counted_in_each_epoch(run_train, tiny_data, tiny_options, tmp_path):
    """If a run is stopped within an epoch and resumed, the images that it skipped before count, too."""
    data, folder = tmp_path / "data", tmp_path / "run"
    for split in ("train", "val"):
        shutil.copytree(tiny_data, data / split)
    for broken in ("train/class0/1.jpg", "train/class2/5.jpg", "val/class1/3.jpg"):
        (data / broken).write_bytes(b"no image")
    options = [*tiny_options, "--data", data, "--batch-size", "9", "--on-bad-image", "skip", "--validate-every", "2"]
    code, begun, err = run_train(*options, "--output", folder, "--max-steps", "5")
    assert code == 0, err
    code, ended, err = run_train("--resume", folder)
    assert code == 0, err
    assert [row["skipped_images"] for row in read_lines(folder, "epoch")] == [2, 3]
    assert " | 2 images skipped | " in begun and " | 3 images skipped | " in ended


@pytest.mark.long
def test_learns_and_validates_every_image_once(run_train, tiny_options, tmp_path):
    folder = tmp_path / "run"
    code, out, err = run_train("--output", folder, *tiny_options, "--epochs", "3", "--batch-size", "5", report=True)
    assert code == 0, err
    rows = read_lines(folder, "epoch")
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    top1 = rows[-1]["train_eval_top1"]
    assert top1 > 0.6  # three tints, so chance is a third
    assert top1 * 27 == pytest.approx(round(top1 * 27))  # of 27 images, none twice
    assert "total images/sec" in out
    assert (folder / "report" / "report.html").exists()
    assert json.loads((folder / "config.json").read_text())["batch_size"] == 5


@pytest.mark.long(but=["options0-*"])
@pytest.mark.parametrize("options, steps, sentence, reason", [
    (["--max-steps", "4"], 4, "stopped after step 4: --max-steps is 4", "max_steps"),
    (["--time-limit", "0.00001"], 1, "stopped: the time limit of 1e-05 minutes is reached", "time_limit"),
    (["--target-accuracy", "0.01"], 6, "has reached the target of 0.01", "target_accuracy"),
    (["--patience", "1"], 12, "1 validations in a row have not raised", "patience"),
])
def test_limits(options, steps, sentence, reason, run_train, tiny_options, tmp_path, monkeypatch):
    if reason == "patience":  # no validation is better than the first
        monkeypatch.setattr(loop, "validate", lambda *arguments: (found := validate(*arguments)) and found._replace(
            metrics=found.metrics._replace(top1=0.0)))
    folder = tmp_path / "run"
    code, out, err = run_train("--output", folder, *tiny_options, *options)
    assert code == 0, err
    assert sentence in out
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == steps
    assert len(read_lines(folder, "stop")) == 1
    (end,) = read_lines(folder, "end")
    assert (end["reason"], end["completed"]) == (reason, reason in ("target_accuracy", "patience"))


@pytest.mark.long
def test_skipped_images_are_named_once(run_train, tiny_data, tiny_options, tmp_path):
    shutil.copytree(tiny_data, tmp_path / "data")
    broken = tmp_path / "data" / "class1" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    folder = tmp_path / "run"
    options = [*tiny_options, "--output", folder, "--data", tmp_path / "data", "--validate-every", "0"]
    code, out, err = run_train(*options, "--on-bad-image", "skip")
    assert code == 0, err
    (bad,) = read_lines(folder, "bad_image")
    assert str(broken) in bad["file"]
    assert out.count(str(broken)) == 1

    code, out, err = run_train(*options, "--output", tmp_path / "other")
    assert code == 2
    assert str(broken) in err.splitlines()[-1]


def test_damaged_images_are_counted_and_named(run_train, tiny_data, tiny_options, tmp_path):
    shutil.copytree(tiny_data, tmp_path / "data")
    rng = np.random.default_rng(5)
    damaged = [tmp_path / "data" / "class1" / name for name in ("3.jpg", "4.jpg")]
    for file in damaged:
        Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8)).save(file, quality=95)
        content = bytearray(file.read_bytes())
        content[5000:5064] = rng.integers(0, 255, 64, np.uint8).tobytes()
        file.write_bytes(content)
    folder = tmp_path / "run"
    options = [*tiny_options, "--output", folder, "--data", tmp_path / "data", "--validate-every", "0"]
    code, out, err = run_train(*options, "--epochs", "1")
    assert code == 0 and "JPEG" not in err, err
    assert [event["file"] for event in read_lines(folder, "damaged_image")] == [str(file) for file in damaged]
    for number, file in enumerate(damaged, start=1):
        assert f"a damaged image is used anyway ({number} so far): {file}: the decoder says: Corrupt" in out


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_accuracy_on_the_training_images_is_called_so(run_train, tiny_data, tiny_options, tmp_path):
    """For a folder without `val`, no text calls the evaluation validation; with `val` every text does."""
    for folder in ("train", "val"):
        shutil.copytree(tiny_data, tmp_path / "split" / folder)
    for file in (tmp_path / "split" / "val").glob("*/*"):  # other bytes: a run reports training images in validation
        file.write_bytes(file.read_bytes() + b"\0")
    texts = {}
    for data in (tiny_data, tmp_path / "split"):
        folder = tmp_path / "runs" / data.name
        options = [*tiny_options, "--data", data, "--output", folder, "--epochs", "1", "--target-accuracy", "0.01",
                   "--tensorboard", "--mlperf"]
        code, out, err = run_train(*options, report=True)
        assert code == 0, err
        _, validated, _ = run_train("validate", "--checkpoint", folder)
        (row,), report = read_lines(folder, "epoch"), (folder / "report" / "report.md").read_text()
        (event_file,) = (folder / "tensorboard").iterdir()
        tags = {tag.decode() for tag in re.findall(rb"(?:validation|train_eval)/\w+", event_file.read_bytes())}
        texts[data.name] = out + validated + report.partition("## Configuration")[0]
        is_own = data.name == "split"
        group = "validation" if is_own else "train_eval"
        assert tags == {f"{group}/{name}" for name in ("loss", "top1", "top5")}
        assert ((row["val_top1"] is None), (row["train_eval_top1"] is None)) == ((not is_own), is_own)
        assert ("eval_accuracy" in (folder / "mlperf.log").read_text()) == is_own
        assert (len((folder / "report" / "dawnbench.tsv").read_text().splitlines()) == 2) == is_own
    own, none = texts["split"], texts[tiny_data.name]
    assert "top-5" not in own + none, "of three classes"
    assert "| validation loss" in own and "validation top-1, epoch 1" in own and "the validation set" in own
    found = "27 training images of 3 classes, 27 for validation\n"
    assert own.count(found) == 1
    assert "training images" not in own.replace("training images over all the time", "").replace(found, "")
    for words in ("| on the training images: loss", "the top-1 on the training images is", "27 training images, loss",
                  "top-1 on the training images, epoch 1", "spread evenly over the training images",
                  "| evaluation on the training images |", "| top-1 on the training images |"):
        assert words in none, words
    assert re.findall(".*validation.*", none) == re.findall(".*(?:which is no|aside for) validation", none), none


def test_without_validation(run_train, tiny_options, tmp_path):
    folder = tmp_path / "run"
    code, _, err = run_train("--output", folder, *tiny_options, "--epochs", "1", "--validate-every", "0")
    assert code == 0, err
    assert [row["val_top1"] for row in read_lines(folder, "epoch")] == [None]


def test_reference_executor_trains_like_mxnet(run_train, tiny_options, tmp_path):
    """Two steps on each executor; fp32 networks of this depth agree to a few thousandths in the loss."""
    losses = {}
    for executor in ("mxnet", "reference"):
        folder = tmp_path / executor
        code, _, err = run_train("--output", folder, *tiny_options, "--executor", executor, "--max-steps", "2",
                                 "--log-every", "1", "--validate-every", "0", "--batch-size", "3")
        assert code == 0, err
        losses[executor] = [line["loss"] for line in read_lines(folder, "steps")]
    assert len(losses["mxnet"]) == 2
    assert losses["reference"] == pytest.approx(losses["mxnet"], rel=5e-3)


def test_benchmark_on_synthetic_data(run_train, tmp_path):
    folder = tmp_path / "run"
    options = ("benchmark", "--data", "synthetic", "--model", "resnet18", "--image-size", "32", "--batch-size", "2",
               "--device", "cpu", "--no-tensorboard", "--warmup-steps", "2", "--min-steps", "5")
    code, out, err = run_train(*options, "--output", folder, "--limit-steps", "8")
    assert code == 0, err
    (result,) = read_lines(folder, "benchmark")
    assert f"= {result['images_per_sec']:.1f} images/sec" in out
    times = list(itertools.chain.from_iterable(line["step_ms"] for line in read_lines(folder, "steps")))
    assert 2 + 5 <= len(times) <= 2 + 8
    # the recorder's times include slightly more overhead than the benchmark's
    assert result["median_step_ms"] == pytest.approx(np.median(times[2:]), rel=0.1)
    assert "standard error of the median" in out
    assert ("more than the 1 % wanted" in out) == (result["relative_error"] >= 0.01)

    code, out, err = run_train(*options, "--output", tmp_path / "short", "--limit-steps", "3")
    assert code == 0 and "before the 5 steps that an error estimate needs" in out, err


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "benchmark"])
def test_the_collector_passes_over_what_a_run_is_made_of(command, run_train, tmp_path, monkeypatch):
    """Until the run ends, Python's garbage collector ignores all objects from before the first step."""
    step, looked_at = Trainer.step, []
    frozen_before = gc.get_freeze_count()

    def look(trainer: Trainer, batches: Iterator[Batch]) -> bool:
        looked_at.append(any(known is trainer for known in gc.get_objects()))
        return step(trainer, batches)

    monkeypatch.setattr(Trainer, "step", look)
    limits = {
        "train": ("--max-steps", 2, "--validate-every", 0),
        "benchmark": ("--limit-steps", 2, "--warmup-steps", 0, "--min-steps", 2),
    }
    code, _, err = run_train(
        command, "--output", tmp_path / "run", "--data", "synthetic", "--model", "resnet18", "--image-size", "32",
        "--batch-size", "2", "--device", "cpu", "--no-tensorboard", *limits[command],
    )
    assert code == 0, err
    assert looked_at == [False, False]
    assert gc.get_freeze_count() == frozen_before


def test_standard_error_of_median(rng):
    """For normal values the standard error of the median is 1.2533 sigma / sqrt(n). The mean of many estimates must be
    near this value.
    """
    estimates = [standard_error_of_median(rng.normal(100, 2, 201)) for _ in range(300)]
    assert np.mean(estimates) == pytest.approx(1.2533 * 2 / np.sqrt(201), rel=0.1)
    assert standard_error_of_median([3.0]) == 0.0


def test_steps_are_written_down_before_they_are_committed(run_train, tiny_options, tmp_path, monkeypatch):
    """If the logging process is lost, a run that resumes from a commit finds all of its steps."""
    folder, committed = tmp_path / "run", []
    run = Trainer.run

    def run_and_commit(self, recorder):
        def commit():
            lines = read_lines(folder, "steps")
            committed.append((self.state.progress.step, lines[-1]["step"] if lines else 0))

        self.commit = commit
        run(self, recorder)

    monkeypatch.setattr(Trainer, "run", run_and_commit)
    code, _, err = run_train("--output", folder, *tiny_options, "--log-every", "4", "--commit-every", "5")
    assert code == 0, err
    assert committed == [(0, 0), (5, 5), (10, 10)]


@pytest.mark.long
def test_metrics_are_received_a_step_late_and_none_is_lost(run_train, tiny_options, tmp_path, monkeypatch):
    """Metrics are requested after a step, and received after the next step was launched; immediately after a session's
    first step, at an epoch's end, at a checkpoint and at a limit. Every image of every step is in exactly one line,
    also in a resumed run.
    """
    happened: list[str] = []
    logged: list[tuple[int, float]] = []  # step, images

    class Late(MXNetExecutor):
        def forward_backward(self, *arguments, **options):
            happened.append("step")
            super().forward_backward(*arguments, **options)

        def request_metrics(self):
            happened.append("ask")
            receive = super().request_metrics()

            def receive_late():
                happened.append("receive")
                return receive()

            return receive_late

    log = Recorder.log

    def spy(self, metrics, *others):
        logged.append((self._interval.step, metrics.count))
        log(self, metrics, *others)

    monkeypatch.setattr("graph_passes.executors.mxnet.MXNetExecutor", Late)
    monkeypatch.setattr(Recorder, "log", spy)
    folder = tmp_path / "run"
    options = [*tiny_options, "--log-every", "4", "--validate-every", "0"]
    code, _, err = run_train("--output", folder, *options, "--max-steps", "9")  # of 6 in an epoch, with 4 images each
    assert code == 0, err
    step, ask, receive = "step", "ask", "receive"
    assert happened == [step, ask, receive, *[step] * 3, ask, step, receive, step, ask, receive,
                        *[step] * 3, ask, receive]
    code, _, err = run_train("--resume", folder)
    assert code == 0, err
    assert logged == [(1, 4.0), (4, 12.0), (6, 8.0), (9, 12.0), (10, 4.0), (12, 8.0)]
    assert [line["step"] for line in read_lines(folder, "steps")] == [1, 4, 6, 9, 10, 12]


@pytest.mark.long
@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_the_norm_of_clipped_gradients_is_that_of_a_line_s_last_step(accumulate, run_train, tiny_options, tmp_path,
                                                                    monkeypatch):
    norms: list[float] = []
    step = ArrayOptimizer.step

    def spy(self, *arguments, **options):
        step(self, *arguments, **options)
        norms.append(self.gradient_norm)

    monkeypatch.setattr(ArrayOptimizer, "step", spy)
    folder = tmp_path / "run"
    options = [*tiny_options, "--log-every", "3", "--validate-every", "0", "--accumulate", accumulate]
    code, _, err = run_train("--output", folder, *options, "--clip-norm", "0.01")
    assert code == 0, err
    assert min(norms) > 0.01, "so each is clipped"
    lines = read_lines(folder, "steps")
    assert [line["gradient_norm"] for line in lines] == [norms[line["step"] - 1] for line in lines]
    assert len({line["gradient_norm"] for line in lines}) == len(lines) >= 3
    code, _, err = run_train("--output", tmp_path / "free", *options)
    assert code == 0, err
    assert not any("gradient_norm" in line for line in read_lines(tmp_path / "free", "steps"))


@pytest.mark.long
@pytest.mark.parametrize("clip_norm, is_told", [("1e-05", True), ("0.01", False)])
def test_clipping_that_leaves_nothing_of_the_gradients_is_told_once(clip_norm, is_told, run_train, tiny_options,
                                                                    tmp_path):
    code, out, err = run_train("--output", tmp_path / "run", *tiny_options, "--log-every", "1", "--validate-every", "0",
                               "--clip-norm", clip_norm)
    assert code == 0, err
    sentences = re.findall(r"^step 1: the norm of the gradients is [0-9.]+, and --clip-norm 1e-05 scales them down to "
                           "1e-05: weights may hardly change; 1 is usual$", out, re.MULTILINE)
    assert len(sentences) == out.count("--clip-norm") == is_told


class Overflowing(MXNetExecutor):
    """Skips some of its optimizer's steps, like the cuda executor if a gradient is not finite."""

    skipped: frozenset[int] = frozenset()  # numbers of these steps, from 1
    steps = 0

    def create_optimizer(self, *arguments):
        optimizer = super().create_optimizer(*arguments)
        step = optimizer.step

        def step_or_skip(*arguments, **options):
            self.steps += 1
            if self.steps in self.skipped:
                self.skipped_steps += 1
                self.skipped_in_a_row += 1
            else:
                self.skipped_in_a_row = 0
                step(*arguments, **options)

        optimizer.step = step_or_skip
        return optimizer


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_skipped_steps_are_counted(run_train, tiny_options, tmp_path, monkeypatch):
    """The log, the metrics and the report have the number of skipped steps."""
    monkeypatch.setattr("graph_passes.executors.mxnet.MXNetExecutor", Overflowing)
    monkeypatch.setattr(Overflowing, "skipped", frozenset({1, 2, 7, 10}))
    folder = tmp_path / "run"
    code, out, err = run_train("--output", folder, *tiny_options, "--log-every", "4", "--validate-every", "0",
                               report=True)
    assert code == 0, err
    assert [(line["step"], line["skipped_steps"]) for line in read_lines(folder, "steps")] == [
        (1, 1), (4, 1), (6, 0), (10, 2), (12, 0)]
    said = [re.findall(r"  (\d) skipped \(overflow\)", line) for line in out.splitlines() if "learning rate" in line]
    assert said == [["1"], ["1"], [], ["2"], []]
    assert "4 of 12 steps changed no weight" in (folder / "report" / "report.md").read_text()


@pytest.mark.long
def test_a_run_whose_gradients_never_are_finite_ends(run_train, tiny_options, tmp_path, monkeypatch):
    """The run ends with a sentence, and with a checkpoint of the last step that changed the weights."""
    monkeypatch.setattr("graph_passes.executors.mxnet.MXNetExecutor", Overflowing)
    monkeypatch.setattr(Overflowing, "skipped", frozenset(range(5, 1000)))
    folder, before = tmp_path / "run", tmp_path / "before"
    options = [*tiny_options, "--log-every", "5", "--validate-every", "0", "--epochs", "20"]
    code, _, err = run_train("--output", folder, *options)
    assert code != 0
    saved = checkpoint.find(str(folder))
    assert err.strip().splitlines()[-1].endswith(
        f"50 steps in a row have changed no weight, since gradients are not finite even at a loss scale of 1 (step 54, "
        f"epoch 9); the weights are in {saved}: resume with --dtype bfloat16, or begin anew with a lower "
        "--learning-rate (now 0.5 per 256 images)")
    code, _, err = run_train("--output", before, *options, "--max-steps", "4")
    assert code == 0, err
    weights, wanted = (checkpoint.load(file).params for file in (saved, checkpoint.find(str(before))))
    assert all(np.array_equal(weights[name], wanted[name]) for name in wanted)


def test_gpu_readings_go_with_the_log_lines(run_train, tiny_options, tmp_path, monkeypatch):
    class Monitor:
        problem = "NVML does not give energy: Not Supported"
        state = "new"

        def __init__(self, bus_id):
            assert bus_id == "0000:1B:00.0"
            monitors.append(self)

        def start(self):
            self.state = "started"

        def take(self):
            assert self.state == "started"
            return GpuReadings(300.0, 0.5, float("nan"), 1980.0, 0.0)

        def close(self):
            self.state = "closed"

    monitors: list[Monitor] = []
    monkeypatch.setattr("train.loop.GpuMonitor", Monitor)
    monkeypatch.setattr(MXNetExecutor, "gpu_bus_id", "0000:1B:00.0")
    folder = tmp_path / "run"
    code, _, err = run_train("--output", folder, *tiny_options, "--validate-every", "0", "--max-steps", "3")
    assert code == 0, err
    assert [monitor.state for monitor in monitors] == ["closed"]
    readings = [(line["gpu_power"], line["gpu_utilization"], line["gpu_memory"])
                for line in read_lines(folder, "steps")]
    assert readings == [(300.0, 0.5, None)] * 2  # after the first step and at the limit
    (event,) = read_lines(folder, "gpu_readings")
    assert event["problem"] == Monitor.problem


def test_a_slow_validation_of_a_command_is_not_silent(capsys, monkeypatch):
    clock = iter([0.0, 6.0, 12.0, 12.0, 18.0, 24.0, 24.0])
    monkeypatch.setattr("train.validation.time.monotonic", lambda: next(clock))
    tell = printed_progress(4)
    for done in range(1, 5):
        tell(done)
    assert capsys.readouterr().out == "validation: batch 2 of 4\nvalidation: batch 4 of 4\n"
