"""Networks from MXNet's files: the same function as in MXNet, trained and used by the command line, and what is
refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import resnet_mxnet as rm
from common import plugins
from common.errors import UserError
from common.mxnet_compat import mx
from graph_passes.executors import create_executor
from train import models, weights
from train.models import network_file

CLASSES, SIZE = 4, 40
Run = Callable[..., tuple[int, str, str]]


def forget() -> None:
    """As in another process."""
    plugins._loaded.clear()
    plugins._told.clear()
    for key in [key for key, each in plugins._registered.items() if each.record]:
        del plugins._registered[key]


def module(layout: str = "NCHW", pooling: str = "global") -> Any:
    """A network as programs for Module have them, with its loss."""
    axis = layout.index("C")
    data = mx.sym.Variable("data")
    x = mx.sym.Convolution(data, num_filter=8, kernel=(3, 3), stride=(2, 2), layout=layout, name="c1")
    x = mx.sym.BatchNorm(x, axis=axis, name="bn1")  # whose gamma is 1, and whose epsilon is 1e-3
    x = mx.sym.LeakyReLU(x, act_type="leaky", slope=0.1)
    branches = [mx.sym.Convolution(x, num_filter=6, kernel=(size, size), pad=(size // 2, size // 2), layout=layout,
                                   no_bias=True) for size in (1, 3)]
    x = mx.sym.Concat(*branches, dim=axis)
    if pooling == "global":
        x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout=layout)
    x = mx.sym.Dropout(mx.sym.Reshape(x, shape=(0, -1)), p=0.3)
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=CLASSES, name="fc"), name="softmax")


def saved(symbol: Any, folder: Path, rng: np.random.Generator, shape: tuple[int, ...]) -> Path:
    """The files of the network with random values, as Module.save_checkpoint writes them: the one with the arrays."""
    shapes, _, aux_shapes = symbol.infer_shape(data=shape)
    params, aux = ({name: mx.nd.array(rng.uniform(0.5, 1.5, size) if len(size) == 1 else rng.standard_normal(size) / 3)
                    for name, size in zip(names, sizes, strict=True) if name not in ("data", "softmax_label")}
                   for names, sizes in ((symbol.list_arguments(), shapes),
                                        (symbol.list_auxiliary_states(), aux_shapes)))
    mx.model.save_checkpoint(str(folder / "net"), 3, symbol, params, aux)
    return folder / "net-0003.params"


def swapped_colours(data: Any) -> Any:
    return mx.sym.Concat(*(mx.sym.slice_axis(data, axis=1, begin=place, end=place + 1) for place in (2, 1, 0)), dim=1)


@pytest.mark.parametrize("first", [mx.sym.Flatten, lambda data: data, swapped_colours, lambda data: data * 2 - 0.3,
                                   lambda data: mx.sym.mean(data, axis=3)])
@pytest.mark.parametrize("has_convolution", [False, True])
def test_operators_that_read_images_read_them_in_nchw(first: Callable[[Any], Any], has_convolution: bool,
                                                      tmp_path: Path, rng: np.random.Generator) -> None:
    images = rng.standard_normal((2, SIZE, SIZE, 3), np.float32)
    data = mx.sym.Variable("data")
    x = first(mx.sym.Convolution(data, num_filter=3, kernel=(1, 1), name="c") if has_convolution else data)
    file = saved(mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=CLASSES, name="fc"), name="softmax"),
                 tmp_path, rng, (1, 3, SIZE, SIZE))
    found = weights.read(str(file))
    computes = create_executor("mxnet", models.create("net-symbol.json", CLASSES, images=SIZE).graph,
                               {"data": images.shape, "softmax_label": (2,)})
    computes.set_params(found.trained.params, found.trained.aux)
    np.testing.assert_allclose(computes.forward(mx.nd.array(images)).asnumpy(),
                               by_mxnet(file, images.transpose(0, 3, 1, 2)), atol=1e-5)


def by_mxnet(file: Path, images: np.ndarray) -> np.ndarray:
    symbol, params, aux = mx.model.load_checkpoint(str(file).removesuffix("-0003.params"), 3)
    bound = symbol.simple_bind(mx.cpu(), data=images.shape, grad_req="null")
    bound.copy_params_from(params, aux, allow_extra_params=True)
    return bound.forward(is_train=False, data=mx.nd.array(images))[0].asnumpy()


@pytest.mark.parametrize("pooling", ["global", "none"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_it_computes_what_mxnet_computes(layout: str, pooling: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Arrays of one size of images tell that size."""
    images = rng.standard_normal((2, SIZE, SIZE, 3), np.float32)
    theirs = images.transpose(0, 3, 1, 2) if layout == "NCHW" else images
    if layout == "NHWC":  # MXNet's CPU convolution knows no NHWC: its own network in NCHW has the same values
        symbol = module("NHWC", pooling)
        file = saved(symbol, tmp_path, rng, (1, SIZE, SIZE, 3))
    else:
        file = saved(module("NCHW", pooling), tmp_path, rng, (1, 3, SIZE, SIZE))
    found = weights.read(str(file))
    assert (found.trained.config.model, found.num_classes) == ("net-symbol.json", CLASSES)
    assert found.trained.config.image_size == (224 if pooling == "global" else SIZE - 1)  # 39 and 40 have equal maps
    graph = models.create("net-symbol.json", CLASSES).graph
    executor = create_executor("mxnet", graph, {"data": images.shape, "softmax_label": (2,)})
    executor.set_params(found.trained.params, found.trained.aux)
    ours = executor.forward(mx.nd.array(images)).asnumpy()
    assert np.ptp(ours) > 1e-3
    if layout == "NCHW":  # the same operators in the same layout: only rounding of BatchNorm's own order may differ
        np.testing.assert_allclose(ours, by_mxnet(file, np.ascontiguousarray(theirs)), atol=1e-5)


def test_the_whole_way(run_train: Run, tiny_options: list[str], tiny_data: Path, tmp_path: Path,
                       rng: np.random.Generator) -> None:
    """Trained from files with other classes, resumed, validated, used, exported and read again."""
    file = saved(module(), tmp_path, rng, (1, 3, SIZE, SIZE))
    symbol, run = tmp_path / "net-symbol.json", tmp_path / "run"
    at = tiny_options.index("--model")
    options = [*tiny_options[:at], *tiny_options[at + 2 :]]
    first = ["--model", symbol, "--weights", file, *options, "--output", run, "--max-steps", "4"]
    commands: list[tuple[list[object], str]] = [
        (first, f"weights: net-symbol.json of {file}, 10 arrays"),
        (["--resume", run, "--max-steps", "5"], "stopped after step 5"),
        (["validate", "--checkpoint", run], "top-1"),
        (["predict", "--checkpoint", run, next(tiny_data.glob("*/*.jpg"))], f"network file {symbol}, as {run}"),
        (["embed", "--checkpoint", run, tiny_data / "class0", "--output", tmp_path / "f.npy"], "float32 (9, 12)"),
        (["export", "--checkpoint", run, "--onnx", tmp_path / "w.onnx", "--params", tmp_path / "new-0000.params",
          "--symbol", tmp_path / "new-symbol.json", "--layout", "NCHW"], "largest difference"),
        (["predict", "--checkpoint", tmp_path / "w.onnx", "--device", "cpu", tiny_data / "class0"], "class0"),
        (["predict", "--checkpoint", file, "--device", "cpu", tiny_data / "class0"], "net-symbol.json of"),
    ]
    for arguments, said in commands:
        forget()
        code, out, err = run_train(*arguments)
        assert code == 0 and said in out + err, f"{arguments}\n{out}\n{err}"
    (record,) = json.loads((run / "config.json").read_text())["plugin"]
    assert record.startswith(f"{symbol}#sha256=")
    forget()
    trained = weights.load(str(run), quiet=True)
    again = weights.read(str(tmp_path / "new-0000.params")).trained
    for name, array in again.params.items():
        np.testing.assert_array_equal(array, trained.params[name], err_msg=name)


def test_a_file_that_has_gone(run_train: Run, tiny_options: list[str], tmp_path: Path, rng: np.random.Generator
                              ) -> None:
    """The run has a copy of the file; if the copy is missing too, the message names the file. Data, unlike code, need
    not be trusted by the user.
    """
    saved(module(), tmp_path, rng, (1, 3, SIZE, SIZE))
    symbol, run = tmp_path / "net-symbol.json", tmp_path / "run"
    at = tiny_options.index("--model")
    options = [*tiny_options[: at + 1], symbol, *tiny_options[at + 2 :]]
    assert run_train(*options, "--output", run, "--max-steps", "1")[0] == 0
    symbol.rename(moved := tmp_path / "sub.json")
    forget()
    code, _, err = run_train("validate", "--checkpoint", run)
    assert code == 0 and re.search(r"network file \S+/plugins/\w+/net-symbol.json, as .* is missing", err)
    (copy,) = (run / "plugins").glob("*/*.json")
    copy.unlink()
    forget()
    code, _, err = run_train("validate", "--checkpoint", run)
    assert code == 2 and f"needs the network file {symbol}, which is not there: give its new path with --plugin" in err
    (tmp_path / "elsewhere").mkdir()
    moved.rename(tmp_path / "elsewhere" / "net-symbol.json")
    forget()
    assert run_train("validate", "--checkpoint", run, "--plugin", tmp_path / "elsewhere" / "net-symbol.json")[0] == 0


def of_json(symbol: Any) -> network_file.NetworkOfFile:
    return network_file.read_json("net.json", symbol.tojson().encode())


def test_gluons_hints_and_ends() -> None:
    """A size that the data say; Gluon's export, which ends in scores; an identity; a convolution as classifier."""
    data = mx.sym.Variable("data", shape=(0, 3, 96, 96))
    x = mx.sym.identity(mx.sym.Convolution(data, num_filter=5, kernel=(1, 1), name="last"))
    made = of_json(mx.sym.Flatten(mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg")))
    assert (made.image_size, made.classifier.name, "_copy" in made.graph.operators()) == (96, "last", False)
    assert made(9)["last"]["num_filter"] == 9 and made.graph["data"].attrs == {}
    assert of_json(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5)).image_size == 0


def test_by_the_library(tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text(module().tojson())
    network = rm.create_model(str(tmp_path / "net.json"), 6)
    assert str(network) == "net.json with 6 classes" and network.shapes()[0]["fc_weight"] == (6, 12)


def test_a_shape_that_is_none(tmp_path: Path) -> None:
    text = module().tojson().replace('"name": "data",', '"name": "data", "attrs": {"__shape__": "big"},')
    (tmp_path / "net.json").write_text(text)
    with pytest.raises(UserError, match="net.json has an invalid __shape__ for its data"):
        plugins.load([str(tmp_path / "net.json")])


def scores(network: Any, images: np.ndarray) -> list[list[float]]:
    return [[guess.probability for guess in sorted(each.guesses, key=lambda guess: guess.index)]
            for each in network.predict(images, top=CLASSES)]


def test_the_network_of_one_file_is_none_of_another(tmp_path: Path, rng: np.random.Generator) -> None:
    """Two networks have equal arrays. The second file lacks its network, which only the first one has."""
    def network(act_type: str) -> Any:
        x = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=8, kernel=(3, 3), name="c1")
        x = mx.sym.Pooling(mx.sym.Activation(x, act_type=act_type), global_pool=True, kernel=(1, 1), pool_type="avg")
        return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=CLASSES, name="fc"), name="softmax")

    for name, act_type in (("one", "relu"), ("two", "sigmoid")):
        (tmp_path / name).mkdir()
        file = saved(network(act_type), tmp_path / name, rng, (1, 3, SIZE, SIZE))
        for each in (file, file.with_name("net-symbol.json")):
            each.rename(each.with_name(each.name.replace("net", name)))
    assert weights.read(str(tmp_path / "one/one-0003.params")).trained.config.model == "one-symbol.json"
    assert weights.read(str(tmp_path / "two/two-0003.params")).trained.config.model == "two-symbol.json"
    images = rng.integers(0, 256, (2, SIZE, SIZE, 3), np.uint8)
    places = [str(tmp_path / f"{folder}/{folder}-0003.params") for folder in ("one", "two")]
    alone = [scores(rm.load(place), images) for place in places]
    for folder in ("one", "two"):  # equal names: each loaded network stays what it was
        for each in (tmp_path / folder).iterdir():
            each.rename(each.with_name(each.name.replace(folder, "net", 1)))
    loaded = [rm.load(str(tmp_path / f"{folder}/net-0003.params")) for folder in ("one", "two")]
    np.testing.assert_array_equal([scores(each, images) for each in loaded], alone)
    for each in (tmp_path / "two").iterdir():
        each.rename(each.with_name(each.name.replace("net", "two", 1)))
    (tmp_path / "two/two-symbol.json").unlink()
    with pytest.raises(UserError, match="put its own network beside it, as two-symbol.json"):
        weights.read(str(tmp_path / "two/two-0003.params"))


DATA = "mx.sym.Variable('data')"
WRONG = {
    f"mx.sym.FullyConnected(mx.sym.LRN({DATA}, nsize=5, name='norm'), num_hidden=3)":
        "has the operator LRN (norm), which this program does not know: make it of Activation, ",
    f"(lambda x: mx.sym.Group([mx.sym.FullyConnected(x, num_hidden=3, name='f'), x]))({DATA})":
        "has 2 outputs: let it have one, the classes' scores",
    f"mx.sym.Convolution({DATA}, num_filter=3, kernel=(1, 1), name='c')": "ends in Convolution (c): let it end in",
    "mx.sym.FullyConnected(mx.sym.Variable('images'), num_hidden=3)": "has no input named data",
    f"mx.sym.FullyConnected(mx.sym.Pooling({DATA}, kernel=(2, 2), pooling_convention='same', name='p'), num_hidden=3)":
        "does not fit images of 224 pixels in NHWC: Pooling 'p' has pooling_convention='same'",
    f"mx.sym.FullyConnected(mx.sym.Pooling({DATA}, kernel=(3, 3), stride=(3, 3), pad=(1, 1), name='p', "
    "pooling_convention='full'), num_hidden=3)":
        "Pooling 'p' has windows outside its 224x224 input (kernel=(3, 3), stride=(3, 3), pad=(1, 1)",
    f"mx.sym.FullyConnected(mx.sym.LeakyReLU({DATA}, act_type='rrelu', name='r')[0], num_hidden=3)":
        "LeakyReLU with act_type='rrelu' draws its slopes at random",
    f"mx.sym.softmax(mx.sym.FullyConnected({DATA}, num_hidden=3), temperature=0.5, name='s')":
        "ends in softmax (s) with temperature=0.5 and axis=-1: let it end in the scores",
    f"mx.sym.softmax(mx.sym.FullyConnected({DATA}, num_hidden=3), axis=0, name='s')":
        "ends in softmax (s) with temperature=1 and axis=0: let it end in the scores",
    f"mx.sym.SoftmaxOutput(mx.sym.softmax(mx.sym.FullyConnected({DATA}, num_hidden=3), name='s'))":
        "ends in softmax (s): let it end in the classes' scores",
    f"mx.sym.FullyConnected(mx.sym.softmax({DATA}, temperature=2, name='s'), num_hidden=3)":
        "softmax 's' has temperature=2, which no executor here has",
}


@pytest.mark.parametrize("source", WRONG)
def test_what_is_refused(source: str, tmp_path: Path) -> None:
    """Before data are read; the file is named."""
    file = tmp_path / "net-symbol.json"
    file.write_text(eval(source).tojson())
    with pytest.raises(UserError) as error:
        plugins.load([str(file)])
    assert str(file) in str(error.value) and WRONG[source] in str(error.value)
    assert "\n" not in str(error.value) and not plugins.find("model", file.name)


@pytest.mark.parametrize("content, sentence", [
    (b"{}", "is JSON, but not a graph of MXNet"),
    (b'{"nodes": [', "is cut off or is not JSON"),
    (b"\xff\xfe", "is not text, so it holds no network in MXNet's JSON"),
])
def test_damaged_files(content: bytes, sentence: str, run_train: Run, tmp_path: Path) -> None:
    file = tmp_path / "net-symbol.json"
    file.write_bytes(content)
    code, _, err = run_train("--model", file, "--data", "nowhere")
    assert code == 2 and f"{file} {sentence}" in err.replace("error: ", "")


def test_files_that_are_not_there(run_train: Run, tmp_path: Path) -> None:
    code, _, err = run_train("--model", tmp_path / "none.json")
    assert code == 2 and f"--model {tmp_path / 'none.json'}: there is no such file; check the path" in err
    (file := tmp_path / "my net.json").write_text(module().tojson())
    code, _, err = run_train("--model", file)
    assert code == 2 and f"{file}: the name of this file becomes the network's name" in err
