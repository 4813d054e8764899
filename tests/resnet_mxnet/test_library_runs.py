"""`train`, `load_run`, `list_runs`, `loader` and other methods of networks, in the library."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from library_run import TINY, Trained

import resnet_mxnet as rm
from common.output import shows_bars
from train.command_line import read, values_of
from train.commands import runs as runs_command
from train.config import Config
from train.options.commands import ExportOptions, ValidateOptions

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_trained_in_another_thread(run: rm.Run, trained: Any) -> None:
    assert [epoch for epoch, _ in trained.epochs] == [1, 2]
    assert all(0 <= results["train_top1"] <= 1 for _, results in trained.epochs)
    assert (run.folder / "checkpoints" / "best.npz").is_file()
    history = run.history
    assert history["epoch"].tolist() == [1, 2] and np.isfinite(history["train_loss"]).all()
    assert "val_top1" not in history  # this data has no validation images
    assert run.best_epoch and run.best_epoch.epoch == 2 and math.isnan(run.best_top1)
    assert history["train_eval_top1"][1] == run.best_epoch.train_eval_top1
    assert np.isnan(history["train_eval_top1"][0])
    assert run.steps["step"][-1] == 12 and run.config["image_size"] == 32
    assert repr(run).startswith(f"Run('{run.folder}': 2 epochs, top-1 on the training images ")


def test_errors_reach_the_program(tiny_data: Path, light_training: None, tmp_path: Path) -> None:
    """Errors are raised in the main thread and in other threads; they do not end the process."""
    missing = Trained(data=tmp_path / "none", output=tmp_path / "run")
    assert isinstance(missing.error, rm.UserError) and "does not exist" in str(missing.error)
    for options, sentence in [
        ({"epcohs": 3}, "there is no option --epcohs; did you mean --epochs?"),
        ({"epochs": 0}, "--epochs 0 must be from 1 to 100000"),
        ({"epochs": 2.5}, "--epochs needs a whole number, not '2.5'"),
        ({"config": "?"}, r"there is no preset '\?'"),
        ({"model": "resnet19"}, "there is no model 'resnet19'"),
        ({"optimizer": "sdg"}, "there is no optimizer 'sdg'; did you mean sgd"),
        ({"help": True}, "help is an option of the command line only"),
        ({"version": True}, "version is an option of the command line only"),
        ({"mean": [None, 1, 2]}, "--mean needs text, a path, a number or a list of these, not a NoneType"),
        ({"weights": np.zeros((2, 2))}, "--weights needs text, a path, a number or a list of these, not a list"),
        ({"epochs": np.int64(0)}, "--epochs 0 must be from 1 to 100000"),
        ({"output": "a\0b"}, r"--output 'a\\x00b' has a null byte in it"),
    ]:
        with pytest.raises(rm.UserError, match=sentence):
            rm.train(data=tiny_data, **options)


def test_a_second_training_resumes_and_a_callback_stops_it(run: rm.Run, light_training: None, tmp_path: Path) -> None:
    """The second training runs in the main thread, after a first one of this process."""
    shutil.copytree(run.folder, tmp_path / "run")
    again = rm.train(resume=tmp_path / "run", epochs=9, callbacks=[lambda epoch, results: epoch == 3])
    assert again.folder == tmp_path / "run" and again.history["epoch"].tolist() == [1, 2, 3]
    (stop,) = [event for event in again.record.events if event["event"] == "stop"]
    assert stop["reason"] == "stopped by a callback: <lambda> asked for it"


@pytest.mark.parametrize("callbacks, sentence", [
    (None, "callbacks=None is not a list"), (print, "callbacks=<built-in function print> is not a list"),
    ("abc", "callbacks='abc' is not a list"), ([3], "the callback 3 cannot be called with epoch and metrics"),
    ([lambda epoch: True], "the callback <function .* cannot be called with epoch and metrics: give a function of")])
def test_wrong_callbacks_are_told_before_training(callbacks: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(rm.UserError, match=sentence):
        rm.train(output=tmp_path / "run", callbacks=callbacks)
    assert not (tmp_path / "run").exists()


def test_runs_in_a_folder(run: rm.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library and the command list the same runs in one order, a damaged one among them."""
    (tmp_path / "no run").mkdir()
    for name in ("b", "a"):
        shutil.copytree(run.folder, tmp_path / name)
    for age, name in enumerate(("b", "broken", "a")):
        if name == "broken":
            (tmp_path / name).mkdir()
            (tmp_path / name / "metrics.jsonl").write_text("{}\n")
        os.utime(tmp_path / name / "metrics.jsonl", (1e9 - age, 1e9 - age))
    listed = rm.list_runs(tmp_path)
    assert [(each.folder.name, each.state) for each in listed] == [
        ("b", "finished"), ("broken", "damaged"), ("a", "finished")]
    broken = listed[1]
    assert broken.history == broken.steps == broken.config == {} and "line 1 of" in broken.reason
    assert repr(broken) == f"Run({str(tmp_path / 'broken')!r}: damaged)" and "line 1 of" in broken._repr_html_()
    with pytest.raises(rm.UserError, match="line 1 of"):
        rm.load_run(tmp_path / "broken")
    capsys.readouterr()
    runs_command.main({"folder": (tmp_path,), "json": True})
    told = json.loads(capsys.readouterr().out)
    assert [(each["folder"], each["state"]) for each in told] == [(str(run.folder), run.state) for run in listed]
    compared = rm.compare(tmp_path / "a", tmp_path / "b")
    assert len(compared.members) == 2 and "images/sec" in compared.markdown()
    with pytest.raises(rm.UserError, match="there is no folder"):
        rm.compare(tmp_path / "none")
    with pytest.raises(rm.UserError, match="there is no folder .*none: give one that holds runs"):
        rm.list_runs(tmp_path / "none")
    with pytest.raises(rm.UserError, match="there is no metrics.jsonl in .*no run: give the output folder"):
        rm.load_run(tmp_path / "no run")


@pytest.mark.parametrize("function", [rm.load_run, rm.list_runs, rm.compare, rm.load])
def test_paths_that_no_file_can_have(function: Any) -> None:
    with pytest.raises(rm.UserError, match=r"^(cannot read )?x+.* \(File name too long\)"):
        function("x" * 5000)
    with pytest.raises(rm.UserError):
        function("a\0b")


def test_runs_may_be_keys(run: rm.Run) -> None:
    again = rm.load_run(run.folder)
    assert {run: 1, again: 2}[run] == 1 and run != again


@pytest.mark.parametrize("folder", [None, "", 3])
def test_no_folder(folder: Any, run: rm.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the same if the current folder is a run's folder."""
    monkeypatch.chdir(run.folder)
    for function in (rm.load_run, rm.list_runs, rm.compare):
        with pytest.raises(rm.UserError, match="is not a folder: give the path of a run, or of a folder that"):
            function(folder)


@pytest.mark.parametrize("accuracies", [[70], 0.7, ["high"], [0]])
def test_wrong_accuracies(accuracies: Any, run: rm.Run) -> None:
    with pytest.raises(rm.UserError, match="^accuracies is .*: give a list of fractions above 0 and at most 1"):
        rm.compare(run.folder, accuracies=accuracies)


def test_a_notebook_shows_a_run(run: rm.Run) -> None:
    shown = run._repr_html_()
    assert "resnet18, 3 classes" in shown and "2 of 2" in shown and shown.count("data:image/png;base64,") == 2


def test_the_loader(tiny_data: Path) -> None:
    with rm.loader(tiny_data, batch_size=5, image_size=32, seed=1) as loader:
        first = list(loader)
        assert [batch.data.shape for batch in first] == 5 * [(5, 32, 32, 3)] and loader.class_names[0] == "class0"
    with rm.loader(tiny_data, split="val", batch_size=5, val_image_size=64, val_split=0.4) as loader:
        assert loader.num_images < 27 and next(iter(loader)).data.shape == (5, 64, 64, 3)
    with pytest.raises(rm.UserError, match="there is no split 'test': give 'train' or 'val'"):
        rm.loader(tiny_data, split="test")


def test_names() -> None:
    assert "resnet50" in rm.models() and rm.create_model("resnet50", num_classes=10).num_classes == 10
    assert "ImageNet" in rm.presets()["resnet50_90ep"]
    assert set(dir(rm)) == {*rm.__all__} == {name for names in rm._MODULES.values() for name in names}
    assert all(getattr(rm, name).__doc__ for name in rm.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rm.nothing


@pytest.mark.parametrize("arguments", [(None,), ("resnet18", 0), ("resnet18", -1), ("resnet18", "10"),
                                       ("resnet18", 2.5), ("resnet18", True), ("resnet18", 10, 2.0)])
def test_wrong_numbers_of_a_network(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(rm.UserError, match=r"^(name|num_classes|label_smoothing) is .*: give "):
        rm.create_model(*arguments)


@pytest.mark.parametrize("device", [None, 0, ["cpu"]])
def test_no_device(device: Any, run: rm.Run) -> None:
    with pytest.raises(rm.UserError, match="^device is .*: give 'auto', 'cpu', 'gpu', or one of several GPUs"):
        rm.load(run.folder, device=device)


@pytest.mark.parametrize("place", [None, "", 3])
def test_no_place_of_a_network(place: Any, run: rm.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the same if the current folder is a run's folder."""
    monkeypatch.chdir(run.folder)
    with pytest.raises(rm.UserError, match="is not the path of a trained network: give a run folder"):
        rm.load(place)


def test_validation(net: rm.TrainedNetwork, run: rm.Run, tiny_data: Path) -> None:
    found = net.validate()
    assert net.validate(tiny_data, batch_size=4)[:5] == pytest.approx(found[:5])
    assert found.num_images == 27 and math.isfinite(found.loss)
    assert run.best_epoch and found.top1 == pytest.approx(run.best_epoch.train_eval_top1)
    right = sum(each.best.name == each.file.parent.name for each in net.predict(tiny_data))
    assert found.top1 == pytest.approx(right / 27)
    with pytest.raises(rm.UserError, match="there is no option --btch-size; did you mean --batch-size?"):
        net.validate(btch_size=3)


def test_export(net: rm.TrainedNetwork, tiny_data: Path, tmp_path: Path, seed: int) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    images = np.random.default_rng(seed).standard_normal((2, 3, 32, 32)).astype(np.float32)
    sizes = {}
    for name, features in (("probabilities", False), ("features", True)):
        net.export_onnx(tmp_path / f"{name}.onnx", features=features)
        session = onnxruntime.InferenceSession(str(tmp_path / f"{name}.onnx"), providers=["CPUExecutionProvider"])
        (found,) = session.run([name], {"data": images})
        sizes[name] = found.shape
    assert sizes == {"probabilities": (2, 3), "features": (2, net.num_features)}
    with pytest.raises(rm.UserError, match="features.onnx exists already: give --overwrite"):
        net.export_onnx(tmp_path / "features.onnx")
    net.export_onnx(tmp_path / "features.onnx", overwrite=True)


@pytest.mark.long
def test_int8(run: rm.Run, tiny_data: Path, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    with rm.load(tmp_path / "run") as net, net.quantize(images=16, batch_size=8) as small:
        image = tiny_data / "class0" / "0.jpg"
        floats, integers = net.predict(image), small.predict(image)
        assert {guess.index for guess in integers.guesses} == {0, 1, 2}
        assert integers.best.probability == pytest.approx(floats.best.probability, abs=0.2)
        assert small.validate(tiny_data).num_images == 27
        with pytest.raises(rm.UserError, match="the INT8 network of .* has no features: load it without int8"):
            small.embed(image)
        with pytest.raises(rm.UserError, match="exists already, calibrated"):
            net.quantize(images=16)


@pytest.mark.parametrize("options, given, line", [
    (Config, {"data": Path("a b"), "epochs": 5, "tensorboard": False, "deterministic": False, "mixup": 0.5},
     ["--data", "a b", "--epochs", "5", "--no-tensorboard", "--no-deterministic", "--mixup", "0.5"]),
    (Config, {"mean": (1.0, 2.0, 3.5), "decay_epochs": [1, 2], "weights": None, "output": ""},
     ["--mean", "1", "2", "3.5", "--decay-epochs", "1", "2"]),
    (Config, {"hw_decoder_load": -1.0, "weights": "-x.pth"}, ["--hw-decoder-load=-1", "--weights=-x.pth"]),
    (ExportOptions, {"features": True, "overwrite": False}, ["--features"]),
    (ValidateOptions, {"int8": False, "tf32": False}, ["--no-int8", "--no-tf32"]),
])
def test_values_are_those_of_the_command_line(options: type, given: dict[str, Any], line: list[str]) -> None:
    assert values_of(options, given, command="x") == read(options, line, command="x")


def test_the_import_is_light() -> None:
    """The import of the library loads no slow package, and no file of the user in place of the library's files."""
    script = ("import sys, resnet_mxnet as rm; "
              "print({'numpy', 'mxnet', 'nvidia', 'rich', 'PIL', 'argparse'} & {*sys.modules}); "
              "print(rm.UserError.__mro__[1].__name__)")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nProgramError\n"


def test_a_program_called_train(tmp_path: Path) -> None:
    """The library works in a user's program called train.py. If the program has imported its own module `train`, an
    error says so."""
    (tmp_path / "train.py").write_text("import resnet_mxnet as rm\nprint(rm.models()[0])\n")
    (tmp_path / "other.py").write_text("import train\nimport resnet_mxnet\n")
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.stdout, done.returncode) == ("resnet18\n", 0), done.stderr
    (tmp_path / "train.py").write_text("")
    done = subprocess.run([sys.executable, "other.py"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.stderr.splitlines()[-1].startswith("ImportError: resnet_mxnet needs its own package train, but this "
                                                   f"program has imported {tmp_path / 'train.py'}: give that another")


def test_defaults_of_the_library_are_those_of_the_command() -> None:
    assert TINY["image_size"] == 32  # the run above does not have the defaults
    assert values_of(Config, {}, command="train") == {}


@pytest.mark.parametrize("is_terminal, is_jupyter, has_widgets, shows", [
    (True, False, False, True), (False, False, False, False), (True, True, True, True), (True, True, False, False),
])
def test_progress_bars_in_a_notebook(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, is_jupyter: bool,
                                     has_widgets: bool, shows: bool) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if has_widgets else None)
    assert shows_bars(SimpleNamespace(is_terminal=is_terminal, is_jupyter=is_jupyter)) == shows


def test_a_run_with_a_plugin(
    plugin: Callable[..., Path], tiny_data: Path, light_training: None, tmp_path: Path
) -> None:
    """The run's network is loaded again from the run alone."""
    file = plugin("""
        import resnet_mxnet as rm
        from mxnet.gluon import nn

        @rm.model
        def small(num_classes):
            net = nn.HybridSequential()
            net.add(nn.Conv2D(8, 3, activation="relu"), nn.GlobalAvgPool2D(), nn.Dense(num_classes))
            return net

        @rm.metric
        def surest(probabilities, labels):
            return probabilities.max(axis=1)
    """)
    options = TINY | {"data": tiny_data, "model": "small", "epochs": 1, "validate_every": 1}
    run = rm.train(plugin=[file], output=tmp_path / "plugged", **options)
    assert run.record.epochs[-1].plugin_metrics["surest"] > 1 / 3
    assert run.history["surest"].tolist() == [run.record.epochs[-1].plugin_metrics["surest"]]
    assert "plugin_metrics" not in run.history
    with run.load(device="cpu") as net:
        assert net.num_features == 8 and "small" in repr(net) and "small" in rm.models()
        assert net.validate().plugin_metrics == pytest.approx(run.record.epochs[-1].plugin_metrics, rel=1e-4)
