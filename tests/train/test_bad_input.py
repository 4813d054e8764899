"""A user's mistakes: exit code 2, one sentence with the value and the way out, and no partial files."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from common.nvidia_gpus import GpuInfo
from graph_passes import GraphError
from pipelines import LoaderConfig, open_loader
from train import checkpoint, devices
from train.command_line import read
from train.commands.session import name_images
from train.config import Config
from train.errors import TrainError
from train.loop import Trainer
from train.models import resnet

pytestmark = pytest.mark.usefixtures("narrow_network")

H200 = GpuInfo("NVIDIA H200", (9, 0))


@pytest.fixture(scope="module")
def trained(narrow_network, tiny_options, tmp_path_factory, light_run):
    """A run of three steps, and its checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert light_run("--output", folder, *tiny_options, "--max-steps", 3) == 0
    return folder


@pytest.fixture
def fails(run_train):
    """Runs a command that must fail with code 2 and one sentence; returns the sentence."""

    def run(*arguments):
        code, out, err = run_train(*arguments)
        lines = [line for line in err.splitlines() if not line.startswith("[")]  # MXNet's own log
        assert code == 2, (code, out, err)
        assert len(lines) == 1, err
        assert lines[0].startswith("error: ")
        return lines[0]

    return run


def test_unknown_command(fails):
    assert "there is no command 'valdate'; did you mean validate?" in fails("valdate")


@pytest.mark.parametrize("options, sentence", [
    (["--data", "/nowhere"], "/nowhere"),
    (["--batch-size", "28"], "27 training images are fewer than one batch of 28"),
    (["--batch-size", "1", "--mixup", "0.2"], "--mixup mixes the images of a batch, but --batch-size 1 has a"),
    (["--batch-size", "1", "--cutmix", "1"], "--cutmix mixes the images of a batch, but --batch-size 1 has a"),
    (["--num-classes", "2"], "--num-classes 2 is less than the 3 classes"),
    (["--max-pixels", "0"], "--max-pixels 0 must be at least 1"),
    (["--max-pixels", "1000"], "none of the 27 images can be decoded"),
    (["--image-size", "0"], "--image-size 0 must be from 32 to 8192"),
    (["--executor", "cuda"], "--executor cuda needs an NVIDIA GPU"),
    (["--bn-group", "2"], "--bn-group 2 needs the cuda executor, and this run has the mxnet executor: leave out "
                            "--bn-group"),
    (["--resume", "/nowhere"], "there is no checkpoint or run folder /nowhere"),
    (["--resume", "auto"], "--resume auto needs --output"),
])
def test_mistakes_leave_no_output_folder(options, sentence, fails, tiny_options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "find_gpus", lambda: [])
    assert sentence in fails(*tiny_options, *options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("inside", ["", "a"])
def test_one_class_is_refused(inside, fails, tiny_options, tiny_data, tmp_path):
    """The folder of the images of one class, or the folder above the data set."""
    shutil.copytree(tiny_data / "class0", tmp_path / "data/only" / inside)
    way_out = f"give {tmp_path}/data/only, where there are folders" if inside else "give data of two or more"
    sentence = fails(*tiny_options, "--data", tmp_path / "data")
    assert "data has images of one class only, 'only', so there is nothing to distinguish it from" in sentence
    assert f": {way_out}" in sentence


@pytest.mark.long
def test_output_folder_with_another_run(fails, tiny_options, trained):
    before = (trained / "config.json").read_bytes()
    sentence = fails(*tiny_options, "--output", trained)
    assert f"the output folder {trained} already holds a run: resume it (--resume {trained})" in sentence
    assert (trained / "config.json").read_bytes() == before


def test_output_folder_that_cannot_be_made(fails, tiny_options, tmp_path):
    (tmp_path / "file").write_text("")
    assert f"cannot write {tmp_path}/file/run" in fails(*tiny_options, "--output", tmp_path / "file" / "run")


@pytest.mark.parametrize("command", [
    ["train", "--output"], ["benchmark", "--output"], ["benchmark", "--inference", "--output"],
    ["compare-precision", "--output"], ["language-model", "--output"],
    ["validate", "--checkpoint", "run", "--report"], ["predict", "--checkpoint", "run", "file", "--contact-sheet"],
    *(["export", "--checkpoint", "run", option] for option in ("--onnx", "--torchvision", "--symbol", "--params")),
], ids=lambda command: f"{command[0]} {command[-1]}")
def test_a_place_that_cannot_be_written_is_named_at_once(command, fails, tmp_path, monkeypatch):
    """The place is checked before data, weights and device; the message names the option."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for later in ("devices.choose", "weights.load", "commands.language_model._text"):
        monkeypatch.setattr(f"train.{later}", lambda *arguments, **options: pytest.fail("that took its time"))
    sentence = fails(*command, "file/new.png")
    assert sentence.startswith("error: cannot write file/new.png")
    assert sentence.endswith(f" (Not a directory): give another {command[-1]}")
    assert os.listdir() == ["file"]


def test_folder_that_must_not_be_looked_into(fails, tmp_path, monkeypatch):
    def is_dir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(type(tmp_path), "is_dir", is_dir)
    sentence = fails("validate", "--checkpoint", tmp_path / "secret")
    assert sentence == f"error: {tmp_path}/secret: Permission denied; check path, permissions and disk"


def test_resume_of_a_run_without_checkpoint(fails, tiny_options, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()  # the first of them could not be written
    assert "holds no checkpoint" in fails("--resume", tmp_path)
    assert "already holds a run: remove it" in fails(*tiny_options, "--output", tmp_path)


def test_benchmark_does_not_go_on_with_a_run(fails, trained):
    before = (trained / "metrics.jsonl").read_bytes()
    sentence = fails("benchmark", "--output", trained, "--resume", "auto")
    assert sentence.startswith("error: --resume is an option of train and language-model, not of benchmark (see")
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_truncated_and_foreign_checkpoints(fails, trained, tmp_path):
    content = checkpoint.find(str(trained)).read_bytes()
    broken = tmp_path / "broken.npz"
    broken.write_bytes(content[: len(content) // 2])
    (tmp_path / "a.jpg").touch()
    for command, option in (("train", "--resume"), ("validate", "--checkpoint"), ("predict", "--checkpoint")):
        picture = [tmp_path / "a.jpg"] if command == "predict" else []
        assert f"{broken} is not a complete checkpoint" in fails(command, *picture, option, broken)
    np.savez(broken, weights=np.zeros(3))
    assert f"{broken} is not a checkpoint of this program" in fails("--resume", broken)


@pytest.mark.parametrize("options, sentence", [
    (["--model", "resnet34"], "holds a resnet18 with 3 classes, but this run needs a resnet34"),
    (["--seed", "7"], "the saved loader position belongs to seed 0, but this loader has 7"),
    (["--freeze", "stage1"], "belongs to a run with no --freeze, but this one has --freeze stage1: to train other"),
    (["--optimizer", "adamw"], "belongs to a run with --optimizer sgd, whose state adamw cannot use: leave out"),
])
def test_resume_with_something_else(options, sentence, fails, trained):
    told = fails("--resume", trained, *options)
    assert told.startswith(f"error: the checkpoint {checkpoint.find(str(trained))}") and sentence in told


def test_other_classes_than_the_checkpoint(fails, trained, tiny_data, tmp_path):
    shutil.copytree(tiny_data, tmp_path / "data")
    shutil.copytree(tiny_data / "class0", tmp_path / "data" / "class3")
    sentence = fails("validate", "--checkpoint", trained, "--data", tmp_path / "data")
    data, network = tmp_path / "data", f"the network of {trained} ('class0', 'class1', 'class2')"
    assert f"the class 'class3' of {data} is none of the 3 classes of {network}: give data of these" in sentence
    shutil.rmtree(data / "class3")
    (data / "class2").rename(data / "a class")
    for command in (["--resume"], ["validate", "--checkpoint"]):
        assert f"the class 'a class' of {data} is none of" in fails(*command, trained, "--data", data)


def test_other_numbers_of_classes_than_the_checkpoint(fails, trained):
    before = (trained / "config.json").read_bytes()
    for command in (["--resume"], ["validate", "--checkpoint"]):
        sentence = fails(*command, trained, "--num-classes", "5")
        assert "--num-classes 5 contradicts the network, which has 3 classes: leave it out" in sentence
    assert (trained / "config.json").read_bytes() == before


def changed(file, to, meta=None, **arrays):
    """Write a checkpoint with other arrays (None: without that one) and other values in meta.json."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name, array in arrays.items():
        if array is None:
            del members[f"{name}.npy"]
        else:
            content = io.BytesIO()
            np.save(content, array)
            members[f"{name}.npy"] = content.getvalue()
    members["meta.json"] = json.dumps(json.loads(members["meta.json"]) | (meta or {})).encode()
    with zipfile.ZipFile(to, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return to


@pytest.mark.long(but=["change1-*", "change2-*", "change13-*"])
@pytest.mark.parametrize("change, sentence", [
    ({"params/classifier_bias": np.full(3, np.nan, np.float32)}, "its classifier_bias has values that are not finite"),
    ({"params/classifier_bias": np.zeros(4, np.float32)}, "classifier_weight is float32 (3, 64) there"),
    ({"params/classifier_bias": np.zeros(3, int)}, "classifier_bias is int64 (3,) there, and float32"),
    ({"params/classifier_bias": None}, "has no array 'classifier_bias', which its resnet18 needs"),
    ({"params/classifier_weight": None}, "holds no resnet18 with 3 classes: classifier_weight is missing; use"),
    ({"aux/more": np.zeros(1, np.float32)}, "more is not one of its arrays"),
    ({"averages/classifier_bias": np.zeros(3, np.float32)}, "with 3 classes: classifier_weight is missing"),
    ({"state/momentum/classifier_bias": np.zeros(5, np.float32)}, "classifier_bias is float32 (5,) there"),
    ({"meta": {"class_names": ["a", "b"]}}, "holds a resnet18 with 3 classes, but names 2 classes"),
    ({"params/classifier_bias": np.array("abc")}, "holds no resnet18: its classifier is a single value; use another"),
    ({"meta": {"class_names": "abc"}}, "is not a complete checkpoint (class_names is not a list of names)"),
    ({"meta": {"progress": [3]}}, "is not a complete checkpoint ('list' object has no attribute 'items'); use another"),
    ({"meta": {"scalars": {"updates": None}}}, "is not a complete checkpoint (updates is None); use another"),
    ({"meta": {"scalars": "none"}}, "is not a complete checkpoint ('str' object has no attribute 'items'); use"),
    ({"meta": {"config": "none"}}, "is not a complete checkpoint ('str' object has no attribute 'get'); use another"),
    ({"meta": {"config": {"batch_size": "4"}}}, "its run had --batch-size '4', which is not valid; use another"),
    ({"meta": {"config": {"random_area": 1}}}, "its run had --random-area 1, which is not valid; use another"),
    ({"meta": {"config": {"random_area": [1]}}}, "its run had --random-area [1], which is not valid; use"),
    ({"meta": {"config": {"betas": ["a", "b"]}}}, "its run had --betas ['a', 'b'], which is not valid; use"),
    ({"meta": {"config": {"image_size": -5}}}, "its run had --image-size -5, which is not valid; use another"),
    ({"meta": {"config": {"std": [58, 0, 58]}}}, "its run had --std [58, 0, 58], which is not valid; use"),
    ({"meta": {"scalars": {"updates": -1}}}, "is not a complete checkpoint (updates is -1); use another"),
    ({"meta": {"scalars": {"good_steps": True}}}, "is not a complete checkpoint (good_steps is True); use another"),
    ({"meta": {"scalars": {"loss_scale": 0.0}}}, "is not a complete checkpoint (loss_scale is 0.0); use another"),
])
def test_arrays_that_no_network_can_use(change, sentence, fails, trained, tiny_data, tmp_path):
    file = changed(checkpoint.find(str(trained)), tmp_path / "c.npz", **change)
    assert sentence in (first := fails("validate", "--checkpoint", file)) and str(file) in first
    assert sentence in fails("predict", "--checkpoint", file, tiny_data)
    assert sentence in fails("export", "--checkpoint", file, "--params", tmp_path / "p")
    assert sentence in fails("--resume", file, "--output", tmp_path / "run")
    assert os.listdir(tmp_path) == ["c.npz"]


@pytest.mark.parametrize("change, sentence", [
    ({"step": -3}, "(step is -3)"), ({"step": True}, "(step is True)"), ({"epoch_step": 1.5}, "(epoch_step is 1.5)"),
    ({"step": 0, "epoch": 1}, "(epoch is 1, after 0 steps)"),
    ({"best_top1": 90.0}, "(best_top1 is 90.0)"), ({"best_top1": -0.5}, "(best_top1 is -0.5)"),
    ({"best_top1": "0.9"}, "(best_top1 is '0.9')"), ({"best_top1": float("nan")}, "(best_top1 is nan)"),
])
def test_progress_that_cannot_have_been_made(change, sentence, trained, tmp_path):
    start = checkpoint.find(str(trained))
    file = changed(start, tmp_path / "c.npz", {"progress": vars(checkpoint.load(start).progress) | change})
    message = f"{file} is not a complete checkpoint {sentence}; use another"
    with pytest.raises(TrainError, match=f"^{re.escape(message)}"):
        checkpoint.load(file)


@pytest.mark.parametrize("change, sentence", [
    ({"epoch": -1}, "the saved loader position cannot be read"), ({"batch": -1}, "position cannot be read"),
    ({"batch": float("inf")}, "position cannot be read"),
])
def test_positions_that_cannot_have_been_reached(change, sentence, fails, trained, tmp_path):
    start = checkpoint.find(str(trained))
    position = json.dumps(json.loads(checkpoint.load(start).loader_states[0]) | change).encode()
    file = changed(start, tmp_path / "c.npz", **{"loader/0": np.frombuffer(position, np.uint8)})
    told = fails("--resume", file, "--output", tmp_path / "run")
    assert sentence in told and str(file) in told


@pytest.mark.parametrize("change, sentence", [
    ({"loader/0": None}, "since it holds no position in the training images: use another checkpoint in its folder"),
    ({"meta": {"numpy_rng": {"bit_generator": "MT19937"}}}, "since it holds no state of NumPy's random numbers ("),
    ({"meta": {"numpy_rng": []}}, "since it holds no state of NumPy's random numbers ("),
    ({"meta": {"progress": {"step": "many", "epoch": 0, "epoch_step": 3, "best_top1": -1.0}}},
     "is not a complete checkpoint (step is 'many'); use another checkpoint in its folder"),
    ({"meta": {"progress": {"step": 3, "epoch": 0, "epoch_step": 3, "best_top1": float("nan")}}},
     "is not a complete checkpoint (best_top1 is nan); use another checkpoint in its folder"),
    ({"loader/0": np.zeros(0, np.uint8)}, "loader position cannot be read; use another checkpoint of its folder"),
    ({"state/momentum/classifier_bias": None}, "since it holds no momentum of classifier_bias: use another checkpoint"),
])
def test_checkpoints_that_no_run_can_go_on_with(change, sentence, fails, trained, tmp_path):
    file = changed(checkpoint.find(str(trained)), tmp_path / "c.npz", **change)
    told = fails("--resume", file, "--output", tmp_path / "run")
    assert sentence in told and str(file) in told
    assert os.listdir(tmp_path) == ["c.npz"]


def test_a_checkpoint_without_the_state_of_its_optimizer(fails, trained, tmp_path):
    file = tmp_path / "c.npz"
    checkpoint.save(replace(checkpoint.load(checkpoint.find(str(trained))), state={}), file)
    assert "holds no state of its optimizer, which has momentum: use another" in fails("--resume", file, "--output",
                                                                                       tmp_path / "run")


def test_validation_and_prediction_without_weights(fails, tmp_path):
    assert "validation needs trained weights" in fails("validate")
    assert "holds no checkpoint" in fails("validate", "--checkpoint", tmp_path)
    assert "prediction needs trained weights" in fails("predict", "a.jpg")


@pytest.mark.long
def test_full_disk_while_saving(fails, tiny_options, tmp_path, monkeypatch):
    """There is no room for the second checkpoint; the first stays, and the run resumes from it once there is room."""
    save, count = os.fsync, 0

    def no_room_at_last(descriptor):
        nonlocal count
        count += 1
        if count > 2:  # the first two are for the first checkpoint: of the file and of the folder
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(descriptor)

    folder = tmp_path / "run"
    monkeypatch.setattr(os, "fsync", no_room_at_last)
    options = [*tiny_options, "--checkpoint-minutes", "0.00001"]
    sentence = fails("--output", folder, *options)
    assert "step-00000002.npz (No space left on device); earlier ones are untouched" in sentence
    assert os.listdir(folder / "checkpoints") == ["step-00000001.npz"]
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == 1


def test_nan_stops_and_keeps_the_last_good_checkpoint(fails, tiny_options, tmp_path, monkeypatch):
    """One weight becomes NaN after step 4: the loss of step 5 is NaN, and this state is not saved."""
    step = Trainer.step

    def poisoned_step(self, batches):
        if self.state.progress.step == 4:
            self.executor.params["classifier_weight"][0, 0] = np.nan
        return step(self, batches)

    monkeypatch.setattr(Trainer, "step", poisoned_step)
    folder = tmp_path / "run"
    sentence = fails("--output", folder, *tiny_options, "--checkpoint-minutes", "0.00001", "--log-every", "1")
    assert "the loss is no longer finite (step 5, epoch 1)" in sentence
    assert f"the last good checkpoint is {folder}/checkpoints/step-00000004.npz" in sentence
    assert "lower --learning-rate (now 0.5 per 256 images)" in sentence
    found = checkpoint.find(str(folder))
    assert found.name == "step-00000004.npz"
    assert all(np.isfinite(array).all() for array in checkpoint.load(found).params.values())


def test_devices(monkeypatch, tiny_options, fails, run_train, tmp_path):
    monkeypatch.setattr(devices, "find_gpus", lambda: [])
    on_gpu = [*tiny_options, "--device", "gpu"]
    assert "--device gpu: no NVIDIA GPU was found here; use --device cpu" in fails(*on_gpu)
    monkeypatch.setattr(devices, "find_gpus", lambda: [H200])
    sentence = fails(*on_gpu, "--executor", "mxnet")
    assert "MXNet 1.9.1 has no kernels for NVIDIA H200 (compute capability 9.0), only for 5.0 to 8.9" in sentence
    assert "reference is NumPy and runs on the CPU only" in fails(*on_gpu, "--executor", "reference")
    code, out, _ = run_train(*tiny_options, "--device", "auto", "--executor", "mxnet", "--output", tmp_path / "run",
                             "--max-steps", "1")
    assert code == 0
    assert "running on the CPU: MXNet 1.9.1 has no kernels for NVIDIA H200 (compute capability 9.0)" in out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["device"] == "auto"


def test_dtype_and_profile_need_the_cuda_executor(fails, tiny_options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for dtype in ("float16", "bfloat16"):
        assert f"--dtype {dtype} needs the cuda executor" in fails(*tiny_options, "--dtype", dtype)
    profile = ["benchmark", "--data", "synthetic", "--device", "cpu", "--profile"]
    assert "--profile measures the kernels of the cuda executor" in fails(*profile)
    assert "--profile measures one GPU alone, but with --bn-group 4" in fails(*profile, "--bn-group", "4")
    assert "--executor cuda needs an NVIDIA GPU, but --device is cpu" in fails(*tiny_options, "--executor", "cuda")
    assert os.listdir(tmp_path) == []


def place(**options):
    return devices.choose(Config(**options), local_rank=0)


def test_the_cuda_executor_is_chosen_where_it_can_run(monkeypatch):
    monkeypatch.setattr(devices, "find_gpus", lambda: [H200])
    monkeypatch.setattr(devices, "check_requirements", lambda device_id: None)
    for options in ({}, {"device": "gpu"}, {"executor": "cuda"}, {"dtype": "bfloat16"}):
        assert place(**options) == ("cuda", "gpu(0)", "")
    assert place(device="cpu") == ("mxnet", "cpu(0)", "")
    assert place(executor="reference") == ("reference", "cpu(0)", "")


def test_preset_of_a_command_line_that_names_none(monkeypatch, run_train, tiny_data, tmp_path):
    def preset(line):
        return devices.default_config(read(Config, line.split(), command="train"), 0).config

    monkeypatch.setattr(devices, "check_requirements", lambda device_id: None)
    monkeypatch.setattr(devices, "find_gpus", lambda: [H200])
    assert preset("") == preset("--data samples") == "cpu_sample"
    assert preset("--data /images --epochs 3") == preset("--data=synthetic") == "resnet50_90ep"
    assert preset("--data /images --device cpu") == preset("--data /images --executor reference") == "cpu_sample"
    assert preset("--data /images --weights resnet50.pth") == preset("--weights w.pth --device cpu") == "finetune"
    monkeypatch.setattr(devices, "find_gpus", lambda: [])
    assert preset("--data /images") == preset("--data /images --device gpu") == "cpu_sample"
    code, out, _ = run_train("--data", tiny_data, "--batch-size", "99", "--output", tmp_path / "run")
    assert code == 2 and out.startswith("preset cpu_sample: 10 epochs at 32 pixels (--config takes another one, ")


def test_what_is_missing_for_the_cuda_executor_is_named(monkeypatch):
    def requirements(device_id):
        raise GraphError("NVRTC is missing: pip install it")

    monkeypatch.setattr(devices, "find_gpus", lambda: [H200])
    monkeypatch.setattr(devices, "check_requirements", requirements)
    assert place() == ("mxnet", "cpu(0)", "running on the CPU: NVRTC is missing: pip install it")
    for options in ({"executor": "cuda"}, {"device": "gpu"}, {"dtype": "float16"}):
        with pytest.raises(TrainError, match="NVRTC is missing: pip install it|--dtype float16 needs"):
            place(**options)


@pytest.mark.parametrize("command", ["train", "benchmark"])
def test_batch_too_large_for_the_machine(command, fails, monkeypatch, tmp_path):
    """A larger batch needs proportionally more memory, so the suggested batch is the same for both; 1 MiB is too small
    for one image."""
    monkeypatch.setattr(resnet, "FIRST_WIDTH", 64)  # 1 GiB is too small for 1000 of these images
    folder = tmp_path / "run"
    options = [command, "--data", "synthetic", "--model", "resnet18", "--device", "cpu", "--output", folder,
               "--image-size", "48", "--batch-size"]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**30, total=2**33))
    found = [re.search(r"1\.0 GiB are free: use a --batch-size of at most (\d+)$", fails(*options, batch))
             for batch in ("1000", "4000")]
    small, large = (int(match[1]) for match in found if match)
    assert 1 < small == pytest.approx(large, rel=0.1)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**20, total=2**33))
    assert fails(*options, "1000").endswith("use a smaller --image-size")
    assert not folder.exists()


@pytest.mark.long
def test_validation_too_large_for_the_machine(fails, run_train, tiny_options, monkeypatch, tmp_path):
    """Training is refused before its first step, and so is `validate`. MXNet does not support tensors of 2^31 elements,
    whatever the memory."""
    monkeypatch.setattr(resnet, "FIRST_WIDTH", 64)
    assert run_train(*tiny_options, "--max-steps", "1", "--output", tmp_path / "trained")[0] == 0
    commands = ([*tiny_options, "--output", tmp_path / "run"], ["validate", "--checkpoint", tmp_path / "trained"])
    memory = SimpleNamespace(available=2**30, total=2**33)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    for command in commands:
        memory.available = 2**30
        assert re.match(r"error: inference on batches of 4 images of 2048x2048 needs about [\d.]+ GiB of memory, and "
                        r"1\.0 GiB are free: (use a --batch-size of at most \d|free memory, or use a smaller --val-i)",
                        fails(*command, "--val-image-size", "2048"))
        memory.available = 2**60
        assert re.match(r"error: inference on batches of 4 images of 8192x8192 needs a tensor of more than 2\^31 "
                        "elements, which MXNet does not support: ", fails(*command, "--val-image-size", "8192"))
    assert not (tmp_path / "run").exists()


def test_an_image_that_two_processes_have_met_is_skipped_once(tmp_path, capfd):
    """The second process's images of the last batch are all bad, so it takes images of the first process instead."""
    folder = tmp_path / "images" / "val"
    for label in "ab":
        (folder / label).mkdir(parents=True)
    for number in range(13):
        path = folder / "ab"[number > 6] / f"{number:02}.png"
        Image.new("RGB", (40, 40), (9 * number, 0, 0)).save(path)
        if number in (0, 12):
            path.write_bytes(b"")
    settings = LoaderConfig(data=str(tmp_path / "images"), split="val", batch_size=5, image_size=32, device="cpu",
                            num_threads=1, on_bad_image="skip")
    with open_loader(settings, shard=(0, 2)) as one, open_loader(settings, shard=(1, 2)) as two:
        assert sum(batch.num_valid for loader in (one, two) for batch in loader) == 11
        found = [(loader.bad_images, loader.damaged_images) for loader in (one, two)]
        skipped = name_images(one, SimpleNamespace(rank=0, gather=lambda own: found))
    assert sorted(file for file, _ in skipped) == [f"{folder}/a/00.png", f"{folder}/b/12.png"]
    assert sum(len(bad) for bad, _ in found) == 3  # otherwise this tests nothing
    assert capfd.readouterr().err.count("skipped ") == 2
