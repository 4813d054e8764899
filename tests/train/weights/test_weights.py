"""Weights of other programs: networks compute the same with them here as there, and other weights are refused."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common import imagenet
from common.mxnet_compat import mx
from graph_passes.executors import create_executor
from train import devices, models, weights
from train.build import build_executor
from train.checkpoint import Checkpoint, Progress, save
from train.command_line import read
from train.commands import export
from train.config import Config
from train.errors import TrainError
from train.models import resnet
from train.options.commands import ExportOptions
from train.weights import files, publish, torch_file
from train.weights.record import MEAN, STD

SMALL = Path(__file__).with_name("resnet18_small.pth")  # benchmarks/peer_weights.py makes it, with PyTorch's logits
WIDTH = 2  # channels, where a ResNet-18 has 64


@pytest.fixture(autouse=True)
def small_networks(monkeypatch):
    monkeypatch.setattr(resnet, "FIRST_WIDTH", WIDTH)


@pytest.fixture
def state() -> dict[str, np.ndarray]:
    """The state_dict of SMALL."""
    return torch_file.read(SMALL)


def written(path: Path, arrays: dict[str, np.ndarray], **record: object) -> str:
    path.write_bytes(publish.content(arrays, path))
    if record:
        path.with_suffix(".json").write_text(json.dumps(record))
    return str(path)


def refused(place: str, model: str = "") -> str:
    """The error message."""
    with pytest.raises(TrainError) as error:
        weights.read(place, model)
    assert "\n" not in str(error.value) and place in str(error.value)
    return str(error.value)


def probabilities(trained: Checkpoint, data: np.ndarray) -> np.ndarray:
    """Probabilities for normalised images (N, H, W, 3)."""
    graph = models.create(trained.config.model, trained.num_classes).graph
    executor = create_executor("mxnet", graph, {"data": data.shape, "softmax_label": data.shape[:1]}, "cpu(0)")
    executor.set_params(trained.params, trained.aux)
    return executor.forward(mx.nd.array(data)).asnumpy()


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def random_network(model: str, classes: int, rng: np.random.Generator) -> Checkpoint:
    """With random BatchNorms, and classes that differ in their probabilities."""
    params, aux = models.create(model, classes).initial_values(seed=1, zero_init_residual=False)
    for name, array in (*params.items(), *aux.items()):
        if array.ndim == 1:
            low = 0.5 if name.endswith(("_gamma", "_var")) else -0.3
            array[:] = rng.uniform(low, low + 0.6, array.shape)
    params["classifier_weight"] *= 20
    names = [f"class {label}" for label in range(classes)]
    return Checkpoint(params, aux, {}, Config(model=model, image_size=40), names, names, Progress(step=3))


def saved(trained: Checkpoint, folder: Path) -> Path:
    """A checkpoint file of it."""
    save(trained, folder / "w.npz")
    return folder / "w.npz"


def assert_same_arrays(found: Checkpoint, wanted: Checkpoint) -> None:
    for of_found, of_wanted in ((found.params, wanted.params), (found.aux, wanted.aux)):
        assert of_found.keys() == of_wanted.keys()
        for name, array in of_wanted.items():
            np.testing.assert_array_equal(of_found[name], array, err_msg=name, strict=True)


# --- torchvision and timm ---


OF_FAMILIES = ("efficientnet_b0", "tf_efficientnet_lite0", "efficientnet_v2_s", "mobilenet_v2", "mobilenet_v3_small",
               "mobilenetv3_small_100", "regnet_x_400mf", "regnet_y_400mf", "convnext_tiny", "seresnet50",
               "resnetrs50")


@pytest.mark.long(but=["tf_efficientnet_lite0", "mobilenet_v2", "mobilenetv3_small_100", "seresnet50"])
@pytest.mark.parametrize("model", OF_FAMILIES)
def test_names_of_every_library_are_read_again(model, tmp_path, rng):
    """Names are read back to the bit, with the library's preparation of images unless the file states another."""
    made = random_network(model, 5, rng)
    for number, names in enumerate(models.published(model)):
        file = tmp_path / f"{number}.pth"
        place = written(file, publish.state_dict(made, names), architecture=names.model or model)
        found = weights.read(place)
        assert (found.trained.config.model, found.num_classes) == (model, 5)
        assert_same_arrays(found.trained, made)
        file.with_suffix(".json").unlink()
        if model not in EQUAL_ARRAYS:
            images = weights.read(place).trained.config
            assert images.image_size == names.images.get("size", 224)
            assert images.interpolation == names.images.get("interpolation", "bilinear")
            assert images.mean == names.images.get("mean", MEAN)


# networks whose arrays by timm's names another network has too
EQUAL_ARRAYS = ("efficientnet_b0", "tf_efficientnet_lite0")


def test_a_network_whose_arrays_another_one_has_too(tmp_path, rng):
    """timm's names are those of a network of TensorFlow's and of one of PyTorch's."""
    made = random_network("efficientnet_lite0", 5, rng)
    arrays = publish.state_dict(made)
    text = refused(written(tmp_path / "w.pth", arrays))
    assert "may be a efficientnet_lite0 or a tf_efficientnet_lite0, which have equal arrays" in text
    assert 'w.json beside it, such as {"architecture": "efficientnet_lite0"}' in text
    for model in ("efficientnet_lite0", "tf_efficientnet_lite0"):
        place = written(tmp_path / f"{model}.pth", arrays, architecture=model)
        assert weights.read(place).trained.config.model == model
        assert weights.read(str(tmp_path / "w.pth"), model).trained.config.model == model
    kernel = "stage2_block1_conv2_weight"  # TensorFlow's, which are read from the other end
    reversed_ = weights.read(place).trained.params[kernel]
    np.testing.assert_array_equal(reversed_, made.params[kernel][:, ::-1, ::-1])


def test_pytorchs_logits():
    """SMALL's logits from PyTorch 2.5 in float32; 1e-5 is ten times the effect of another order of summation."""
    with np.load(SMALL.with_suffix(".npz")) as made:
        images, logits = made["images"].astype(np.float32), made["logits"]
    trained = weights.load(str(SMALL), quiet=True)
    assert trained.config.model == "resnet18" and trained.num_classes == logits.shape[1]
    assert np.ptp(logits, axis=1).min() > 0.5
    found = np.log(probabilities(trained, images))
    difference = (found - found.mean(axis=1, keepdims=True)) - (logits - logits.mean(axis=1, keepdims=True))
    assert np.abs(difference).max() / np.abs(logits).max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["resnet18", "resnet50", "resnet50d", "resnext50_32x4d"])
def test_logits_in_float16_on_a_gpu(model, tmp_path, rng, monkeypatch):
    """Weights that were written as a PyTorch file, against float32 on the CPU."""
    monkeypatch.setattr(resnet, "FIRST_WIDTH", 64)
    file, made = tmp_path / "w.pth", random_network(model, 10, rng)
    made.params["classifier_weight"] *= 0.015  # with this width its logits differ by 550, and exp(-550) is 0 in fp32
    run_export("--checkpoint", saved(made, tmp_path), "--torchvision", file)
    trained = weights.load(str(file), quiet=True)
    data = rng.standard_normal((4, 96, 96, 3), np.float32)
    config = replace(trained.config, batch_size=4)
    placement = devices.choose(Config(device="gpu", dtype="float16"), local_rank=0)
    executor = build_executor(config, trained.num_classes, 96, placement, trained)
    found = executor.forward(mx.nd.array(data).as_in_context(mx.gpu())).asnumpy()
    executor.close()  # other processes use the GPU's memory, too
    ours, wanted = (np.log(values.astype(np.float64)) for values in (found, probabilities(trained, data)))
    difference = (ours - ours.mean(axis=1, keepdims=True)) - (wanted - wanted.mean(axis=1, keepdims=True))
    assert np.abs(difference).max() / np.ptp(wanted, axis=1).max() < 1e-2


@pytest.mark.long(but=[".safetensors"])
@pytest.mark.parametrize("form", [".pth", ".safetensors"])
def test_round_trip_to_the_bit(form, state, tmp_path):
    if form == ".safetensors":
        pytest.importorskip("safetensors")
    file = tmp_path / f"out{form}"
    run_export("--checkpoint", SMALL, "--torchvision", file)
    back, _ = files.read(file)
    assert sorted(back) == sorted(state)
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name, strict=True)
    assert list(publish.state_dict(weights.load(str(SMALL), quiet=True))) == list(state), "torchvision's order"


def run_export(*arguments: object) -> None:
    export.main(read(ExportOptions, [str(argument) for argument in arguments], command="export"))


@pytest.mark.long(but=["resnet18"])
@pytest.mark.parametrize("model", ["resnet18", "resnet50", "resnet50d", "resnext50_32x4d", "wide_resnet50_2"])
def test_what_is_exported_is_read_again(model, tmp_path, rng):
    trained = random_network(model, 3, rng)
    run_export("--checkpoint", saved(trained, tmp_path), "--torchvision", tmp_path / "w.pth")
    found = weights.load(str(tmp_path / "w.pth"), quiet=True)
    assert_same_arrays(found, trained)
    assert (found.config.model, found.classes, found.progress.step) == (model, trained.classes, 3)


@pytest.mark.parametrize("model, file, words", [
    ("resnet18_v2", "w.pth", "neither torchvision nor timm has a resnet18_v2"),
    ("resnet18", "w.h5", "must end in .pth or .pt or .safetensors, which determines the format"),
])
def test_what_cannot_be_exported(model, file, words, tmp_path, rng):
    place = saved(random_network(model, 3, rng), tmp_path)
    with pytest.raises(TrainError, match=re.escape(words)):
        run_export("--checkpoint", place, "--torchvision", tmp_path / file)
    assert [path.name for path in tmp_path.iterdir()] == ["w.npz"]


def test_two_files_of_one_name(tmp_path):
    with pytest.raises(TrainError, match=r"--symbol .*w\.json is also a file that .*pth writes"):
        run_export("--checkpoint", SMALL, "--torchvision", tmp_path / "w.pth", "--symbol", tmp_path / "w.json")
    assert not list(tmp_path.iterdir())


def test_a_record_replaces_no_other_file(tmp_path):
    """Such as a Symbol that another command has exported, or a run's config.json."""
    file, about = tmp_path / "w.pth", tmp_path / "w.json"
    about.write_text('{"nodes": []}')
    with pytest.raises(TrainError, match=r"w\.json, where --torchvision .*w\.pth writes how images are prepared"):
        run_export("--checkpoint", SMALL, "--torchvision", file)
    assert about.read_text() == '{"nodes": []}' and not file.exists()
    with pytest.raises(TrainError, match=r"w\.json, where --torchvision .* move it, or give another name"):
        run_export("--checkpoint", SMALL, "--torchvision", file, "--overwrite")
    assert about.read_text() == '{"nodes": []}' and not file.exists()


def test_files_are_replaced_only_when_asked(tmp_path):
    names = {"torchvision": "w.pth", "params": "w.params", "symbol": "s.json", "onnx": "w.onnx"}
    for name, file in names.items():
        (tmp_path / file).write_bytes(b"a")
        others = [word for each in names.keys() - {name} for word in (f"--{each}", tmp_path / f"new-{names[each]}")]
        with pytest.raises(TrainError, match=rf"^--{name} .*{file} exists already: give --overwrite to replace it"):
            run_export("--checkpoint", SMALL, f"--{name}", tmp_path / file, *others)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names.values())
    for name in ("torchvision", "params", "symbol"):
        run_export("--checkpoint", SMALL, f"--{name}", tmp_path / names[name], "--overwrite")
        assert len((tmp_path / names[name]).read_bytes()) > 1


def test_a_record_of_other_weights_is_replaced_only_when_asked(tmp_path, rng):
    """Two formats of the same weights share one record."""
    run_export("--checkpoint", SMALL, "--torchvision", tmp_path / "w.pth")
    run_export("--checkpoint", SMALL, "--torchvision", tmp_path / "w.pt")
    about, other = tmp_path / "w.json", saved(random_network("resnet18", 7, rng), tmp_path / "other")
    before = about.read_bytes()
    (tmp_path / "w.pt").unlink()
    with pytest.raises(TrainError, match=r"w\.json, where .*w\.pt writes how images .*belongs to other weights: give"):
        run_export("--checkpoint", other, "--torchvision", tmp_path / "w.pt")
    assert about.read_bytes() == before and not (tmp_path / "w.pt").exists()
    run_export("--checkpoint", other, "--torchvision", tmp_path / "w.pt", "--overwrite")
    assert about.read_bytes() != before


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_precisions(dtype, state, tmp_path):
    arrays = {name: array.astype(dtype) if array.dtype == np.float32 else array for name, array in state.items()}
    trained = weights.load(written(tmp_path / "w.pth", arrays), quiet=True)
    weight = trained.params["stem_conv_weight"]
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight.transpose(0, 3, 1, 2), state["conv1.weight"].astype(dtype), strict=False)


@pytest.mark.parametrize("form", [".pth", ".safetensors"])
def test_names_behind_wrappers(form, state, tmp_path):
    """Names from torch.compile in DistributedDataParallel."""
    if form == ".safetensors":
        pytest.importorskip("safetensors")
    renamed = {f"module._orig_mod.{name}": array for name, array in state.items()}
    assert weights.read(written(tmp_path / f"w{form}", renamed)).num_classes == 5
    place = written(tmp_path / f"w{form}", state | {"module.fc.weight": state["fc.weight"] + 1})
    assert "has fc.weight twice, with and without module. or _orig_mod. before it: save the" in refused(place)


@pytest.mark.parametrize("module", ["model.", "net.module.", "model._orig_mod."])
def test_names_inside_a_module(module, state, tmp_path):
    """A program for Lightning has its network in an attribute."""
    renamed = {f"{module}{name}": array for name, array in state.items()}
    found = weights.read(written(tmp_path / "w.pth", renamed))
    assert found.num_classes == 5
    assert f"{module}: left out of the names, as all arrays belong to this module" in found.notes
    del renamed[f"{module}conv1.weight"]
    assert "the nearest is resnet18, which also has conv1.weight: give" in refused(written(tmp_path / "w.pth", renamed))
    renamed[f"{module}conv1.weight"], renamed["loss.weight"] = state["conv1.weight"], np.ones(5, np.float32)
    assert f"w.pth has the arrays of resnet18 after {module} and others beside it, such as loss.weight: save" in (
        refused(written(tmp_path / "w.pth", renamed)))


def test_biases_before_a_batch_norm(state, tmp_path, rng):
    """A convolution with a bias, whose mean the BatchNorm has learned, equals the convolution without both."""
    biases = {"conv1": rng.standard_normal(WIDTH, np.float32),
              "layer2.0.downsample.0": rng.standard_normal(2 * WIDTH, np.float32)}
    norms = {"conv1": "bn1", "layer2.0.downsample.0": "layer2.0.downsample.1"}
    changed = dict(state)
    for conv, bias in biases.items():
        changed[f"{conv}.bias"] = bias
        changed[f"{norms[conv]}.running_mean"] = state[f"{norms[conv]}.running_mean"] + bias
    found = weights.read(written(tmp_path / "w.pth", changed))
    np.testing.assert_allclose(found.trained.aux["stem_bn_moving_mean"], state["bn1.running_mean"], atol=1e-6)
    assert "conv1.bias and 1 more: subtracted from the running means of the BatchNorms after them" in found.notes


def test_biases_of_another_shape(state, tmp_path):
    place = written(tmp_path / "w.pth", state | {"conv1.bias": np.zeros(3, np.float32)})
    assert "the nearest is resnet18, whose conv1.bias is (2,) and not (3,): give" in refused(place)


def test_a_network_without_classifier(state, tmp_path):
    del state["fc.weight"], state["fc.bias"]
    place = written(tmp_path / "w.pth", state)
    start, notes = weights.starting_point(weights.read(place), [("a", "a"), ("b", "b")], Config(model="resnet18"))
    assert start.num_classes == 2
    assert notes[-1] == "fc.weight: no classifier there, 2 here: a new classifier"
    with pytest.raises(TrainError, match="has no classifier: train one from it with --weights"):
        weights.load(place)


# --- Gluon ---


def zoo_network(name: str, classes: int, rng: np.random.Generator) -> mx.gluon.HybridBlock:
    """A network of Gluon's, as narrow as ours here, with random weights and statistics."""
    zoo = mx.gluon.model_zoo.vision.resnet
    _, version, depth = re.fullmatch(r"(resnet)(\d+)_v(\d)", name).group(1, 3, 2)  # type: ignore[union-attr]
    kind, layers, channels = zoo.resnet_spec[int(depth)]
    narrow = [channel * WIDTH // 64 for channel in channels]
    network = zoo.resnet_net_versions[int(version) - 1](
        zoo.resnet_block_versions[int(version) - 1][kind], layers, narrow, classes=classes)
    network.initialize(mx.init.Xavier())
    network(mx.nd.zeros((1, 3, 32, 32)))
    for key, parameter in network.collect_params().items():
        if len(parameter.shape) == 1:
            low = 0.5 if key.endswith(("gamma", "var")) else -0.3
            if "batchnorm0_beta" not in key or "stage" in key:  # Gluon's BatchNorm of the images has none
                parameter.set_data(mx.nd.array(rng.uniform(low, low + 0.6, parameter.shape)))
    return network


@pytest.mark.long(but=["resnet18_v2-export"])
@pytest.mark.parametrize("name, form", [
    ("resnet18_v1", "save_parameters"), ("resnet34_v1", "export"), ("resnet18_v2", "export"),
    ("resnet50_v2", "save_parameters"),
])
def test_gluons_networks_compute_the_same(name, form, tmp_path, rng):
    """Networks of v2 normalise the images once more: our mean and standard deviation include that."""
    zoo = zoo_network(name, 4, rng)
    if form == "export":
        zoo.hybridize()
        zoo(mx.nd.zeros((1, 3, 32, 32)))
        zoo.export(str(tmp_path / "net"))
        file = tmp_path / "net-0000.params"
        (tmp_path / "net-symbol.json").unlink()
    else:
        file = tmp_path / "net.params"
        zoo.save_parameters(str(file))
    found = weights.read(str(file))
    trained = found.trained
    assert trained.config.model == name.removesuffix("_v1")
    pixels = rng.uniform(0, 255, (2, 40, 40, 3))
    theirs = mx.nd.array(((pixels - MEAN) / STD).transpose(0, 3, 1, 2))
    zoo.output.weight.set_data(zoo.output.weight.data() / np.ptp(zoo(theirs).asnumpy()))
    trained.params["classifier_weight"] = zoo.output.weight.data().asnumpy()
    ours = ((pixels - trained.config.mean) / trained.config.std).astype(np.float32)
    wanted = softmax(zoo(theirs).asnumpy())
    np.testing.assert_allclose(probabilities(trained, ours), wanted, rtol=1e-4)
    assert any("normalises the images once more" in note for note in found.notes) == name.endswith("_v2")


@pytest.mark.parametrize("name, change, words", [
    ("running_var", None, "has only one of features.0's running_mean and running_var: fetch or write it again"),
    ("running_mean", None, "has only one of features.0's running_mean and running_var: fetch or write it again"),
    ("running_mean", np.zeros(2), "the nearest is resnet18_v2, whose features.0.running_mean is (3,) and not (2,)"),
])
def test_a_damaged_norm_of_the_images(name, change, words, tmp_path, rng):
    file = str(tmp_path / "w.params")
    zoo_network("resnet18_v2", 4, rng).save_parameters(file)
    arrays = mx.nd.load(file)
    del arrays[f"features.0.{name}"]
    if change is not None:
        arrays[f"features.0.{name}"] = mx.nd.array(change)
    mx.nd.save(file, arrays)
    assert words in refused(file)


# --- this program's own files ---


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_own_parameter_files(layout, tmp_path, rng):
    trained = random_network("resnet18d", 3, rng)
    run_export("--checkpoint", saved(trained, tmp_path), "--params", tmp_path / "w.params", "--layout", layout)
    found = weights.load(str(tmp_path / "w.params"), quiet=True)
    assert_same_arrays(found, trained)
    assert found.class_names == ["0", "1", "2"]


@pytest.mark.long(but=["resnet18"])
@pytest.mark.parametrize("model", ["resnet18", "resnet50d", "resnet18_v2"])
def test_own_onnx_files(model, tmp_path, rng):
    """Our ONNX files contain folded BatchNorms. When these are restored, the network gives equal results, with the
    original gamma and beta.
    """
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    trained = random_network(model, 3, rng)
    settings = {"mean": (100.0, 110.0, 120.0), "val_crop_fraction": 0.8, "interpolation": "bicubic"}
    trained.config = Config(**vars(trained.config) | settings)
    run_export("--checkpoint", saved(trained, tmp_path), "--onnx", tmp_path / "w.onnx")
    found = weights.load(str(tmp_path / "w.onnx"), quiet=True)
    data = rng.standard_normal((2, 40, 40, 3), np.float32)
    np.testing.assert_allclose(probabilities(found, data), probabilities(trained, data), rtol=1e-4)
    assert (found.config.model, found.classes) == (model, trained.classes)
    assert {name: getattr(found.config, name) for name in settings} == settings
    for name, array in trained.params.items():
        if name.endswith(("_gamma", "_beta")):
            np.testing.assert_allclose(found.params[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def test_own_runs(tmp_path, rng):
    trained = random_network("resnet18", 3, rng)
    save(trained, tmp_path / "run" / "checkpoints" / "best.npz")
    found = weights.read(str(tmp_path / "run"))
    assert_same_arrays(found.trained, trained)
    assert found.notes == [f"weights: resnet18 with 3 classes of {tmp_path / 'run'}, 102 arrays"]
    assert "this run has --model resnet34" in refused(str(tmp_path / "run"), "resnet34")
    assert "there is no checkpoint or run folder" in refused(str(tmp_path / "nowhere.pth"))


# --- what is refused ---


def test_another_architecture_names_the_nearest(state, tmp_path):
    extra = state | {"layer1.0.se.fc1.weight": np.zeros((1, WIDTH, 1, 1), np.float32)}
    lacking = {name: array for name, array in state.items() if not name.startswith("layer4.1.bn2")}
    wider = state | {"layer1.0.conv1.weight": np.zeros((WIDTH, WIDTH, 5, 5), np.float32)}
    other = {"features.0.weight": np.zeros((4, 3, 3, 3), np.float32)}
    for arrays, words in (
        (extra, "the nearest is resnet18, which has no layer1.0.se.fc1.weight: give"),
        (lacking, "the nearest is resnet18, which also has layer4.1.bn2.bias (and 3 more differences): give"),
        (wider, "the nearest is resnet18, whose layer1.0.conv1.weight is (2, 2, 3, 3) and not (2, 2, 5, 5): give"),
        (other, "belongs to no network of this program; the nearest is "),
    ):
        assert words in refused(written(tmp_path / "w.pth", arrays))


def test_another_model_than_asked_for(state, tmp_path):
    place = written(tmp_path / "w.pth", state)
    assert "holds a resnet18, but this run has --model resnet50: give weights of a" in refused(place, "resnet50")
    assert weights.read(place, "resnet18").trained.config.model == "resnet18"


@pytest.mark.long(but=["fc.*"])
@pytest.mark.parametrize("name, change, words", [
    ("layer2.1.bn1.weight", lambda array: array * np.float32(np.nan), "bn1.weight has values that are not"),
    ("conv1.weight", lambda array: array.astype(np.float64) * 1e300, "its conv1.weight has values that are not finite"),
    ("bn1.running_var", lambda array: -array, "its bn1.running_var holds a negative variance"),
    ("fc.weight", lambda array: array.astype(np.int8), "its fc.weight is int8, not floating-point"),
    ("fc.bias", lambda array: array[:3], "the nearest is resnet18, whose fc.weight and fc.bias have a row for each "
                                         "class, and not the shapes (5, 16) and (3,): give"),
    ("fc.bias", lambda array: array[0], "the nearest is resnet18, whose fc.bias is (1000,) and not ()"),
    ("bn1.num_batches_tracked", lambda array: np.zeros(2, np.int64), "its bn1.num_batches_tracked is not a number of"),
    ("bn1.num_batches_tracked", lambda array: np.array(np.nan), "its bn1.num_batches_tracked is not a number of"),
    ("bn1.num_batches_tracked", lambda array: np.array(np.inf), "its bn1.num_batches_tracked is not a number of"),
    ("bn1.num_batches_tracked", lambda array: -1 - array, "its bn1.num_batches_tracked is not a number of"),
])
def test_arrays_that_no_network_can_use(name, change, words, state, tmp_path):
    state[name] = change(state[name])
    assert words in refused(written(tmp_path / "w.pth", state))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".params", ".onnx"])
def test_broken_files(suffix, tmp_path):
    if suffix in (".safetensors", ".onnx"):
        pytest.importorskip(suffix[1:])
    file = tmp_path / f"w{suffix}"
    for content in (b"", b"garbage that is nothing", os.urandom(500), SMALL.read_bytes()[:3000]):
        file.write_bytes(content)
        refused(str(file))


def test_truncated_files(state, tmp_path, rng):
    pytest.importorskip("safetensors")
    mx.nd.save(str(tmp_path / "w.params"), {name: mx.nd.array(array) for name, array in state.items() if array.ndim})
    written(tmp_path / "w.safetensors", state)
    for file in (tmp_path / "w.params", tmp_path / "w.safetensors"):
        content = file.read_bytes()
        for part in rng.integers(1, len(content), 8):
            file.write_bytes(content[:part])
            assert "fetch or write it again" in refused(str(file))


@pytest.mark.parametrize("place", [16, 18, 22, 24, 32, 36, 47])
def test_a_changed_byte_of_mxnets_file(place, tmp_path):
    """A byte of the number of arrays (16 to 23), or of the first array's header and shape: MXNet would fail, or take
    much memory."""
    file = tmp_path / "w.params"
    mx.nd.save(str(file), {"a": mx.nd.ones((2, 3)), "b": mx.nd.ones(4)})
    content = bytearray(file.read_bytes())
    content[place] ^= 0xFF
    file.write_bytes(content)
    assert "is not a complete MXNet parameter file: fetch or write it again" in refused(str(file))


def test_what_mxnet_finds_late(tmp_path, monkeypatch):
    """MXNet works asynchronously, so its error about a file may come only with the numbers."""
    def fail(array: mx.nd.NDArray) -> None:
        raise mx.MXNetError("a stack trace\nof many lines")

    file = tmp_path / "w.params"
    mx.nd.save(str(file), {"a": mx.nd.ones((2, 3))})
    monkeypatch.setattr(mx.nd.NDArray, "asnumpy", fail)
    assert "is not a complete MXNet parameter file: fetch or write it again" in refused(str(file))


@pytest.mark.parametrize("name", ["a.json", "a-symbol.json", "model"])
def test_files_of_no_known_ending(name, tmp_path):
    (tmp_path / name).write_text("{}")
    place = str(tmp_path / name)
    assert refused(place).endswith(
        "is not a file with weights: give a run folder, a checkpoint, or a file that ends in .pth, .pt, "
        ".bin, .tar, .safetensors, .params, .onnx")
    with pytest.raises(TrainError, match="is not a file with weights"):
        weights.load(place)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """An ONNX export."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resnet, "FIRST_WIDTH", WIDTH)
        made = random_network("resnet18", 3, np.random.default_rng(0))
        run_export("--checkpoint", saved(made, folder), "--onnx", folder / "w.onnx")
    return folder / "w.onnx"


@pytest.mark.parametrize("about, words", [
    ({"resize_shorter": "0"}, "its resize_shorter 0 is smaller than its center_crop, 40"),
    ({"resize_shorter": "1" + 400 * "0"}, "its center_crop / resize_shorter 0.0 is not from 0.1 to 1"),
    ({"center_crop": "-5"}, "its center_crop -5 is not from 32 to 8192"),
    ({"center_crop": "large"}, "its center_crop is not JSON"),
    ({"mean": '["a", "b", "c"]'}, "its mean ['a', 'b', 'c'] is not three numbers from 0 to 255"),
    ({"mean": "[1, 2]"}, "its mean [1, 2] is not three numbers"),
    ({"mean": "1"}, "its mean 1 is not three numbers"),
    ({"std": "[0, 1, 1]"}, "its std [0, 1, 1] is not three numbers from 0.1 to 1000"),
    ({"interpolation": "lanczos"}, "its interpolation 'lanczos' is not one of this program's (bilinear, bicubic)"),
    ({"loss": "hinge"}, "its loss 'hinge' is not one of this program's (softmax, bce)"),
    ({"model": "evil"}, "its model 'evil' is not one of this program's (resnet18, "),
    ({"class_keys": '["a", "a", "b"]'}, "its class_keys contain a name twice"),
    ({"class_keys": "[[], {}, 1]"}, "its class_keys are not a list of names"),
    ({"class_names": '["a", "b"]'}, "it has 3 class_keys, but 2 names to show for them"),
    ({"class_names": None}, "its metadata lacks class_names"),
    ({"batch_norms": 100_000 * "["}, "its batch_norms is not JSON, maximum recursion depth"),
    ({"batch_norms": "{}"}, "its batch_norms have no stem_bn"),
    ({"batch_norms": "3"}, "is not a complete ONNX file ("),
])
def test_onnx_metadata_that_cannot_be(about, words, exported, tmp_path):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(exported)
    known = {entry.key: entry.value for entry in model.metadata_props} | about
    onnx.helper.set_model_props(model, {key: value for key, value in known.items() if value is not None})
    onnx.save(model, tmp_path / "w.onnx")
    text = refused(str(tmp_path / "w.onnx"))
    assert words in text and text.endswith(": write it again")


@pytest.mark.parametrize("name", ["stem_conv_weight", "stem_conv_bias"])
def test_onnx_without_its_numbers(name, exported, tmp_path):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(exported)
    (tensor,) = (each for each in model.graph.initializer if each.name == name)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    (tmp_path / "w.onnx").write_bytes(model.SerializeToString())
    assert "w.onnx has weights in /etc/passwd, outside its folder: write the model" in refused(str(tmp_path / "w.onnx"))
    model.graph.initializer.remove(tensor)
    onnx.save(model, tmp_path / "w.onnx")
    assert f"is not a complete ONNX file (it has no {name}): write it again" in refused(str(tmp_path / "w.onnx"))


def test_foreign_onnx(tmp_path):
    onnx = pytest.importorskip("onnx")
    graph = onnx.helper.make_graph([], "empty", [], [])
    onnx.save(onnx.helper.make_model(graph, producer_name="pytorch"), tmp_path / "w.onnx")
    assert "w.onnx: it has 0 inputs and 0 outputs: a network for images" in refused(str(tmp_path / "w.onnx"))


# --- the record of the images ---


CFG = {"input_size": [3, 64, 64], "mean": [0.5, 0.25, 0.5], "std": [0.5, 0.5, 0.25], "crop_pct": 0.95,
       "interpolation": "bicubic"}


def test_timms_record(state, tmp_path):
    """In FILE.json, or in config.json as on the Hugging Face hub."""
    place = written(tmp_path / "w.pth", state, architecture="resnet18.a1_in1k", pretrained_cfg=CFG,
                    label_names=list("abcde"), label_descriptions={"a": "ant"})
    for name in ("w.json", "config.json"):
        (tmp_path / "w.json").rename(tmp_path / name)
        found = weights.read(place)
        config = found.trained.config
        assert (config.image_size, config.interpolation) == (64, "bicubic")
        assert config.mean == (127.5, 63.75, 127.5) and config.std == (127.5, 127.5, 63.75)
        assert round(64 / config.val_crop_fraction) == 67  # timm: floor(64 / 0.95)
        assert found.trained.classes == [("a", "ant"), *((key, key) for key in "bcde")]
        assert "images: 64 pixels of 67, bicubic, mean 0.5, 0.25, 0.5, std 0.5, " in found.notes[-1]
        assert weights.settings(config) == {"model": "resnet18", "mean": config.mean, "std": config.std,
                                            "interpolation": "bicubic"}


def test_without_a_record(state, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(Config().to_dict()))  # of a run, which is not a record
    config = weights.read(written(tmp_path / "w.pth", state)).trained.config
    assert (config.image_size, config.val_crop_fraction, config.mean, config.std) == (224, 0.875, MEAN, STD)


def test_what_is_exported_has_the_images_of_its_network(tmp_path, rng):
    trained = random_network("resnet18", 3, rng)
    trained.config = Config(model="resnet18", image_size=48, val_image_size=60, val_crop_fraction=0.93, std=(9, 8, 7),
                            interpolation="bicubic")
    run_export("--checkpoint", saved(trained, tmp_path), "--torchvision", tmp_path / "w.pth")
    config = weights.load(str(tmp_path / "w.pth"), quiet=True).config
    assert (config.image_size, config.interpolation) == (60, "bicubic")
    assert round(60 / config.val_crop_fraction) == round(60 / 0.93)
    np.testing.assert_allclose(config.std, (9, 8, 7))


def test_blue_green_red(state, tmp_path):
    place = written(tmp_path / "w.pth", state, pretrained_cfg=CFG | {"color_order": "BGR"})
    found = weights.read(place)
    ours = found.trained.params["stem_conv_weight"].transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(ours, state["conv1.weight"][:, ::-1])
    assert found.trained.config.mean == (127.5, 63.75, 127.5) and found.trained.config.std == (63.75, 127.5, 127.5)


@pytest.mark.parametrize("record, words", [
    ({"architecture": "resnetblur18"}, "holds a resnet18, but "),
    ({"pretrained_cfg": {"input_size": [1, 64, 64]}}, "does not support images of [1, 64, 64] (input_size)"),
    ({"pretrained_cfg": {"input_size": [3, 8, 8]}}, "its input_size 8 is not from 32 to 8192"),
    ({"pretrained_cfg": {"input_size": "large"}}, "its input_size 'large' is not from 32 to 8192: correct or"),
    ({"pretrained_cfg": {"input_size": [3, 10**30, 10**30]}}, "is not from 32 to 8192"),
    ({"pretrained_cfg": {"crop_pct": 1e-310}}, "its crop_pct 1e-310 is not from 0.1 to 1"),
    ({"pretrained_cfg": {"crop_pct": "all"}}, "its crop_pct 'all' is not from 0.1 to 1"),
    ({"pretrained_cfg": {"mean": [10**400, 0, 0]}}, "times 255 is not three numbers from 0 to 255"),
    ({"pretrained_cfg": {"mean": 0.5}}, "its mean 0.5 times 255 is not three numbers"),
    ({"pretrained_cfg": {"std": ["a", "b", "c"]}}, "its std ['a', 'b', 'c'] times 255 is not three numbers"),
    ({"pretrained_cfg": {}, "loss": "hinge"}, "its loss 'hinge' is not one of this program's (softmax, bce)"),
    ({"pretrained_cfg": {}, "architecture": ["resnet18"]}, "its architecture ['resnet18'] is not a name"),
    ({"pretrained_cfg": {}, "label_names": [[], {}]}, "its label_names are not a list of names"),
    ({"pretrained_cfg": {}, "label_names": ["a"], "label_descriptions": [1]}, "label_descriptions are not a dict"),
    ({"pretrained_cfg": {}, "label_names": ["a"], "label_descriptions": {"a": 1}}, "names to show for the label"),
    ({"pretrained_cfg": {"crop_pct": 1.5}}, "crop_pct 1.5"),
    ({"pretrained_cfg": {"interpolation": "lanczos"}}, "interpolation 'lanczos' is not one of this program's"),
    ({"pretrained_cfg": {"crop_mode": "squash"}}, "crop_mode 'squash' is not one of this program's"),
    ({"pretrained_cfg": {"mean": [0.5]}}, "its mean [0.5] times 255 is not three numbers"),
    ({"pretrained_cfg": {}, "model_args": {"norm_eps": 1e-3}}, "model_args {'norm_eps': 0.001} change the network"),
    ({"pretrained_cfg": {"std": [0, 1, 1]}}, "its std [0, 1, 1] times 255 is not three numbers"),
    ({"pretrained_cfg": {}, "label_names": ["a", "a", "b", "c", "d"]}, "a name twice"),
    ({"pretrained_cfg": {}, "label_names": list("abc")}, "has 5 classes, and the list of their names beside it 3"),
])
def test_records_that_cannot_be(record, words, state, tmp_path):
    written(tmp_path / "w.pth", state, **record)
    with pytest.raises(TrainError) as error:
        weights.read(str(tmp_path / "w.pth"))
    assert words in str(error.value) and str(tmp_path / "w.") in str(error.value) and "\n" not in str(error.value)


def test_a_record_that_is_no_json(state, tmp_path):
    written(tmp_path / "w.pth", state)
    for text in ("{", 100_000 * "["):
        (tmp_path / "w.json").write_text(text)
        with pytest.raises(TrainError, match=r"w\.json, which says how images are prepared .* is not JSON"):
            weights.read(str(tmp_path / "w.pth"))


def test_null_in_a_record_says_nothing(state, tmp_path):
    """As in timm's files."""
    place = written(tmp_path / "w.pth", state, pretrained_cfg=dict.fromkeys([*CFG, "color_order", "crop_mode"]))
    config = weights.read(place).trained.config
    assert (config.image_size, config.val_crop_fraction, config.mean, config.std) == (224, 0.875, MEAN, STD)


# --- classes ---


def test_classes_of_a_file_beside(state, tmp_path):
    place = written(tmp_path / "w.pth", state)
    (tmp_path / "classes.txt").write_text("n01440764\nb\tbee\nc\nd\ne\n")
    assert weights.read(place).trained.class_names == ["tench", "bee", "c", "d", "e"]
    (tmp_path / "classes.txt").write_text("a\nb\n")
    assert "has 5 classes, and the list of their names beside it 2: correct the list or remove it" in refused(place)


def test_a_thousand_classes_are_imagenets(state, tmp_path, rng):
    state |= {"fc.weight": rng.standard_normal((1000, 8 * WIDTH), np.float32), "fc.bias": np.zeros(1000, np.float32)}
    found = weights.read(written(tmp_path / "w.pth", state))
    assert found.trained.classes[:2] == [("n01440764", "tench"), ("n01443537", "goldfish")]
    assert "classes: 1,000 without names, taken for ImageNet's" in found.notes
    wanted = [("n01443537", "gold"), ("n01440764", "n01440764")]
    start, notes = weights.starting_point(found, wanted, Config(model="resnet18"))
    np.testing.assert_array_equal(start.params["classifier_weight"], state["fc.weight"][[1, 0]])
    assert notes[-1] == "fc.weight: 1,000 classes there, 2 here: its rows of these 2 classes, by their names"


def test_a_new_classifier(tmp_path, state):
    found = weights.read(written(tmp_path / "w.pth", state, pretrained_cfg={}, label_names=list("abcde")))
    for classes, note in (
        ("abcde", "5 classes there, 5 here: as it is"), ("edcba", "5 here: its rows of these 5 classes, by their"),
        ("ab", "2 here: its rows of these 2 classes"), ("abx", "3 here: a new classifier"),
        ("01234", "5 here: a new classifier"),
    ):
        start, notes = weights.starting_point(found, [(key, key) for key in classes], Config(model="resnet18", seed=7))
        assert notes[-1].startswith("fc.weight: ") and note in notes[-1]
        fresh, _ = models.create("resnet18", len(classes)).initial_values(seed=7)
        is_new = "new" in note
        assert np.array_equal(start.params["classifier_weight"], fresh["classifier_weight"]) == is_new
        if not is_new:
            rows = ["abcde".index(key) for key in classes]
            np.testing.assert_array_equal(start.params["classifier_bias"], state["fc.bias"][rows])


def test_imagenets_classes():
    classes = imagenet.classes()
    ids, words = zip(*classes, strict=True)
    assert len(classes) == 1000 and list(ids) == sorted(ids) and len(set(words)) == 1000
    assert all(re.fullmatch(r"n\d{8}", key) for key in ids)
    assert dict(classes)["n04553703"] == "washbasin"
    assert imagenet.in_words([("n04553703", "n04553703"), ("n04553703", "sink"), ("x", "x")]) == [
        ("n04553703", "washbasin"), ("n04553703", "sink"), ("x", "x")]


def test_imagenets_words_are_those_of_its_file_names(real_data):
    """The sample's files have names such as n04553703_washbasin.JPEG; two words there each stand for two classes."""
    words = dict(imagenet.classes())
    found = sorted((real_data / "imagenet_sample").glob("n*/*.JPEG"))
    if not found:
        pytest.skip("no JPEG in imagenet_sample")
    differing = {file.parent.name for file in found
                 if file.stem.partition("_")[2].replace("_", " ").lower() != words[file.parent.name].lower()}
    assert differing <= {"n02012849", "n03710721"}  # crane bird, maillot tank suit
