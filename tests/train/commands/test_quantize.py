"""The command quantize, and the commands that read its file: validate --int8 and export --int8."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from graph_passes import Ref, onnx_writer
from graph_passes.executors import reference
from graph_passes.operators.quantised import LARGEST
from train import devices, models
from train.checkpoint import Checkpoint, load, save
from train.commands import export, quantize
from train.config import Config
from train.devices import for_int8
from train.weights import int8_file

SIZE = 32
RunTrain = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("narrow_network")


@pytest.fixture(scope="module")
def trained(narrow_network: None, tiny_data: Path, seed: int) -> Checkpoint:
    """A network for the tiny data whose probabilities are neither equal nor all 0 or 1."""
    rng = np.random.default_rng(seed)
    params, aux = models.create("resnet18", 3).initial_values(seed, zero_init_residual=False)
    params["classifier_weight"] = 0.1 * rng.standard_normal(params["classifier_weight"].shape, np.float32)
    config = Config(model="resnet18", data=str(tiny_data), image_size=SIZE, batch_size=4, num_threads=1)
    return Checkpoint(params=params, aux=aux, state={}, config=config, class_names=["red", "green", "blue"],
                      class_keys=["class0", "class1", "class2"])


@pytest.fixture
def run_folder(trained: Checkpoint, tmp_path: Path) -> Path:
    save(trained, tmp_path / "run" / "checkpoints" / "best.npz")
    return tmp_path / "run"


@pytest.fixture
def quantised(run_folder: Path, run_train: RunTrain) -> Path:
    """The run's folder, with an INT8 network beside its checkpoint."""
    code, _, _ = run_train("quantize", "--checkpoint", run_folder, "--images", "27")
    assert code == 0
    return run_folder


def top1(line: str) -> float:
    return float(re.findall(r"top-1 ([0-9.]+)%", line)[0])


def test_the_command_writes_integers_and_tells_what_they_cost(
    run_folder: Path, trained: Checkpoint, run_train: RunTrain
) -> None:
    code, out, _ = run_train("quantize", "--checkpoint", run_folder, "--images", "20", "--calibration", "max")
    assert code == 0
    assert sorted(path.name for path in (run_folder / "checkpoints").iterdir()) == ["best.npz", "int8-best.npz"]
    lines = out.splitlines()
    assert "calibrating (max) on 20 training images of 32 pixels ..." in lines
    assert "in float32: classifier (FullyConnected), and the loss" in lines
    rows = [line.split() for line in lines if re.match(r"(stem|stage\d)\w+ +[0-9.]+ +[0-9.]+ +[0-9.]+$", line)]
    # In dB. Rounding noise is 127 * sqrt(12), 53 dB, below the largest weight of a channel. This weight is less than 17
    # dB above the weights' root mean square, except in one of 10^11 normal draws. Outputs had 27 dB or more in 8 draws.
    assert len(rows) == 20 and all(float(row[2]) > 35 and float(row[3]) > 15 for row in rows)
    exact, int8 = (next(line for line in lines if line.startswith(name)) for name in ("float32: ", "int8: "))
    assert exact.endswith("on 27 training images") and int8.endswith("on 27 training images")
    assert f"{run_folder}/checkpoints/int8-best.npz: 0.2 MB, 20 layers in INT8" in lines
    network = int8_file.load(str(run_folder), trained)
    assert network.calibration == {"method": "max", "images": 20, "data": trained.config.data}
    assert network.accuracy["int8"] == pytest.approx(top1(int8) / 100, abs=1e-4)
    weights = [array for name, array in network.params.items() if name.endswith("conv_weight") or "conv1_w" in name]
    assert weights and all(array.dtype == np.int8 for array in weights)
    assert all((np.abs(array).reshape(len(array), -1).max(axis=1) == LARGEST).all() for array in weights)
    code, again, _ = run_train("validate", "--checkpoint", run_folder, "--int8")
    assert code == 0 and f"{run_folder} in INT8: 27 training images" in again
    assert top1(again) == top1(int8)


@pytest.mark.long
def test_skipped_and_damaged_images_are_named(
    run_folder: Path, tiny_data: Path, tmp_path: Path, run_train: RunTrain
) -> None:
    """quantize names such images of both splits; validate names and counts them, also in its report."""
    for split in ("train", "val"):
        shutil.copytree(tiny_data, tmp_path / split)
        (tmp_path / split / "class0" / "1.jpg").write_bytes(b"no image")
        damaged = tmp_path / split / "class1" / "2.jpg"
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-2] + bytes(50) + content[-2:])
        (tmp_path / split / "gone").symlink_to("nowhere")
    options = ("--checkpoint", run_folder, "--data", tmp_path, "--on-bad-image", "skip")
    for command, splits, count in (("quantize", ("train", "val"), "on 26 validation images (1 skipped)\n"),
                                   ("validate", ("val",), ": 26 images (1 skipped), loss ")):
        code, out, err = run_train(command, *options)
        assert code == 0 and count in out
        named = [line for line in err.splitlines() if str(tmp_path) in line]
        assert len(named) == 3 * len(splits)
        for split, left_out, skipped, damage in zip(splits, named[::3], named[1::3], named[2::3], strict=True):
            folder = tmp_path / split
            assert left_out == f"{folder}: links that lead to no folder are left out: {folder}/gone"
            assert skipped.startswith(f"skipped {tmp_path}/{split}/class0/1.jpg: not an image, ")
            assert damage.startswith(f"a damaged image is used anyway: {tmp_path}/{split}/class1/2.jpg: ")
    code, out, err = run_train("validate", *options, "--report", tmp_path / "report")
    bad = f"{tmp_path}/val/class0/1.jpg"
    text, values = (tmp_path / "report" / f"report.{form}" for form in ("md", "json"))
    assert code == 0, err
    assert f"\n1 image was skipped, which cannot be decoded (see report.json): {bad}\n" in text.read_text()
    assert json.loads(values.read_text())["skipped"].keys() == {bad}


@pytest.mark.long
def test_skipped_images_leave_enough_to_calibrate_on(
    run_folder: Path, tiny_data: Path, tmp_path: Path, run_train: RunTrain
) -> None:
    """If too few decodable images are left for calibration, quantize is refused."""
    shutil.copytree(tiny_data, tmp_path / "train")
    shutil.copytree(tiny_data, tmp_path / "val")
    bad = sorted((tmp_path / "train").glob("*/*.jpg"))[15:]
    for image in bad:
        image.write_bytes(b"no image")
    code, out, err = run_train("quantize", "--checkpoint", run_folder, "--data", tmp_path, "--on-bad-image", "skip")
    assert code == 2 and "int8:" not in out
    assert err.count(f"skipped {tmp_path}") == len(bad)
    assert "error: only 15 of the 27 training images can be decoded, too few to calibrate on: replace " in err
    assert not list(run_folder.rglob("int8-*"))


@pytest.mark.long
def test_the_same_images_give_the_same_file(quantised: Path, run_train: RunTrain) -> None:
    path = quantised / "checkpoints" / "int8-best.npz"
    first = path.read_bytes()
    assert run_train("quantize", "--checkpoint", quantised, "--images", "27", "--overwrite")[0] == 0
    assert path.read_bytes() == first


@pytest.mark.long
def test_a_good_file_is_replaced_only_when_asked(quantised: Path, trained: Checkpoint, run_train: RunTrain) -> None:
    path = quantised / "checkpoints" / "int8-best.npz"
    first, command_line = path.read_bytes(), ("quantize", "--checkpoint", quantised, "--images", "16")
    code, out, err = run_train(*command_line)
    assert (code, out) == (2, "") and path.read_bytes() == first
    assert f"{path} exists already, calibrated (entropy) on 27 images of 32 pixels: give --overwrite" in err
    assert run_train(*command_line, "--overwrite")[0] == 0 and path.read_bytes() != first
    path.write_bytes(first[:100])  # damaged: no loss
    assert run_train(*command_line)[0] == 0
    other = dict(trained.params) | {"classifier_bias": trained.params["classifier_bias"] + 1}
    save(replace(trained, params=other), quantised / "checkpoints" / "best.npz")  # the file is of other weights now
    assert run_train(*command_line)[0] == 0


@pytest.mark.long
def test_of_few_images_all_are_taken(run_folder: Path, trained: Checkpoint, tiny_data: Path, run_train: RunTrain,
                                     tmp_path: Path) -> None:
    code, out, _ = run_train("quantize", "--checkpoint", run_folder)
    assert code == 0 and ("calibrating (entropy) on 27 training images of 32 pixels (all there are, and fewer than 512)"
                          in out)
    assert int8_file.load(str(run_folder), trained).calibration["images"] == 27
    for file in tiny_data.glob("*/[0-4].jpg"):
        (tmp_path / "few" / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / "few" / file.parent.name)
    code, _, err = run_train("quantize", "--checkpoint", run_folder, "--overwrite", "--data", tmp_path / "few")
    assert code == 2 and "has 15 training images, too few to calibrate on: give data with 16 or more" in err


@pytest.mark.long
def test_what_is_kept_in_floats(run_folder: Path, run_train: RunTrain) -> None:
    options = ["--images", "16", "--float-first", "--int8-classifier"]
    code, out, _ = run_train("quantize", "--checkpoint", run_folder, *options)
    assert code == 0 and "in float32: stem_bn_relu (ConvolutionRelu), stem_pool (Pooling), and the loss" in out
    (decibel,) = re.findall(r"^classifier +float32 +[0-9.]+ +(-?[0-9.]+)$", out, re.MULTILINE)  # noise of its output
    # 27 is usual, 12 was seen in 180 draws; an output with another tensor's scale has 0 or less
    assert float(decibel) > 3
    assert run_train("validate", "--checkpoint", run_folder, "--int8")[0] == 0


@pytest.mark.long
@pytest.mark.parametrize(("options", "advice"), [
    ([], "more --images or --float-first"), (["--float-first"], "more --images"),
    (["--int8-classifier"], "more --images or --float-first or no --int8-classifier"),
])
def test_the_advice_is_what_was_not_tried(options: list[str], advice: str, run_folder: Path, run_train: RunTrain,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "MUCH", -1)  # any loss
    code, _, err = run_train("quantize", "--checkpoint", run_folder, "--images", "16", *options)
    assert code == 0 and err.endswith(f" points of top-1: try another --calibration or {advice}\n")


@pytest.mark.parametrize(("options", "sentence"), [
    ([], "quantize needs trained weights: give --checkpoint"),
    (["--checkpoint", "RUN", "--images", "15"], "--images 15 is too few to calibrate on: give 16 or more"),
    (["--checkpoint", "RUN", "--images", "28"], "has 27 training images, too few for --images 28: give --images 27"),
    (["--checkpoint", "RUN", "--calibration", "mean"], "--calibration mean is not one of max, percentile, entropy"),
    (["--checkpoint", "nowhere"], "there is no checkpoint or run folder nowhere"),
    (["--checkpoint", "RUN", "--data", "synthetic"], "of synthetic is none of the 3 classes"),
])
def test_bad_input_is_one_sentence(options: list[str], sentence: str, run_folder: Path, run_train: RunTrain) -> None:
    code, _, err = run_train("quantize", *(str(run_folder) if each == "RUN" else each for each in options))
    assert code == 2 and err.startswith("error: ") and sentence in err and err.count("\n") == 1
    assert [path.name for path in (run_folder / "checkpoints").iterdir()] == ["best.npz"]


def test_weights_that_are_no_numbers_are_refused(run_folder: Path, trained: Checkpoint, run_train: RunTrain) -> None:
    bad = dict(trained.params) | {"stem_conv_weight": np.full_like(trained.params["stem_conv_weight"], np.nan)}
    save(replace(trained, params=bad), run_folder / "checkpoints" / "best.npz")
    code, _, err = run_train("quantize", "--checkpoint", run_folder, "--images", "16")
    assert code == 2 and "its stem_conv_weight has values that are not finite" in err
    bad = dict(trained.aux) | {"stem_bn_moving_var": -trained.aux["stem_bn_moving_var"]}
    save(replace(trained, aux=bad), run_folder / "checkpoints" / "best.npz")
    code, _, err = run_train("quantize", "--checkpoint", run_folder, "--images", "16")
    assert code == 2 and "its stem_bn_moving_var holds a negative variance; use an earlier checkpoint" in err


def test_a_batch_has_no_more_images_than_are_asked_for(run_folder: Path, run_train: RunTrain,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """All images of a batch are computed, so a batch has no superfluous images."""
    sizes, of_tensors = [], quantize._Tensors
    monkeypatch.setattr(quantize, "_Tensors", lambda graph, trained, config: sizes.append(config.batch_size)
                        or of_tensors(graph, trained, config))
    assert run_train("quantize", "--checkpoint", run_folder, "--images", "16", "--batch-size", "64")[0] == 0
    assert sizes == [16]


def test_a_missing_file_is_named(run_folder: Path, run_train: RunTrain) -> None:
    code, _, err = run_train("validate", "--checkpoint", run_folder, "--int8")
    assert code == 2 and "int8-best.npz, the network in INT8: run python -m train quantize --checkpoint" in err


@pytest.mark.long
@pytest.mark.parametrize("cut", [0, 100, -200])
def test_a_damaged_file_is_named(cut: int, quantised: Path, run_train: RunTrain) -> None:
    path = quantised / "checkpoints" / "int8-best.npz"
    path.write_bytes(path.read_bytes()[:cut])
    code, _, err = run_train("validate", "--checkpoint", quantised, "--int8")
    assert code == 2 and f"{path} is not a complete network in INT8" in err and err.count("\n") == 1


@pytest.mark.long
def test_a_file_of_other_weights_or_images_is_refused(
    quantised: Path, trained: Checkpoint, run_train: RunTrain
) -> None:
    code, _, err = run_train("validate", "--checkpoint", quantised, "--int8", "--val-image-size", "40")
    assert code == 2 and "was calibrated for --val-image-size 32, not 40: leave --val-image-size out, or run" in err
    code, _, err = run_train("validate", "--checkpoint", quantised, "--int8", "--mean", "0", "0", "0")
    assert code == 2 and "was calibrated for --mean 123.675 116.28 103.53, not 0.0 0.0 0.0: leave --mean out" in err
    other = dict(trained.params) | {"classifier_bias": trained.params["classifier_bias"] + 1}
    save(replace(trained, params=other), quantised / "checkpoints" / "best.npz")
    code, _, err = run_train("validate", "--checkpoint", quantised, "--int8")
    assert code == 2 and "was made of other weights than" in err


@pytest.mark.long
def test_images_are_prepared_as_for_the_ranges(run_folder: Path, tiny_data: Path, tmp_path: Path,
                                               run_train: RunTrain) -> None:
    """Every command that reads the file prepares images as quantize did, without an option for it."""
    images = ["--val-image-size", "40", "--mean", "0", "0", "0", "--std", "1", "1", "1"]
    code, out, _ = run_train("quantize", "--checkpoint", run_folder, "--images", "16", *images)
    assert code == 0
    (loss,) = re.findall(r"^int8: loss ([0-9.]+)", out, re.MULTILINE)
    for options in ([], images):
        code, out, _ = run_train("validate", "--checkpoint", run_folder, "--int8", *options)
        (again,) = re.findall(r"INT8: .*loss ([0-9.]+)", out)
        # Both round a sum to four places, and may add in another order.
        assert code == 0 and float(again) == pytest.approx(float(loss), rel=1e-5)
    code, _, err = run_train("predict", "--checkpoint", run_folder, "--int8", "--output", tmp_path / "x.csv", tiny_data)
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "x.csv.about.json").read_text())["image_size"] == 40
    sheet = tmp_path / "sheet.png"
    assert run_train("predict", "--checkpoint", run_folder, "--int8", "--contact-sheet", sheet, tiny_data)[0] == 0
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    file = tmp_path / "x.onnx"
    assert run_train("export", "--checkpoint", run_folder, "--onnx", file, "--int8", "onnxruntime")[0] == 0
    about = {each.key: each.value for each in onnx.load(file).metadata_props}
    assert (about["center_crop"], about["mean"], about["std"]) == ("40", "[0.0, 0.0, 0.0]", "[1.0, 1.0, 1.0]")


# --- ONNX ---


@pytest.mark.long
def test_onnx_for_tensorrt_has_the_same_integers(quantised: Path, tmp_path: Path, run_train: RunTrain) -> None:
    """Symmetric int8 with channels along axis 0. If ONNX Runtime computes each operator by itself, each layer gives our
    integers from the integers before it. It sums in fp32: an integer may differ by one if the exact value is as near to
    the middle of two integers as n fp32 operations may err, n * 2^-24 times the sum of the magnitudes (Higham,
    'Accuracy and Stability of Numerical Algorithms', section 3.1)."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    file = tmp_path / "network.onnx"
    code, out, _ = run_train("export", "--checkpoint", quantised, "--onnx", file, "--int8", "tensorrt")
    assert code == 0 and "resnet18 with 3 classes in INT8, input data float32" in out
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    constants = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    rounding = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert not constants[node.input[2]].any()  # the zero point
            assert constants[node.input[2]].dtype == (np.int32 if node.input[0].endswith("bias") else np.int8)
        if node.input[0].endswith("conv_weight"):
            assert constants[node.input[1]].shape == constants[node.input[0]].shape[:1]
    checkpoint = load(quantised / "checkpoints" / "best.npz")
    network = int8_file.load(str(quantised), checkpoint)
    graph = network.graph(checkpoint)
    integers = np.random.default_rng(1).integers(-LARGEST, LARGEST + 1, (6, SIZE, SIZE, 3))
    # none of ONNX Runtime's roundings is near a middle
    images = integers.astype(np.float32) * np.float32(network.scales["data"])
    model.graph.output.extend(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.INT8, None)
                              for node in rounding)
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    probabilities, *outputs = session.run(None, {"data": images.transpose(0, 3, 1, 2)})
    assert len(rounding) == 22  # the images, 20 convolutions and the pooling
    theirs = {node.input[0].replace("data", "data_int8"): each.transpose(0, 2, 3, 1)
              for node, each in zip(rounding, outputs, strict=True)}
    values = {Ref(name): array for name, array in {**network.params, "data": images, "softmax_label": 0}.items()}
    for node in graph:
        if node.is_variable:
            continue
        inputs = [np.asarray(values[ref]) for ref in node.inputs]
        (values[Ref(node.name)],) = reference.evaluate(node, inputs)
        if node.name not in theirs:
            continue
        found = values[Ref(node.name)] = theirs[node.name]
        assert np.ptp(found.astype(int)) > 20
        if node.op == "QuantisedConvolution":
            unrounded = node.with_attrs(dtype="float32")
            exact, magnitude = (reference.evaluate(unrounded, each)[0]
                                for each in (inputs, [np.abs(each.astype(np.float64)) for each in inputs]))
            operations = inputs[1][0].size + 8  # products, the bias, the addend, (de)quantisation of each
            error = operations * 2.0**-24 * magnitude
            assert (np.abs(found - exact.clip(-LARGEST - 1, LARGEST)) <= 0.5 + error).all(), node.name
            assert error.max() < 0.1, node.name  # otherwise the line above says little
        else:
            np.testing.assert_array_equal(found, reference.evaluate(node, inputs)[0])
    np.testing.assert_allclose(probabilities, values[graph.outputs[0]], rtol=0, atol=export.TOLERANCE)


@pytest.mark.long
def test_onnx_for_onnx_runtime_computes_with_integers(quantised: Path, tmp_path: Path, run_train: RunTrain) -> None:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    file, optimised = tmp_path / "network.onnx", tmp_path / "optimised.onnx"
    code, _, err = run_train("export", "--checkpoint", quantised, "--onnx", file, "--int8", "onnxruntime")
    assert (code, err) == (0, "")
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath = str(optimised)
    settings.log_severity_level = 3  # it warns that its output is for this machine
    onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(optimised).graph.node]
    assert kinds.count("QLinearConv") == 19 and kinds.count("QLinearAdd") == 8
    assert kinds.count("FusedConv") + kinds.count("Conv") == 1  # the first one
    assert not {"Add", "Relu"} & set(kinds)


@pytest.mark.long
@pytest.mark.parametrize("form", ["onnxruntime", "tensorrt"])
def test_onnx_that_differs_is_not_written(quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          form: str, run_train: RunTrain) -> None:
    """One convolution's scale is 2 % too large: more than one level of its largest integers."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    numpy_helper, of_model = onnx.numpy_helper, onnx_writer.to_onnx

    def with_a_mistake(*arguments: Any) -> Any:
        model = of_model(*arguments)
        (scale,) = (each for each in model.graph.initializer if each.name == "stage2_block1_bn1_relu_scale")
        scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(1.02), scale.name))
        return model

    monkeypatch.setattr(onnx_writer, "to_onnx", with_a_mistake)
    code, _, err = run_train("export", "--checkpoint", quantised, "--onnx", tmp_path / "x.onnx", "--int8", form)
    assert code == 2 and "integers differ from this program's by" in err and not (tmp_path / "x.onnx").exists()


@pytest.mark.parametrize("given, gpus, obstacle, device, executor", [
    ({}, [], "", "cpu", "reference"), ({}, ["H200"], "", "auto", "cuda"), ({}, ["K80"], "too old", "cpu", "reference"),
    ({"device": "cpu"}, ["H200"], "", "cpu", "reference"), ({"device": "gpu"}, ["H200"], "", "gpu", "cuda"),
    ({"executor": "cuda"}, [], "", "auto", "cuda"), ({"executor": "reference"}, ["H200"], "", "cpu", "reference")])
def test_where_integers_are_computed(given: dict[str, str], gpus: list[str], obstacle: str, device: str, executor: str,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """INT8 runs on a capable GPU if there is one, whatever the run was trained on."""
    monkeypatch.setattr(devices, "find_gpus", lambda: gpus)
    monkeypatch.setattr(devices, "_cuda_obstacle", lambda number: obstacle)
    found = for_int8(Config(device="gpu", executor="mxnet", dtype="float16"), given)
    assert (found.device, found.executor, found.dtype) == (device, executor, "auto")


@pytest.mark.long
def test_predictions_with_integers(quantised: Path, trained: Checkpoint, tiny_data: Path, tmp_path: Path,
                                   run_train: RunTrain) -> None:
    """Predictions in INT8 are equal on the terminal and in a file, and differ slightly from those in floats."""
    images = sorted(tiny_data.rglob("*.jpg"))[:5]
    found = {}
    for name, options in (("int8", ["--int8"]), ("floats", [])):
        code, out, err = run_train("predict", "--checkpoint", quantised, "--json", "--device", "cpu", *options, *images)
        assert (code, err) == (0, "")
        found[name] = np.array([each["probability"] for line in json.loads(out) for each in line["predictions"]])
        file = tmp_path / f"{name}.csv"
        assert run_train("predict", "--checkpoint", quantised, "--output", file, "--device", "cpu", *options,
                         *images)[0] == 0
        written = [float(value) for value in re.findall(r",(0\.\d+)", file.read_text())]
        np.testing.assert_allclose(sorted(written), sorted(found[name]), atol=1e-4)
    assert 0 < np.abs(found["int8"] - found["floats"]).max() < 0.1
    code, _, err = run_train("predict", "--checkpoint", quantised, "--output", file, "--int8", *images)
    assert code == 2 and f"{file} was begun with another kind of numbers: floats, now integers (--int8); give" in err


@pytest.mark.long
def test_the_way_out_of_a_missing_gpu_is_one(quantised: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch,
                                             run_train: RunTrain) -> None:
    """The command accepts the executor that each message suggests."""
    monkeypatch.setattr(devices, "find_gpus", lambda: [])
    for command in (["validate"], ["predict", next(tiny_data.rglob("*.jpg"))]):
        for executor, problem in (("cuda", "needs an NVIDIA GPU, and there is none here"), ("mxnet", "has no INT8")):
            command_line = [*command, "--checkpoint", quantised, "--int8", "--executor"]
            code, _, err = run_train(*command_line, executor)
            assert code == 2 and f"--executor {executor} {problem}" in err
            (way_out,) = re.findall(r"use --executor (\w+)$", err.strip())
            assert run_train(*command_line, way_out)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_are_answered(run_folder: Path, run_train: RunTrain, monkeypatch: pytest.MonkeyPatch,
                                         number: int) -> None:
    monkeypatch.setattr(quantize, "quantised", lambda *arguments: signal.raise_signal(number))
    code, out, _ = run_train("quantize", "--checkpoint", run_folder, "--images", "16")
    assert code == 128 + number and "stopped: nothing was written, and the same command begins anew\n" in out
    assert [path.name for path in (run_folder / "checkpoints").iterdir()] == ["best.npz"]


@pytest.mark.long
def test_integers_as_weights_are_named(quantised: Path, tiny_options: list[str], tmp_path: Path,
                                       run_train: RunTrain) -> None:
    path, file = quantised / "checkpoints" / "int8-best.npz", tmp_path / "network.onnx"
    for command in (["validate", "--checkpoint", path], [*tiny_options, "--weights", path, "--output", tmp_path / "x"],
                    ["--resume", path]):
        code, _, err = run_train(*command)
        assert code == 2 and f"{path} is a network in INT8, made by quantize from a checkpoint: give" in err
    pytest.importorskip("onnxruntime")
    assert run_train("export", "--checkpoint", quantised, "--onnx", file, "--int8", "tensorrt")[0] == 0
    for command in (["validate", "--checkpoint", file], [*tiny_options, "--weights", file, "--output", tmp_path / "x"]):
        code, _, err = run_train(*command)
        assert code == 2 and f"{file} is an export in INT8, from which float weights cannot be restored" in err


def test_int8_without_onnx_is_refused(quantised: Path, tmp_path: Path, run_train: RunTrain) -> None:
    code, _, err = run_train("export", "--checkpoint", quantised, "--symbol", tmp_path / "s.json", "--int8", "tensorrt")
    assert code == 2 and "--int8 tensorrt is for --onnx, which is not given" in err


def test_a_folder_without_write_access_is_named_at_once(run_folder: Path, run_train: RunTrain,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root may write anywhere
    code, out, err = run_train("quantize", "--checkpoint", run_folder, "--images", "16")
    assert (code, out) == (2, "") and "int8-best.npz (Permission denied): copy the checkpoint to another folder" in err


@pytest.mark.long
def test_no_place_to_write_to(quantised: Path, trained: Checkpoint) -> None:
    network = int8_file.load(str(quantised), trained)
    with pytest.raises(UserError, match="cannot write"):
        int8_file.save(network, quantised / "checkpoints" / "best.npz" / "int8.npz")
