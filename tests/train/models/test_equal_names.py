"""Networks from two files of equal name in one process: each answer is that of the file, run or object asked for."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import resnet_mxnet as rm
from common import plugins
from common.errors import UserError
from common.mxnet_compat import mx

CLASSES, SIZE = 3, 32
FOLDERS = {"a": "relu", "b": "sigmoid"}  # of networks with equal arrays and different activations
OPTIONS = {"image_size": SIZE, "batch_size": 4, "seed": 0, "device": "cpu", "num_threads": 1, "tensorboard": False}


def symbol(act_type: str) -> Any:
    x = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=8, kernel=(3, 3), name="c1")
    x = mx.sym.Pooling(mx.sym.Activation(x, act_type=act_type), global_pool=True, kernel=(1, 1), pool_type="avg")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=CLASSES, name="fc"), name="softmax")


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory, seed: int) -> dict[str, Path]:
    """Folder -> net-0003.params, beside net-symbol.json. Both have the same arrays."""
    folder, rng = tmp_path_factory.mktemp("networks"), np.random.default_rng(seed)
    shapes, _, _ = symbol("relu").infer_shape(data=(1, 3, SIZE, SIZE))
    params = {name: mx.nd.array(rng.standard_normal(shape)) for name, shape in
              zip(symbol("relu").list_arguments(), shapes, strict=True) if name not in ("data", "softmax_label")}
    for name, act_type in FOLDERS.items():
        (folder / name).mkdir()
        mx.model.save_checkpoint(str(folder / name / "net"), 3, symbol(act_type), params, {})
    return {name: folder / name / "net-0003.params" for name in FOLDERS}


@pytest.fixture(scope="module")
def runs(networks: dict[str, Path], tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder -> a run of one step from its network, trained as in a process of its own."""
    folder = tmp_path_factory.mktemp("runs")
    for name, weights in networks.items():
        with plugins.forgotten():
            rm.train(model=weights.with_name("net-symbol.json"), weights=weights, data=tiny_data, max_steps=1,
                     output=folder / name, **OPTIONS)
    return {name: folder / name for name in networks}


@pytest.fixture
def images(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (2, SIZE, SIZE, 3), np.uint8)


def scores(network: Any, images: np.ndarray) -> np.ndarray:
    return np.array([[guess.probability for guess in sorted(each.guesses, key=lambda guess: guess.index)]
                     for each in network.predict(images, top=CLASSES)])


def alone(ask: Callable[[Path], Any], places: dict[str, Path]) -> dict[str, Any]:
    """What each network answers in a process of its own."""
    found = {}
    for name, place in places.items():
        with plugins.forgotten():
            found[name] = ask(place)
    return found


def confused(networks: dict[str, Path], runs: dict[str, Path]) -> None:
    """The network of a has been loaded and named by earlier calls."""
    rm.load(runs["a"])
    rm.load(networks["a"])
    rm.create_model(str(networks["a"].with_name("net-symbol.json")))


def exported(place: Path) -> np.ndarray:
    """The scores of the exported network for fixed images."""
    onnxruntime = pytest.importorskip("onnxruntime")
    file = place.parent / "exported.onnx"
    rm.load(place).export_onnx(file, overwrite=True)
    images = np.random.default_rng(0).standard_normal((2, 3, SIZE, SIZE), np.float32)
    (found,) = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"data": images})
    return np.asarray(found)


ASKED: dict[str, Callable[[Path], Any]] = {
    "validate": lambda place: rm.load(place).validate(device="cpu").loss,
    "embed": lambda place: rm.load(place).embed(np.full((SIZE, SIZE, 3), 90, np.uint8)),
    "export": exported,
    "quantize": lambda place: scores(rm.load(place).quantize(images=16, overwrite=True),
                                     np.full((1, SIZE, SIZE, 3), 90, np.uint8)),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_run_is_computed_with_its_own_network(asked: str, networks: dict[str, Path], runs: dict[str, Path]) -> None:
    wanted = alone(ASKED[asked], runs)
    assert np.abs(np.subtract(wanted["a"], wanted["b"])).max() > 1e-3
    confused(networks, runs)
    for name, place in runs.items():
        np.testing.assert_array_equal(ASKED[asked](place), wanted[name])


def test_loaded_networks_stay_what_they_are(networks: dict[str, Path], runs: dict[str, Path], images: np.ndarray
                                            ) -> None:
    """Executors are made at the first prediction, when others have taken the name."""
    places = {f"{kind} {name}": place for kind, found in (("run", runs), ("file", networks)) for name, place in
              found.items()}
    wanted = alone(lambda place: scores(rm.load(place), images), places)
    loaded = {name: rm.load(place) for name, place in places.items()}
    for name, network in loaded.items():
        np.testing.assert_array_equal(scores(network, images), wanted[name], err_msg=name)


def test_several_threads(networks: dict[str, Path], images: np.ndarray) -> None:
    wanted = alone(lambda place: scores(rm.load(place), images), networks)
    found: dict[str, list[np.ndarray]] = {name: [] for name in networks}

    def ask(name: str) -> None:
        for _ in range(4):
            found[name].append(scores(rm.load(networks[name]), images))

    threads = [threading.Thread(target=ask, args=(name,)) for name in networks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, each in found.items():
        np.testing.assert_array_equal(each, [wanted[name]] * 4)


def test_a_resumed_run_goes_on_with_its_own_network(networks: dict[str, Path], runs: dict[str, Path], tmp_path: Path,
                                                    images: np.ndarray) -> None:
    def resumed(place: Path) -> np.ndarray:
        rm.train(resume=place, max_steps=2)
        return scores(rm.load(place), images)

    places = {name: Path(shutil.copytree(runs["b"], tmp_path / name)) for name in ("alone", "later")}
    wanted = alone(resumed, {"b": places["alone"]})["b"]
    confused(networks, runs)
    np.testing.assert_array_equal(resumed(places["later"]), wanted)


def test_a_file_that_is_overwritten(networks: dict[str, Path], images: np.ndarray, tmp_path: Path) -> None:
    wanted = alone(lambda place: scores(rm.load(place), images), networks)
    for name in ("a", "b", "a"):
        for file in networks[name].parent.glob("net-*"):
            shutil.copy(file, tmp_path)
        np.testing.assert_array_equal(scores(rm.load(tmp_path / "net-0003.params"), images), wanted[name])
        network = rm.create_model(str(tmp_path / "net-symbol.json"), CLASSES)
        assert FOLDERS[name] in [node.get("act_type") for node in network.graph]


def test_a_run_has_one_file_of_a_name(networks: dict[str, Path], tiny_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    files = {}
    for name, weights in networks.items():
        files[name] = tmp_path / name / "net.onnx"
        files[name].parent.mkdir()
        rm.load(weights).export_onnx(files[name])
    with pytest.raises(UserError, match=f"the network files {files['a']} and {files['b']} have the same name, but"):
        rm.train(model=files["a"], weights=files["b"], data=tiny_data, max_steps=1, output=tmp_path / "run", **OPTIONS)
    shutil.copy(files["a"], files["b"])  # with the same content it is the same network
    rm.train(model=files["a"], weights=files["b"], data=tiny_data, max_steps=1, output=tmp_path / "run", **OPTIONS)


MODEL = """
    from common.mxnet_compat import mx
    from train.plugins import loss, model

    @model
    def small(num_classes):
        x = mx.sym.Activation(mx.sym.Variable("data"), act_type="{}")
        x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout="NHWC")
        return mx.sym.FullyConnected(x, num_hidden=num_classes, name="fc")

    @loss("mine", probabilities="{}")
    def mine(scores, targets):
        return -mx.sym.sum(targets * mx.sym.log_softmax(scores), axis=1)
"""


@pytest.mark.parametrize("files", [("one.py", "two.py"), ("one/my.py", "two/my.py")])
def test_plugins_with_equal_names(files: tuple[str, str], plugin: Callable[..., Path], tiny_data: Path, tmp_path: Path,
                                  images: np.ndarray) -> None:
    """Plug-ins with networks, and plug-ins with losses, which say how scores become probabilities."""
    runs = {}
    for file, (act_type, probabilities) in zip(files, (("relu", "softmax"), ("tanh", "sigmoid")), strict=True):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        path, runs[file] = plugin(MODEL.format(act_type, probabilities), file), tmp_path / "runs" / file
        with plugins.forgotten():
            rm.train(model="small", loss="mine", plugin=path, data=tiny_data, max_steps=1, output=runs[file], **OPTIONS)
    wanted = alone(lambda place: scores(rm.load(place), images), runs)
    sums = [each.sum(axis=1) for each in wanted.values()]
    assert np.allclose(sums[0], 1) and np.abs(sums[1] - 1).max() > 1e-3
    loaded = {file: rm.load(place) for file, place in runs.items()}
    for file, network in loaded.items():
        np.testing.assert_array_equal(scores(network, images), wanted[file])
        assert network.validate(device="cpu").num_images == 27
