"""Whole runs on the cuda executor: training, checkpoints that the CPU reads, resuming, benchmark and profile."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from train import checkpoint

pytestmark = pytest.mark.gpu

# 50 steps per epoch; the smallest network, on images that it learns to tell apart within one epoch.
STEP_OPTIONS = [
    "--config", "cpu_sample", "--data", "synthetic", "--model", "resnet18", "--image-size", "33",
    "--batch-size", "256", "--learning-rate", "0.1", "--no-tensorboard", "--optimizer", "sgd", "--momentum", "0.9",
    "--weight-decay", "1e-4",
]
OPTIONS = [*STEP_OPTIONS, "--epochs", "3", "--validate-every", "1", "--warmup-epochs", "1", "--checkpoint-minutes", "0"]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESNET_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def lines(folder: Path, event: str) -> list[dict]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["event"] == event]


def assert_equal_bits(run: Path, other: Path) -> None:
    """Compare everything that the newest checkpoints of two runs contain."""
    one, two = (checkpoint.load(checkpoint.find(str(folder))) for folder in (run, other))
    assert one.progress.step == two.progress.step
    assert one.scalars == two.scalars and one.state.keys() == two.state.keys()
    for ours, theirs in ((one.params, two.params), (one.aux, two.aux), (one.ema, two.ema),
                         *((one.state[slot], two.state[slot]) for slot in one.state)):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def validated(out: str) -> tuple[float, float]:
    """Loss and top-1 as `python -m train validate` prints them."""
    found = re.search(r"1280 images, loss ([\d.]+), top-1 ([\d.]+)%", out)
    assert found, out
    return float(found[1]), float(found[2]) / 100


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_run_learns_goes_on_and_moves_to_the_cpu(dtype, run_train, tmp_path):
    folder = tmp_path / "run"
    code, _, err = run_train(*OPTIONS, "--dtype", dtype, "--output", folder, "--max-steps", "70")
    assert code == 0, err
    stopped = checkpoint.load(checkpoint.find(str(folder)))
    assert stopped.progress.step == 70 and stopped.params["stem_conv_weight"].shape == (64, 7, 7, 3)
    assert all(np.abs(momentum).max() > 0 for momentum in stopped.state["momentum"].values())

    code, _, err = run_train("--resume", folder)
    assert code == 0, err
    rows = lines(folder, "epoch")
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[0]["train_loss"] > rows[2]["train_loss"] and rows[2]["val_top1"] > 0.9  # chance is 0.1

    on_gpu = run_train("validate", "--checkpoint", folder)
    on_cpu = run_train("validate", "--checkpoint", folder, "--dtype", "auto", "--device", "cpu", "--batch-size", "64")
    (loss, top1), (cpu_loss, cpu_top1) = validated(on_gpu[1]), validated(on_cpu[1])
    # bfloat16 has 8 bits: roundings of 0.4 % in every one of 20 layers
    assert loss == pytest.approx(cpu_loss, rel={"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-2}[dtype])
    assert top1 == pytest.approx(cpu_top1, abs=0.01)


def test_resuming_changes_nothing(run_train, tmp_path):
    """With --deterministic, a run in two parts has the bits of a run in one."""
    options = [*OPTIONS, "--deterministic", "--validate-every", "0"]
    for name, steps in (("whole", "30"), ("parts", "20")):
        code, _, err = run_train(*options, "--output", tmp_path / name, "--max-steps", steps)
        assert code == 0, err
    code, _, err = run_train("--resume", tmp_path / "parts", "--max-steps", "30")
    assert code == 0, err
    assert_equal_bits(tmp_path / "whole", tmp_path / "parts")


@pytest.fixture(scope="module")
def photographs(real_data, tmp_path_factory):
    """Class folders of 108 JPEGs of ImageNet."""
    folder = tmp_path_factory.mktemp("photographs")
    for path in sorted((real_data / "imagenet_sample").iterdir())[:108]:
        shutil.copytree(path, folder / path.name)
    return folder


# 9 steps an epoch
PHOTOGRAPH_OPTIONS = [
    "--model", "resnet18", "--image-size", "64", "--batch-size", "12", "--epochs", "12", "--num-classes", "1000",
    "--label-smoothing", "0", "--random-area", "0.7", "1", "--warmup-epochs", "2", "--learning-rate", "0.4",
    "--validate-every", "12", "--no-tensorboard", "--deterministic", "--log-every", "5",
]


DECODED_EVERY_EPOCH = ["--cache", "0"]  # by the GPU, as ImageNet is


def end_of(folder: Path) -> tuple[float, float]:
    """Loss and top-1 on the training images after the last epoch, which is printed once."""
    (row,) = [row for row in lines(folder, "epoch") if row["epoch"] == 12]
    return row["train_eval_loss"], row["train_eval_top1"]


@pytest.fixture(scope="module")
def unbroken(photographs, tmp_path_factory):
    """The ends of two unbroken runs."""
    from train.__main__ import main

    folders = [tmp_path_factory.mktemp(name) / "run" for name in ("first", "second")]
    for folder in folders:
        assert main(["--data", str(photographs), *PHOTOGRAPH_OPTIONS, *DECODED_EVERY_EPOCH, "--checkpoint-minutes", "0",
                     "--output", str(folder)]) == 0
    return [end_of(folder) for folder in folders]


def saved_step(folder: Path) -> int:
    """The step of a run's newest checkpoint; 0 if there is none."""
    return max((int(path.stem.removeprefix("step-")) for path in folder.glob("checkpoints/step-*.npz")), default=0)


@pytest.mark.parametrize("death", [signal.SIGTERM, signal.SIGKILL], ids=lambda death: death.name)
def test_a_run_from_jpegs_that_is_stopped_ends_like_an_unbroken_one(death, photographs, unbroken, run_train, tmp_path,
                                                                    monkeypatch):
    # Results of another process on this machine, such as the fastest kernels, must not affect bits.
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "cache"))
    options = ["--data", str(photographs), *PHOTOGRAPH_OPTIONS, *DECODED_EVERY_EPOCH]
    folder = tmp_path / "stopped"
    run = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "train", *options, "--checkpoint-minutes", "0.0005",
                            "--output", str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while saved_step(folder) <= 10:
            assert run.poll() is None and time.monotonic() < deadline, "it ended before it could be stopped"
            time.sleep(0.005)
        os.kill(run.pid, death)
        out, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == (128 + death if death == signal.SIGTERM else -death)
    assert (f"-m train --resume {folder}" in out) == (death == signal.SIGTERM)
    stopped_at = checkpoint.load(checkpoint.find(str(folder))).progress.step
    assert 10 < stopped_at == saved_step(folder) < 108

    code, _, err = run_train("--resume", "auto", "--output", folder, "--checkpoint-minutes", "0")
    assert code == 0, err
    loss, top1 = end_of(folder)
    print(f"stopped at step {stopped_at}: loss {loss}, unbroken {unbroken}")
    # The difference between two uninterrupted runs; 0 if the JPEG decoder is deterministic, too.
    noise = abs(unbroken[0][0] - unbroken[1][0])
    assert abs(loss - unbroken[0][0]) <= 3 * noise + 1e-6 * loss and abs(top1 - unbroken[0][1]) <= 3 * noise
    assert {row["epoch"] for row in lines(folder, "epoch")} == set(range(1, 13))


def test_broken_files_are_skipped_and_listed(photographs, run_train, tmp_path, rng):
    data = tmp_path / "data"
    shutil.copytree(photographs, data)
    images = sorted(data.glob("*/*.JPEG"))
    broken = {
        path.name: content(path.read_bytes())
        for path, content in zip(rng.choice(images, 3, replace=False), [  # type: ignore[arg-type]
            # The third file ends before its first scan. A crop above a later cut is decoded and used.
            lambda image: b"", lambda image: rng.bytes(len(image)), lambda image: image[: image.index(b"\xff\xda")]],
            strict=True)
    }
    for path in images:
        if path.name in broken:
            path.write_bytes(broken[path.name])
    options = ["--data", str(data), *PHOTOGRAPH_OPTIONS, "--epochs", "3", "--validate-every", "3"]
    code, _, err = run_train(*options, "--output", tmp_path / "refused")
    (sentence,) = [line for line in err.splitlines() if line.startswith("error: ")]  # DALI's libraries write there too
    assert code == 2 and any(name in sentence for name in broken), err

    folder = tmp_path / "run"
    code, _, err = run_train(*options, "--on-bad-image", "skip", "--output", folder, report=True)
    assert code == 0, err
    listed = {Path(line["file"]).name for line in lines(folder, "bad_image")}
    assert listed == set(broken)
    rows = lines(folder, "epoch")
    assert len(rows) == 3 and np.isfinite([row["train_loss"] for row in rows]).all()
    assert all(name in (folder / "report" / "report.md").read_text() for name in broken)


def test_sizes_change_and_a_run_goes_on_in_mid_schedule(run_train, tmp_path):
    """Training at 33, then 64 pixels, validation at 80, with LARS: a run in two parts has the bits of a run in one."""
    options = [*OPTIONS, "--deterministic", "--first-image-size", "33", "--image-size", "64", "--resize-epochs", "1",
               "1", "--val-image-size", "80", "--optimizer", "lars", "--learning-rate", "5"]
    for name, steps in (("whole", "70"), ("parts", "60")):
        code, out, err = run_train(*options, "--output", tmp_path / name, "--max-steps", steps)
        assert code == 0, err
        assert "epoch 2: images of 64 pixels from now on" in out
    code, _, err = run_train("--resume", tmp_path / "parts", "--max-steps", "70")
    assert code == 0, err
    assert_equal_bits(tmp_path / "whole", tmp_path / "parts")
    (row,) = lines(tmp_path / "whole", "epoch")
    assert np.isfinite(row["val_loss"])


@pytest.mark.alone
def test_a_batch_that_does_not_fit(run_train, tmp_path):
    options = [*STEP_OPTIONS, "--model", "resnet152", "--image-size", "224", "--batch-size", "12000"]
    code, _, err = run_train("benchmark", *options, "--output", tmp_path / "run")
    sentence = err.splitlines()[-1]  # before it, DALI may name libraries that it does not need
    found = re.fullmatch(r"error: the GPU has .* 12000 images of 224x224 .*: use a batch size of at most (\d+)",
                         sentence)
    assert code == 2 and found and 0 < int(found[1]) < 12000, err
    assert not (tmp_path / "run").exists()


def test_benchmark_with_profile(run_train, tmp_path):
    folder = tmp_path / "run"
    code, out, err = run_train("benchmark", *STEP_OPTIONS, "--profile", "--output", folder)
    assert code == 0, err
    (result,) = lines(folder, "benchmark")
    table = (folder / "profile.txt").read_text()
    for operation in ("fprop", "dgrad", "wgrad", "batch_norm_apply", "copy on this GPU"):
        assert operation in table
    assert "copy on this GPU" in out
    total = re.search(r"^sum +\d+ +([\d.]+)", table, re.MULTILINE)
    assert total and 0.3 * result["median_step_ms"] < float(total[1]) < 2 * result["median_step_ms"]


@pytest.mark.parametrize("recipe", ["", "--stochastic-depth 0.1 --dropout 0.1", "--cutmix 1",
                                    "--cutmix 1 --class-weights 0.5",
                                    "--cutmix 1 --loss bce --bce-threshold 0.2 --learning-rate 1"])
def test_accumulation_mixing_and_averages_go_on(recipe, run_train, tmp_path):
    """All options at once, with --deterministic: a run in two parts has the bits of a run in one, and it learns."""
    options = [*OPTIONS, "--deterministic", "--validate-every", "0", "--batch-size", "128", "--accumulate", "2",
               "--mixup", "0.2", "--ema-decay", "0.95", "--log-every", "7", *recipe.split()]
    for name, steps in (("whole", "100"), ("parts", "60")):
        code, _, err = run_train(*options, "--output", tmp_path / name, "--max-steps", steps)
        assert code == 0, err
    code, _, err = run_train("--resume", tmp_path / "parts", "--max-steps", "100")
    assert code == 0, err
    assert_equal_bits(tmp_path / "whole", tmp_path / "parts")
    whole = checkpoint.load(checkpoint.find(str(tmp_path / "whole")))
    assert whole.ema.keys() == whole.params.keys() | whole.aux.keys()
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        steps = lines(folder, "steps")
        assert all(line["loss"] is not None for line in steps), "every step's metrics were read"
        assert sum(len(line["step_ms"]) for line in steps) == 100
        assert steps[-1]["loss"] < (0.9 if recipe else 0.7) * steps[0]["loss"]
    code, out, err = run_train("validate", "--checkpoint", tmp_path / "whole")
    assert code == 0, err
    assert validated(out)[1] > (0.5 if recipe else 0.8), "of the averaged weights; chance is 0.1"


def test_predict_and_export_from_a_gpu_run(run_train, tiny_data, tmp_path):
    """JPEGs through the GPU loader and the compiled step; the CPU gives the same predictions for the same
    checkpoint."""
    folder = tmp_path / "run"
    options = ["--data", tiny_data, "--model", "resnet18", "--image-size", "32", "--batch-size", "8", "--epochs", "8",
               "--warmup-epochs", "1", "--learning-rate", "1", "--no-tensorboard", "--random-area", "0.5", "1",
               "--ema-decay", "0.9"]
    code, _, err = run_train(*options, "--output", folder)
    assert code == 0, err
    assert lines(folder, "epoch")[-1]["train_eval_top1"] > 0.6  # three tints, so chance is a third
    images = sorted(tiny_data.glob("*/*.jpg"))
    answers = {}
    for device in ("gpu", "cpu"):
        code, out, err = run_train("predict", "--checkpoint", folder, "--json", "--batch-size", "4", "--device", device,
                                   *images)
        assert code == 0, err
        answers[device] = json.loads(out)
    differences = []
    for on_gpu, on_cpu in zip(answers["gpu"], answers["cpu"], strict=True):
        guesses = (on_gpu["predictions"], on_cpu["predictions"])
        gpu, cpu = ({guess["class"]: guess["probability"] for guess in found} for found in guesses)
        differences += [abs(gpu[name] - cpu[name]) for name in cpu]
    # The GPU decodes JPEGs differently from the CPU, which shows in images of noise, and computes in 16 bits.
    assert len(differences) == 3 * len(images) and np.mean(differences) < 0.05
    code, out, err = run_train("export", "--checkpoint", folder, "--symbol", tmp_path / "net.json",
                               "--params", tmp_path / "net.params")
    assert code == 0, err
    assert (tmp_path / "net.params").stat().st_size > 40e6
