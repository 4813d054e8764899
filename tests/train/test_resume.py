"""A resumed run ends with the same bits as an uninterrupted one, wherever it was interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import numpy as np
import pytest

from common.program import TRAIN, start_of
from graph_passes.executors.mxnet import MXNetExecutor
from train import checkpoint, loop, saver
from train.commands import session
from train.loop import Trainer
from train.recording.metrics import RunRecord

pytestmark = pytest.mark.usefixtures("narrow_network")

STEPS_PER_EPOCH = 6  # of tiny_options
LAST = f"step-{2 * STEPS_PER_EPOCH:08d}.npz"


@pytest.fixture(scope="module")
def unbroken(narrow_network, tiny_options, tmp_path_factory, light_run):
    """The last checkpoint of an unbroken run."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert light_run("--output", folder, *tiny_options) == 0
    return checkpoint.load(folder / "checkpoints" / LAST)


def assert_same_end(folder, unbroken_end, last=LAST):
    end = checkpoint.load(folder / "checkpoints" / last)
    assert end.progress == unbroken_end.progress
    assert end.loader_states == unbroken_end.loader_states
    assert end.scalars == unbroken_end.scalars
    for group, ours, theirs in zip(("params", "aux", "ema", *end.state),
                                   (end.params, end.aux, end.ema, *end.state.values()),
                                   (unbroken_end.params, unbroken_end.aux, unbroken_end.ema,
                                    *unbroken_end.state.values()), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert np.array_equal(ours[name], theirs[name]), f"{group} {name} differs"


@pytest.mark.long(but=["step6"])
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("signal_at", [2, STEPS_PER_EPOCH], ids=lambda step: f"step{step}")
def test_sigterm(unbroken, tiny_options, tmp_path, run_train, monkeypatch, signal_at):
    folder, reports = tmp_path / "run", signal_at == 2  # one is enough; a second takes longer than the run
    step = Trainer.step

    def steps_in_the_report():
        path = folder / "report" / "report.json"
        return len(json.loads(path.read_text())["step_ms"] if reports else
                   RunRecord.read_jsonl(folder / "metrics.jsonl").step_ms)

    def signalled_step(self, batches):
        if self.state.progress.step == signal_at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", signalled_step)
        code, out, err = run_train("--output", folder, *tiny_options, report=reports)
    assert code == 128 + signal.SIGTERM
    assert steps_in_the_report() == signal_at
    assert out.count(f"{tiny_options[1]} has no validation images of its own (docs/data.md): accuracy after an ep") == 1
    assert out.count("\n27 training images of 3 classes\n") == 1
    assert f"resume with: {start_of(TRAIN)} --resume {folder}" in out
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == signal_at

    code, out, err = run_train("--resume", folder, report=reports)  # the options come from the checkpoint
    assert code == 0 and "other options" not in out, err
    assert_same_end(folder, unbroken)
    assert steps_in_the_report() == 2 * STEPS_PER_EPOCH
    code, out, err = run_train("--resume", folder)
    assert code == 0 and "nothing left to train: epoch 2 of 2 is done" in out, err
    assert_same_end(folder, unbroken)


@pytest.mark.long
def test_limits_that_are_not_reached_stay(unbroken, tiny_options, tmp_path, run_train, monkeypatch):
    """An interrupted run ends at the same step as an uninterrupted run; a run that has reached its --max-steps
    continues.
    """
    step, folder = Trainer.step, tmp_path / "run"

    def signalled_step(self, batches):
        if self.state.progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", signalled_step)
        limits = ("--max-steps", "9", "--time-limit", "60")
        assert run_train("--output", folder, *tiny_options, *limits)[0] == 128 + signal.SIGTERM
    for last, limit in ((9, 9), (2 * STEPS_PER_EPOCH, 0)):
        code, out, err = run_train("--resume", folder)
        assert code == 0, err
        assert ("--max-steps 9 has been reached and is dropped: the run continues to" in out) == (limit == 0)
        assert checkpoint.load(checkpoint.find(str(folder))).progress.step == last
        config = json.loads((folder / "config.json").read_text())
        assert (config["max_steps"], config["time_limit"]) == (limit, 60)
    assert_same_end(folder, unbroken)


@pytest.mark.long(but=["end1*"])
@pytest.mark.parametrize("end, reason", [
    ((), "nothing left to train: epoch 2 of 2 is done"),
    (("--max-steps", "3"), "stopped after step 3: --max-steps is 3"),
    (("--target-accuracy", "0.01"), "and has reached the target of 0.01"),
])
def test_without_a_step_the_run_s_files_say_what_they_said(end, reason, tiny_options, tmp_path, run_train):
    folder = tmp_path / "run"
    assert run_train("--output", folder, *tiny_options, *end)[0] == 0
    config = (folder / "config.json").read_bytes()
    code, out, err = run_train("--resume", folder, "--learning-rate", "0.25", *end)
    assert code == 0 and reason in out and "other options" not in out, (out, err)
    assert (folder / "config.json").read_bytes() == config
    assert RunRecord.read_jsonl(folder / "metrics.jsonl").config == json.loads(config)
    if not end:  # also in another folder
        folder = tmp_path / "other"
        assert run_train("--resume", tmp_path / "run", "--output", folder, "--learning-rate", "0.25")[0] == 0
        assert (folder / "config.json").read_bytes() == config
        assert checkpoint.load(checkpoint.find(str(folder))).config.learning_rate == 0.5


@pytest.mark.long(but=["1"])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGPIPE, signal.SIGINT])
def test_other_signals_save_too(number, tiny_options, tmp_path, run_train, monkeypatch):
    step = Trainer.step

    def signalled_step(self, batches):
        if self.state.progress.step == 1:
            signal.raise_signal(number)
        return step(self, batches)

    monkeypatch.setattr(Trainer, "step", signalled_step)
    code, out, err = run_train("--output", tmp_path / "run", *tiny_options)
    assert code == 128 + number, err
    assert "stopped after step 2 with a checkpoint; resume with" in out
    assert checkpoint.load(checkpoint.find(str(tmp_path / "run"))).progress.step == 2


@pytest.mark.long
def test_stopped_in_validation(unbroken, tiny_options, tmp_path, run_train, monkeypatch):
    """The run stops within a validation batch, with the epoch saved. The resumed run validates it, and ends with the
    same bits."""
    folder = tmp_path / "run"
    infer, validated = MXNetExecutor.infer, 0

    def signalled(self, data, label, num_valid):
        nonlocal validated
        validated += 1
        if validated == 2:
            signal.raise_signal(signal.SIGINT)
        infer(self, data, label, num_valid)

    monkeypatch.setattr(MXNetExecutor, "infer", signalled)
    code, out, err = run_train("--output", folder, *tiny_options)
    assert (code, validated) == (128 + signal.SIGINT, 2), err
    assert f"stopped after step {STEPS_PER_EPOCH} with a checkpoint" in out and "epoch 1/2 done" not in out
    stopped = checkpoint.load(checkpoint.find(str(folder)))
    assert (stopped.progress.epoch, stopped.progress.epoch_step) == (0, STEPS_PER_EPOCH)
    code, out, err = run_train("--resume", folder)
    assert code == 0, err
    assert out.count("epoch 1/2 done: train loss") == 1 and "step 1/6" in out.partition("epoch 1/2 done")[2]
    assert_same_end(folder, unbroken)


@pytest.mark.long
def test_an_image_that_validation_cannot_decode_loses_nothing(tiny_data, tiny_options, tmp_path, run_train):
    for split in ("train", "val"):
        shutil.copytree(tiny_data, tmp_path / "data" / split)
    broken = tmp_path / "data" / "val" / "class1" / "3.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:100])
    folder = tmp_path / "run"
    code, out, err = run_train("--output", folder, *tiny_options, "--data", tmp_path / "data")
    assert code == 2 and str(broken) in err.splitlines()[-1]
    assert f"step {STEPS_PER_EPOCH} is saved; fix that, then resume with: {start_of(TRAIN)} --resume {folder}" in out
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == STEPS_PER_EPOCH
    broken.write_bytes(whole)
    code, out, err = run_train("--resume", folder)
    assert code == 0 and "epoch 1/2 done" in out, err


@pytest.mark.long
def test_where_images_have_come_a_new_run_begins_with_the_weights(tiny_data, tiny_options, tmp_path, run_train):
    data, folder = tmp_path / "data", tmp_path / "run"
    shutil.copytree(tiny_data, data)
    options = [*tiny_options, "--data", data, "--max-steps", "2"]
    assert run_train("--output", folder, *options)[0] == 0
    shutil.copy(data / "class0" / "0.jpg", data / "class0" / "more.jpg")
    code, _, err = run_train("--resume", folder)
    assert code == 2 and "belongs to num_images 27, but this loader has 28" in err and err.endswith(
        "or begin a new run on this data with the old run's weights (--weights RUN)\n")
    code, out, _ = run_train("--weights", folder, "--output", tmp_path / "new", *options)
    assert code == 0 and "28 training images" in out


@pytest.mark.long
def test_images_that_training_cannot_decode_any_more_lose_nothing(unbroken, tiny_data, tiny_options, tmp_path,
                                                                  run_train, monkeypatch):
    data, folder = tmp_path / "data", tmp_path / "run"
    shutil.copytree(tiny_data, data)
    step = Trainer.step

    def breaking_step(self, batches):
        if self.state.progress.step == 2:  # the batches in flight have been read
            for image in data.rglob("*.jpg"):
                image.write_bytes(b"no image")
        return step(self, batches)

    monkeypatch.setattr(Trainer, "step", breaking_step)
    code, out, err = run_train("--output", folder, *tiny_options, "--data", data, "--cache", "0")
    assert code == 2 and str(data) in err.splitlines()[-1], err
    saved = checkpoint.load(checkpoint.find(str(folder))).progress.step
    assert 2 <= saved < STEPS_PER_EPOCH and f"step {saved} is saved; fix that, then resume with: " in out
    monkeypatch.setattr(Trainer, "step", step)
    shutil.copytree(tiny_data, data, dirs_exist_ok=True)
    assert run_train("--resume", folder)[0] == 0
    assert_same_end(folder, unbroken)


@pytest.mark.long
def test_a_checkpoint_precedes_a_validation_unless_there_is_a_fresh_one(tiny_options, tmp_path, run_train, monkeypatch):
    """Validation ends with an error. The checkpoint that was captured before it is complete when the run has ended."""
    seen = []

    def dying_validate(*_):
        raise MemoryError

    monkeypatch.setattr(loop, "validate", dying_validate)
    for seconds in (0.0, 1000.0):
        folder = tmp_path / f"{seconds}"
        monkeypatch.setattr(saver, "FRESH_SECONDS", seconds)
        assert run_train("--output", folder, *tiny_options)[0] == 1
        seen.append(sorted(path.name for path in (folder / "checkpoints").glob("*")))
    assert seen == [[f"step-{STEPS_PER_EPOCH:08d}.npz"], []]


@pytest.mark.long
def test_a_run_saved_at_its_last_step_is_validated_once(unbroken, tiny_options, tmp_path, run_train):
    folder = tmp_path / "run"
    assert run_train("--output", folder, *tiny_options, "--max-steps", 2 * STEPS_PER_EPOCH)[0] == 0
    assert checkpoint.load(checkpoint.find(str(folder))).progress.epoch == 1, "not validated yet"
    for validations in (1, 0, 0):
        code, out, err = run_train("--resume", folder)
        assert code == 0 and out.count("epoch 2/2 done") == validations, err
        assert_same_end(folder, unbroken)


@pytest.mark.long(but=[".-*"])
@pytest.mark.parametrize("gone, named", [
    (".", "metrics.jsonl, checkpoints/best.npz, checkpoints/step-00000006.npz, config.json had"),
    ("checkpoints", "checkpoints/best.npz, checkpoints/step-00000006.npz had"),
    ("metrics.jsonl", "metrics.jsonl had"),
    ("config.json", "config.json had"),
])
def test_files_that_are_removed_in_mid_run(gone, named, unbroken, tiny_options, tmp_path, run_train, monkeypatch):
    """The run reports it, writes the remembered content again, and returns another exit code; nothing of the run is
    lost."""
    folder = tmp_path / "run"
    step = Trainer.step

    def robbed_step(self, batches):
        if self.state.progress.step == 9:
            while self.saver.is_writing:  # a checkpoint that is removed before it is complete is written nevertheless
                time.sleep(0.01)
            path = folder / gone
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return step(self, batches)

    monkeypatch.setattr(Trainer, "step", robbed_step)
    code, out, err = run_train("--output", folder, *tiny_options, "--log-every", "1")
    assert code == 1, err
    lost = ", earlier checkpoints are not" * ("checkpoints/" in named)
    assert (f"error: the run has ended, but {named} been removed from {folder} during the run: their known content "
            f"is written again{lost}\n") in err
    if gone != "config.json":
        assert out.count("removed while the run continues: ") == named.count("/best") + named.count("metrics")
    wanted = unbroken
    if "best.npz" in named:  # whatever the earlier accuracy was, the next validation is the best
        epochs = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        *_, last = [line["train_eval_top1"] for line in epochs if line["event"] == "epoch"]
        wanted = replace(unbroken, progress=replace(unbroken.progress, best_top1=last, validations_since_best=0))
    assert_same_end(folder, wanted)
    assert (folder / "checkpoints" / "best.npz").exists()
    assert RunRecord.read_jsonl(folder / "metrics.jsonl").steps_done == 12
    assert json.loads((folder / "config.json").read_text())["batch_size"] == 4


@pytest.mark.long
@pytest.mark.parametrize("gone, named", [
    (".", "checkpoints/best.npz, checkpoints/step-00000006.npz, checkpoints/step-00000012.npz, config.json, "
          "metrics.jsonl"),
    ("checkpoints/step-00000012.npz", "checkpoints/step-00000012.npz"),
    ("metrics.jsonl", "metrics.jsonl"),
])
def test_files_that_are_removed_while_the_report_is_written(gone, named, unbroken, tiny_options, tmp_path, run_train,
                                                            monkeypatch):
    """All removed files exist again, and the exit code shows the loss."""
    folder = tmp_path / "run"

    def rob(report_folder, record):
        path = folder / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return report_folder

    monkeypatch.setattr(session, "write_report", rob)
    monkeypatch.setattr(session, "has_predictions", lambda trainer, recorder: False)
    code, _, err = run_train("--output", folder, *tiny_options, report=True)
    assert code == 1, err
    assert (f"error: the run has ended, but {named} had been removed from {folder} during the run: their known "
            "content is written again\n") in err
    assert_same_end(folder, unbroken)
    assert RunRecord.read_jsonl(folder / "metrics.jsonl").steps_done == 12


def test_a_checkpoint_that_is_removed_while_the_loader_is_measured(unbroken, tiny_options, tmp_path, run_train,
                                                                   monkeypatch):
    folder = tmp_path / "run"

    def rob(loader, workers, seconds):
        (folder / "checkpoints" / "step-00000012.npz").unlink()
        return 1.0

    monkeypatch.setattr(session, "measure_loader", rob)
    code, _, err = run_train("--output", folder, *tiny_options)
    assert code == 1 and "checkpoints/step-00000012.npz had been removed" in err
    assert_same_end(folder, unbroken)


@pytest.mark.long
@pytest.mark.parametrize("recipe, steps_per_epoch", [
    ("--mixup 0.4 --clip-norm 0.5 --repeated-augmentation 2 --stochastic-depth 0.5 --dropout 0.3", 6),
    ("--mixup 0.2 --cutmix 1 --loss bce --bce-threshold 0.2 --first-image-size 32 --image-size 64 "
     "--resize-epochs 0 1", 6),
    ("--mixup 0.1 --cutmix 1 --cutmix-share 0.7 --class-weights 0.5 --optimizer lamb --accumulate 2 --batch-size 2", 7),
    ("--auto-augment randaugment-timm --randaugment-magnitude-std 0.5 --random-erasing 0.5 --brightness 0.4 "
     "--contrast 0.4 --saturation 0.4 --hue 0.1 --grey 0.2 --blur 0.3 --solarise 0.2 --train-interpolation random", 6),
])
def test_ingredients_and_averages_go_on(recipe, steps_per_epoch, tiny_options, tmp_path, run_train):
    options = [*tiny_options, "--ema-decay", "0.9", "--validate-every", "2", *recipe.split()]
    for name, limit in (("whole", ()), ("parts", ("--max-steps", "4"))):
        code, _, err = run_train("--output", tmp_path / name, *options, *limit)
        assert code == 0, err
    code, _, err = run_train("--resume", tmp_path / "parts")
    assert code == 0, err
    last = f"step-{2 * steps_per_epoch:08d}.npz"
    whole = checkpoint.load(tmp_path / "whole" / "checkpoints" / last)
    assert whole.ema.keys() == whole.params.keys() | whole.aux.keys()
    assert_same_end(tmp_path / "parts", whole, last)


@pytest.mark.long
def test_averages_begin_in_mid_run(tiny_options, tmp_path, run_train):
    """A run that is resumed with --ema-decay for the first time starts the averages from its present weights."""
    folder = tmp_path / "run"
    code, _, err = run_train("--output", folder, *tiny_options, "--max-steps", "5")
    assert code == 0, err
    before = checkpoint.load(checkpoint.find(str(folder)))
    code, out, err = run_train("--resume", folder, "--max-steps", "3")  # fewer than the steps done: no further step
    assert code == 0, err
    assert "stopped after step 5: --max-steps is 3" in out
    assert checkpoint.load(checkpoint.find(str(folder))).progress == before.progress
    code, _, err = run_train("--resume", folder, "--ema-decay", "0.99", "--max-steps", "6", "--validate-every", "0")
    assert code == 0, err
    after = checkpoint.load(checkpoint.find(str(folder)))
    decay = 5 / 14  # decay of the averages in the sixth step
    for name, start in (before.params | before.biased.aux).items():
        expected = decay * start + (1 - decay) * (after.params | after.biased.aux)[name]
        averages = after.ema | after.biased.averages
        np.testing.assert_allclose(averages[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_sigkill_in_mid_epoch_after_a_timed_checkpoint(unbroken, tiny_options, tmp_path, run_train):
    """The process dies at step 9, when the checkpoint of step 8 is complete. Until step 8 a checkpoint was due after
    every step, by the clock. The same --resume auto has begun the run, in a folder where a run had died before its
    first checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    script = textwrap.dedent("""
        import os, signal, sys, time
        from train.__main__ import main
        from train.loop import Trainer
        from train.models import resnet

        resnet.FIRST_WIDTH = 8
        step = Trainer.step

        def dying_step(self, batches):
            if self.state.progress.step == 8:
                while self.saver.is_writing:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, batches)

        Trainer.step = dying_step
        main(sys.argv[1:])
    """)
    arguments = ["--output", str(folder), "--resume", "auto", *tiny_options, "--checkpoint-minutes", "0.00001"]
    killed = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = checkpoint.find(str(folder))
    assert found.name == "step-00000008.npz"
    assert len(list(found.parent.glob("step-*"))) == 2  # --keep-checkpoints

    code, _, err = run_train("--resume", "auto", "--output", folder, "--checkpoint-minutes", "0")
    assert code == 0, err
    assert_same_end(folder, unbroken)


def test_sigusr1_saves_and_goes_on(unbroken, tiny_options, tmp_path, run_train, monkeypatch):
    folder = tmp_path / "run"
    step = Trainer.step

    def signalled_step(self, batches):
        if self.state.progress.step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(self, batches)

    monkeypatch.setattr(Trainer, "step", signalled_step)
    code, _, err = run_train("--output", folder, *tiny_options, "--keep-checkpoints", "9")
    assert code == 0, err
    assert (folder / "checkpoints" / "step-00000004.npz").exists()
    assert_same_end(folder, unbroken)


@pytest.mark.long(but=["0"])
@pytest.mark.parametrize("ema_decay", ["0", "0.9"])
def test_best_is_kept_and_validated(ema_decay, tiny_options, tmp_path, run_train):
    folder = tmp_path / "run"
    code, _, err = run_train("--output", folder, *tiny_options, "--keep-checkpoints", "1", "--max-steps", "9",
                             "--ema-decay", ema_decay)
    assert code == 0, err
    (row,) = (line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
              if line["event"] == "epoch")
    best = checkpoint.load(folder / "checkpoints" / "best.npz")
    assert best.progress.epoch == 1
    assert best.progress.step == STEPS_PER_EPOCH
    code, out, err = run_train("validate", "--checkpoint", folder)
    assert code == 0, err
    assert f"27 training images, loss {row['train_eval_loss']:.4f}" in out, "as after the epoch"
    if ema_decay != "0":
        assert not np.array_equal(best.ema["classifier_weight"], best.params["classifier_weight"])
        trained = checkpoint.load_trained(str(folder))
        for name, array in (trained.params | trained.aux).items():
            assert np.array_equal(array, best.ema[name])
    assert f"top-1 {best.progress.best_top1:.2%}" in out


@pytest.mark.long
def test_in_mid_schedule_of_image_sizes_and_with_lars(tiny_options, tmp_path, run_train):
    """Epoch 1 at 32 pixels, epoch 2 at 48, validation at 64. A run stopped in epoch 2 resumes to the same bits."""
    options = [*tiny_options, "--first-image-size", "32", "--image-size", "48", "--resize-epochs", "1", "1",
               "--val-image-size", "64", "--validate-every", "2", "--optimizer", "lars",
               "--learning-rate", "5"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, out, err = run_train("--output", whole, *options)
    assert code == 0, err
    assert "epoch 2: images of 48 pixels from now on" in out
    assert run_train("--output", parts, *options, "--max-steps", STEPS_PER_EPOCH + 2)[0] == 0
    code, out, err = run_train("--resume", parts)
    assert code == 0, err
    assert_same_end(parts, checkpoint.load(whole / "checkpoints" / LAST))

    best = checkpoint.load(checkpoint.find(str(whole), prefer_best=True)).progress.best_top1
    assert f"top-1 {best:.2%}" in run_train("validate", "--checkpoint", whole)[1]


@pytest.mark.long
@pytest.mark.parametrize("optimizer, slots", [
    ("adamw", ["mean", "variance"]), ("lamb", ["mean", "variance"]), ("lion", ["mean"]),
    ("rmsprop", ["mean_square", "momentum"]),
])  # fmt: skip
def test_another_optimizer(optimizer, slots, tiny_options, tmp_path, run_train):
    """A run with another optimizer resumes to the same bits, with the number of its updates, but not from the state of
    another optimizer.
    """
    options = [*tiny_options, "--optimizer", optimizer, "--ema-decay", "0.5", "--validate-every", "0"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, _, err = run_train("--output", whole, *options)
    assert code == 0, err
    assert run_train("--output", parts, *options, "--max-steps", "5")[0] == 0
    stopped = checkpoint.load(checkpoint.find(str(parts)))
    assert list(stopped.state) == slots
    assert stopped.scalars == ({"updates": 5} if optimizer in ("adamw", "lamb") else {}), "if the formula has it"
    assert all(np.abs(stopped.state[slot]["classifier_weight"]).max() > 0 for slot in slots)
    code, _, err = run_train("--resume", parts, "--optimizer", "sgd")
    assert code == 2
    assert err.splitlines()[-1] == (f"error: the checkpoint {stopped.file} belongs to a run with --optimizer "
                                    f"{optimizer}, whose state sgd cannot use: leave out --optimizer")
    assert run_train("--resume", parts, "--max-steps", "0")[0] == 0
    assert_same_end(parts, checkpoint.load(whole / "checkpoints" / LAST))


@pytest.mark.long
def test_another_global_batch(tiny_options, tmp_path, run_train):
    """After 3 steps of 4 images the run continues with 8: at the 17th of 27 images, with rate and momentum doubled."""
    folder = tmp_path / "run"
    assert run_train("--output", folder, *tiny_options, "--max-steps", "3")[0] == 0
    stopped = checkpoint.load(checkpoint.find(str(folder)))
    seen: dict[str, object] = {}
    step = Trainer.step

    def watched_step(self, batches):
        if not seen:
            momentum = self.state.optimizer.state["momentum"]
            seen.update({name: array.asnumpy() for name, array in momentum.items()}, trainer=self,
                        start=(self.train_loader.batch, self.schedule_step, self.state.progress.step))
        return step(self, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", watched_step)
        code, out, err = run_train("--resume", folder, "--batch-size", "8", "--log-every", "1")
    assert code == 0, err
    assert "resuming with 8 images a step (1 process), before 4 (1): the learning rate is scaled" in out
    assert "resuming with other options: --batch-size 8 (before: 4), --log-every 1 (before: 10)\n" in out
    assert seen["start"] == (2, 2, 3)
    for name, momentum in stopped.state["momentum"].items():
        if name.endswith(("gamma", "bias")):  # in the same layout everywhere
            np.testing.assert_array_equal(seen[name], 2 * momentum)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (changed,) = (line["options"] for line in lines if line["event"] == "changed")
    assert changed == ["--batch-size 8 (before: 4)", "--log-every 1 (before: 10)"]
    rates = [line["learning_rate"] for line in lines if line["event"] == "steps"]
    peak = 0.5 * 8 / 256
    expected = [peak * (1 + np.cos(np.pi * k / 6)) / 2 for k in range(2, 6)]  # 2 epochs of 3 steps, 2 of them done
    np.testing.assert_allclose(rates[-4:], expected, rtol=1e-6)
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == 3 + 4


@pytest.mark.long
def test_rank_0_of_an_elastic_run_has_moved_to_a_machine_without_its_folder(tiny_options, tmp_path, run_train,
                                                                            monkeypatch):
    """If the machines share no disk, its report starts again: the user is told."""
    assert run_train("--output", tmp_path / "run", *tiny_options, "--max-steps", "3")[0] == 0
    monkeypatch.setattr(session, "is_elastic", lambda: True)
    go_on = ("--resume", tmp_path / "run", "--max-steps", "4", "--output")
    code, out, err = run_train(*go_on, tmp_path / "other")
    assert code == 0, err
    assert (f"{tmp_path / 'other'} has no record of this run on this machine: its report begins anew after step "
            "3; give --output a folder that the machines share\n") in out
    assert "begins anew" not in run_train(*go_on, tmp_path / "run")[1]
