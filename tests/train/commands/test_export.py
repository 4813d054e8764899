"""Exported files give the results of our executor in ONNX Runtime and in stock MXNet."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.errors import UserError
from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, onnx_writer
from graph_passes.executors import create_executor
from train import models
from train.checkpoint import Checkpoint, save
from train.command_line import read
from train.commands import export, predict
from train.config import Config
from train.errors import TrainError
from train.models.network import init_params
from train.models.resnet import resnet
from train.options.commands import ExportOptions, PredictOptions

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

PAGE = Path(__file__).resolve().parents[3] / "docs" / "inference.md"
NUM_CLASSES, SIZE = 7, 40
CLASS_NAMES = ["ant", "bee", "cat", "dog", "eel", "fox", "été"]


def probabilities(params: dict[str, np.ndarray], aux: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """The probabilities of our executor."""
    graph = Graph.from_json(resnet(18, NUM_CLASSES).tojson())
    executor = create_executor("mxnet", graph, {"data": images.shape, "softmax_label": images.shape[:1]}, "cpu(0)")
    executor.set_params(params, aux)
    return executor.forward(mx.nd.array(images)).asnumpy()


def run_export(arguments: list[str]) -> None:
    export.main(read(ExportOptions, arguments, command="export"))


@pytest.fixture(scope="module")
def trained(seed: int) -> Checkpoint:
    """A ResNet-18 whose BatchNorms are not the identity, and whose probabilities are neither equal nor all 0 or 1."""
    rng = np.random.default_rng(seed)
    params, aux = init_params(resnet(18, NUM_CLASSES), seed=seed)
    for name, array in params.items():
        if name.endswith(("_gamma", "_beta", "_bias")):
            low = 0.5 if name.endswith("_gamma") else -0.5
            params[name] = rng.uniform(low, low + 1, array.shape).astype(np.float32)
    for name, array in aux.items():
        low = 0.5 if name.endswith("_var") else -0.5
        aux[name] = rng.uniform(low, low + 1, array.shape).astype(np.float32)
    noise = rng.standard_normal((4, SIZE, SIZE, 3), dtype=np.float32)
    params["classifier_bias"][:] = 0
    spread = np.log(probabilities(params, aux, noise)).std()
    params["classifier_weight"] *= 1.5 / spread
    params["classifier_bias"][:] = rng.uniform(-0.5, 0.5, NUM_CLASSES)
    config = Config(model="resnet18", image_size=SIZE - 8, val_image_size=SIZE, val_crop_fraction=0.8)
    return Checkpoint(params=params, aux=aux, state={}, config=config, class_names=CLASS_NAMES)


@pytest.fixture(scope="module")
def saved(trained: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "checkpoints" / "best.npz"
    save(trained, path)
    return path


@pytest.fixture(scope="module")
def images(seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 1]).standard_normal((5, SIZE, SIZE, 3), dtype=np.float32)


@pytest.fixture(scope="module")
def ours(trained: Checkpoint, images: np.ndarray) -> np.ndarray:
    found = probabilities(trained.params, trained.aux, images)
    assert np.ptp(found, axis=1).min() > 0.1  # otherwise the comparisons below could not fail
    return found


@pytest.mark.long(but=["resnet50_v2"])
@pytest.mark.parametrize("name", ["resnext50_32x4d", "resnet50d", "resnet50_v2"])
def test_onnx_of_other_families(name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Grouped convolutions, average pooling whose windows reach beyond images of an odd size, and BatchNorms without a
    convolution before them. `export_onnx` itself compares with our executor."""
    monkeypatch.setattr("train.models.resnet.FIRST_WIDTH", 8)
    params, aux = models.create(name, NUM_CLASSES).initial_values(seed=3, zero_init_residual=False)
    params["classifier_weight"] = rng.standard_normal(params["classifier_weight"].shape, np.float32)
    aux = {key: value + rng.uniform(0, 0.5, value.shape).astype(np.float32) for key, value in aux.items()}
    config = Config(model=name, image_size=39)
    trained = Checkpoint(params=params, aux=aux, state={}, config=config, class_names=CLASS_NAMES)
    features, of_features = export.export_features(trained)
    assert of_features <= 1e-5 and "Gemm" not in {node.op_type for node in onnx.load_from_string(features).graph.node}
    content, difference = export.export_onnx(trained)
    kinds = {node.op_type for node in onnx.load_from_string(content).graph.node}
    assert difference <= 1e-5 and ("AveragePool" in kinds) == (name == "resnet50d")
    assert ("BatchNormalization" in kinds) == (name == "resnet50_v2")


@pytest.mark.long
def test_onnx_of_the_command(
    saved: Path, images: np.ndarray, ours: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "network.onnx"
    run_export(["--checkpoint", str(saved.parent.parent), "--onnx", str(file)])
    printed = capsys.readouterr().out
    assert f"input data float32 (N, 3, {SIZE}, {SIZE})" in printed and "largest difference" in printed
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert "BatchNormalization" not in {node.op_type for node in model.graph.node}  # folded
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for count in (1, 5):  # any batch size
        (theirs,) = session.run(["probabilities"], {"data": images[:count].transpose(0, 3, 1, 2)})
        # fp32 with another order of summation: 1e-5 is 50 times the largest difference seen
        np.testing.assert_allclose(theirs, ours[:count], atol=1e-5)
    meta = session.get_modelmeta().custom_metadata_map
    assert json.loads(meta["class_names"]) == CLASS_NAMES
    assert json.loads(meta["mean"]) == [123.675, 116.28, 103.53]
    assert (meta["resize_shorter"], meta["center_crop"]) == ("50", "40")
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.long
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(61, 84), (93, 55), (71, 71)])  # two images whose longer side and offset round up
def test_the_lines_of_the_page_predict_the_same(
    trained: Checkpoint, size: tuple[int, int], interpolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], rng: np.random.Generator,
) -> None:
    """A lossless picture, so that decoders do not differ. Its levels are moderate, so that bicubic interpolation does
    not leave 0 to 255, where Pillow clips between its two passes: only the rounding of its pixels remains."""
    monkeypatch.chdir(tmp_path)
    coarse = Image.fromarray(rng.integers(64, 192, (size[1] // 6, size[0] // 6, 3), np.uint8))
    coarse.resize(size, Image.Resampling.BICUBIC).save("cat.jpg", "PNG")
    saved = tmp_path / "network.npz"
    save(replace(trained, config=replace(trained.config, interpolation=interpolation)), saved)
    (ours,) = predict.predict(PredictOptions(images=(Path("cat.jpg"),), checkpoint=str(saved)))
    run_export(["--checkpoint", str(saved), "--onnx", "model.onnx"])
    capsys.readouterr()
    names: dict[str, Any] = {}
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(lines, names)
    printed = dict(reversed(line.split("%  ")) for line in capsys.readouterr().out.splitlines())
    # Pillow rounds to whole levels between its two passes, DALI does not.
    assert np.abs(names["pixels"].astype(int) - ours.picture).max() <= 1
    theirs = dict(zip(CLASS_NAMES, names["probabilities"][0], strict=True))
    for guess in ours.guesses:
        assert theirs[guess.name] == pytest.approx(guess.probability, abs=0.03)  # 0.003 was the largest seen
    best = sorted(theirs, key=lambda name: -theirs[name])[:5]
    assert printed == {name: f"{100 * theirs[name]:5.1f}" for name in best}


@pytest.mark.long
def test_a_network_of_binary_cross_entropy(trained: Checkpoint, images: np.ndarray, tmp_path: Path) -> None:
    """Exports give sigmoids like predictions, and so do files that are read back. The order of the classes is that of
    the scores."""
    scores = np.log(probabilities(trained.params, trained.aux, images))  # except for a constant per image
    bce = replace(trained, config=replace(trained.config, loss="bce", bce_threshold=0.2))
    save(bce, tmp_path / "run" / "checkpoints" / "best.npz")
    run, prefix = str(tmp_path / "run"), tmp_path / "network"
    run_export(["--checkpoint", run, "--onnx", f"{prefix}.onnx", "--torchvision", str(tmp_path / "torch.safetensors"),
                "--symbol", f"{prefix}-symbol.json", "--params", f"{prefix}-0000.params", "--layout", "NCHW"])
    images_nchw = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    session = onnxruntime.InferenceSession(f"{prefix}.onnx", providers=["CPUExecutionProvider"])
    (answers,) = session.run(None, {"data": images_nchw})
    logits = np.log(answers / (1 - answers))
    np.testing.assert_allclose(logits - logits[:, :1], scores - scores[:, :1], atol=1e-3)
    assert np.abs(answers.sum(axis=1) - 1).max() > 0.01
    symbol, params, aux = mx.model.load_checkpoint(str(prefix), 0)
    executor = symbol.simple_bind(mx.cpu(), data=images_nchw.shape, grad_req="null")
    executor.copy_params_from(params, aux)
    stock = executor.forward(is_train=False, data=mx.nd.array(images_nchw))[0].asnumpy()
    np.testing.assert_allclose(stock, answers, atol=1e-5)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)).save(tmp_path / "a.png")
    found = [predict.predict(PredictOptions(images=(tmp_path / "a.png",), checkpoint=place, top=NUM_CLASSES))[0].guesses
             for place in (run, f"{prefix}.onnx", str(tmp_path / "torch.safetensors"))]
    for guesses in found[1:]:
        assert [guess.name for guess in guesses] == [guess.name for guess in found[0]]
        assert [guess.probability for guess in guesses] == pytest.approx([guess.probability for guess in found[0]],
                                                                         abs=1e-4)


@pytest.mark.long
def test_a_wrong_model_is_not_written(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> onnx.ModelProto:
        model = right(*arguments)
        bias = next(tensor for tensor in model.graph.initializer if tensor.name == "classifier_bias")
        wrong_bias = onnx.numpy_helper.to_array(bias) + np.arange(NUM_CLASSES, dtype=np.float32) / 100
        bias.CopyFrom(onnx.numpy_helper.from_array(wrong_bias, bias.name))
        return model

    right = onnx_writer.to_onnx
    monkeypatch.setattr(onnx_writer, "to_onnx", wrong)
    with pytest.raises(TrainError, match="differ from this program's by"):
        run_export(["--checkpoint", str(saved), "--onnx", str(tmp_path / "network.onnx")])
    assert not list(tmp_path.iterdir())


@pytest.mark.long(but=["mobilenet*"])
@pytest.mark.parametrize("name", ["resnet18_v1", "resnet18_v2", "mobilenet0.25"])
def test_onnx_of_graphs_from_the_model_zoo(name: str, rng: np.random.Generator) -> None:
    network = mx.gluon.model_zoo.vision.get_model(name, classes=5)
    network.initialize(mx.init.Xavier(magnitude=8))
    data = rng.standard_normal((2, 3, 64, 96), dtype=np.float32)  # not square
    want = mx.nd.softmax(network(mx.nd.array(data))).asnumpy()
    symbol = mx.sym.softmax(network(mx.sym.Variable("data")))
    arrays = {key: value.data().asnumpy() for key, value in network.collect_params().items()}
    model = onnx_writer.to_onnx(Graph.from_json(symbol.tojson()), arrays, data.shape[1:])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"data": data})[0], want, atol=1e-4)  # deep, random, unscaled weights


def test_an_operator_without_onnx_form_is_named() -> None:
    symbol = mx.sym.softmax(mx.sym.Dropout(mx.sym.Variable("data"), name="drop"))
    with pytest.raises(GraphError, match="operator Dropout of node 'drop' has no ONNX form"):
        onnx_writer.to_onnx(Graph.from_json(symbol.tojson()), {}, (3, 8, 8))
    symbol = mx.sym.softmax(mx.sym.LayerNorm(mx.sym.Variable("data"), mx.sym.Variable("gamma"), mx.sym.Variable("beta"),
                                             axis=2, name="rows"))
    with pytest.raises(GraphError, match="the parameter 'gamma' is missing|'rows' has axis=2"):
        onnx_writer.to_onnx(Graph.from_json(symbol.tojson()), {}, (3, 8, 8))


def test_stock_mxnet_reads_symbol_and_params(saved: Path, images: np.ndarray, ours: np.ndarray, tmp_path: Path) -> None:
    prefix = tmp_path / "network"
    files = ["--symbol", f"{prefix}-symbol.json", "--params", f"{prefix}-0000.params"]
    run_export(["--checkpoint", str(saved), "--layout", "NCHW", *files])
    symbol, params, aux = mx.model.load_checkpoint(str(prefix), 0)
    executor = symbol.simple_bind(mx.cpu(), data=(5, 3, SIZE, SIZE), grad_req="null")
    executor.copy_params_from(params, aux)
    images_nchw = mx.nd.array(images.transpose(0, 3, 1, 2))
    theirs = executor.forward(is_train=False, data=images_nchw)[0].asnumpy()
    np.testing.assert_allclose(theirs, ours, atol=1e-5)


def test_canonical_params_and_symbol(saved: Path, trained: Checkpoint, tmp_path: Path) -> None:
    files = ["--symbol", str(tmp_path / "s.json"), "--params", str(tmp_path / "p.params")]
    run_export(["--checkpoint", str(saved), *files])
    arrays = mx.nd.load(str(tmp_path / "p.params"))
    assert arrays.keys() == {f"arg:{name}" for name in trained.params} | {f"aux:{name}" for name in trained.aux}
    for name, value in trained.params.items():
        np.testing.assert_array_equal(arrays[f"arg:{name}"].asnumpy(), value)
    assert Graph.load(tmp_path / "s.json") == Graph.from_json(resnet(18, NUM_CLASSES).tojson())


def test_symbol_without_a_checkpoint(tmp_path: Path) -> None:
    run_export(["--symbol", str(tmp_path / "s.json"), "--model", "resnet34", "--num-classes", "12"])
    graph = Graph.load(tmp_path / "s.json")
    assert graph.operators()["Convolution"] == 36
    assert graph["classifier"]["num_hidden"] == 12


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "nothing to export"),
        (["--onnx", "x.onnx"], "--onnx needs trained weights"),
        (["--params", "x.params"], "--params needs trained weights"),
        (["--onnx", "x.onnx", "--checkpoint", "nowhere"], "nowhere"),
        (["--symbol", "x.json", "--num-classes", "0"], "--num-classes 0"),
        (["--symbol", "x.json", "--model", "resnet20"], "there is no model 'resnet20'; did you mean resnet50?"),
        (["--symbol", "x.json", "--checkpoint", "run", "--model", "resnet34"], "--model resnet34 is for --symbol"),
        (["--onnx", "x", "--params", "./x", "--checkpoint", "run"], "--params ./x is also a file that --onnx"),
        (["--symbol", "x", "--params", "x", "--checkpoint", "run"], "--params x is also a file that --symbol"),
        (["--onxx", "x.onnx"], "did you mean --onnx"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        run_export(arguments)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_missing_onnx_is_one_sentence(trained: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(TrainError, match="--onnx needs onnxruntime: run make setup, or pip install"):
        export.export_onnx(trained)


def test_unwritable_place_is_one_sentence(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        run_export(["--checkpoint", str(saved), "--symbol", str(tmp_path / "file" / "s.json")])


