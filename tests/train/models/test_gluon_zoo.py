"""Gluon's model zoo by name: the same parameters, files and numbers as the networks that Gluon makes itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.mxnet_compat import mx
from graph_passes import Graph, passes, roles
from graph_passes.executors import create_executor
from train import models, weights
from train.errors import TrainError
from train.models.network import Arrays, Network

ZOO = models.FAMILIES["gluon_zoo"]
CLASSES = 7
# Height and width of the images, in pixels. Fully connected layers that read all pixels have fewer weights then.
SIZES = {**dict.fromkeys(ZOO, 64), "inception_v3": 96}
QUICK = ("mobilenet0_25", "mobilenet_v2_0_25", "squeezenet1_1")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ZOO]
OF_ITS_SIZE = ("alexnet", "densenet121", "inception_v3", "squeezenet1_0", "vgg11")


def by_gluon(name: str, **settings: Any) -> Any:
    return getattr(mx.gluon.model_zoo.vision, name)(classes=CLASSES, **settings)


def with_values(net: Any, size: int, rng: np.random.Generator) -> Any:
    """The block with random values that make its scores differ, and running statistics as they might be."""
    net.initialize(mx.init.MSRAPrelu(slope=0))
    net(mx.nd.zeros((1, 3, size, size)))
    for name, parameter in net.collect_params().items():
        if len(parameter.shape) == 1:
            low = 0.5 if name.endswith(("_gamma", "_var")) else -0.2
            parameter.set_data(mx.nd.array(rng.uniform(low, low + 0.4, parameter.shape)))
    return net


def in_our_form(net: Any, network: Network) -> tuple[Arrays, Arrays]:
    arrays = {name.removeprefix(net.prefix): parameter.data().asnumpy()
              for name, parameter in net.collect_params().items()}
    arrays = {name: array.transpose(0, 2, 3, 1) if array.ndim == 4 else array for name, array in arrays.items()}
    return tuple({name: arrays[name] for name in shapes} for shapes in network.shapes())  # type: ignore[return-value]


def with_global_pooling(net: Any) -> None:
    """Make the block's last pooling global, which is the same for the images that it was made for."""
    pools: list[Any] = []
    net.apply(lambda block: pools.append(block) if isinstance(block, mx.gluon.nn.AvgPool2D) else None)
    for pool in pools[-1:]:
        pool._kwargs["global_pool"] = True


def as_in_inference(graph: Graph) -> Graph:
    """Without dropout, and with the running statistics. Statistics of a few values in each of 200 BatchNorms would make
    differences of rounding as large as gradients."""
    graph = passes.remove_dropout(graph)
    return graph.rewrite(lambda node: node.with_attrs(use_global_stats=True) if node.op == "BatchNorm" else None)


def in_numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.asnumpy()


def scores(probabilities: Any) -> np.ndarray:
    return np.log(np.maximum(in_numpy(probabilities), 1e-30))  # float32 has 0 for the smallest


def steps(net: Any, network: Network, data: np.ndarray, label: np.ndarray, executor: str = "mxnet"
          ) -> tuple[Arrays, Arrays]:
    """Scores, and gradients by our names, both as in inference: Gluon's and ours. `data` (N, H, W, 3)."""
    images, labels = mx.nd.array(data.transpose(0, 3, 1, 2)), mx.nd.array(label)
    theirs = {"scores": scores(net(images).softmax())}
    with mx.autograd.record(train_mode=False):
        loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(images), labels).mean()
    params, aux = in_our_form(net, network)
    loss.backward(train_mode=False)
    for name, parameter in net.collect_params().items():
        if (ours := name.removeprefix(net.prefix)) in params:
            gradient = parameter.grad().asnumpy()
            theirs[ours] = gradient.transpose(0, 2, 3, 1) if gradient.ndim == 4 else gradient
    graph = as_in_inference(network.graph)
    ours_executor = create_executor(executor, graph, {"data": data.shape, "softmax_label": label.shape})
    ours_executor.set_params(params, aux)
    inputs = (mx.nd.array(data), labels) if executor == "mxnet" else (data, label)
    ours = {"scores": scores(ours_executor.forward(inputs[0]))}
    ours_executor.forward_backward(*inputs)
    layouts = passes.weight_layouts(ours_executor.graph)
    for each, gradient in ours_executor.grads.items():
        array = in_numpy(gradient)
        ours[each] = array.transpose(0, 2, 3, 1) if layouts.get(each) == "OIHW" else array
    return theirs, ours


def assert_same(net: Any, network: Network, size: int, rng: np.random.Generator, executor: str = "mxnet") -> None:
    """Scores and gradients are near for random images. In gradients, a ReLU may be open on one side and closed on the
    other, where its input is nearly 0: in 150 draws of a SqueezeNet, differences reached 3e-3, and larger ones were
    seen since. Then other images decide."""
    with contextlib.suppress(AssertionError):
        return assert_near(*steps_of_random(net, network, size, rng, executor), network)
    return assert_near(*steps_of_random(net, network, size, rng, executor), network)


def steps_of_random(net: Any, network: Network, size: int, rng: np.random.Generator, executor: str
                    ) -> tuple[Arrays, Arrays]:
    data, label = rng.standard_normal((2, size, size, 3), np.float32), rng.integers(0, CLASSES, 2).astype(np.float32)
    return steps(net, network, data, label, executor)


def assert_near(theirs: Arrays, ours: Arrays, network: Network) -> None:
    """Both compute in float32, in other layouts and orders: scores may differ by 1e-4 of their range, gradients by 1e-2
    of their norm. A wrong layer would make the differences as large as the gradients themselves. The range is far above
    the rounding of the scores, 2e-7: a SqueezeNet's was 0.09 in one of some hundred draws."""
    assert np.ptp(theirs["scores"]) > 0.02
    np.testing.assert_allclose(ours["scores"], theirs["scores"], atol=1e-4 * np.ptp(theirs["scores"]), rtol=0)
    for name in (network.classifier[0], next(name for name in network.shapes()[0] if name.endswith("_weight"))):
        scale = np.linalg.norm(theirs[name])
        assert scale > 0 and np.linalg.norm(ours[name] - theirs[name]) < 1e-2 * scale, name


@pytest.mark.parametrize("name", ZOO)
def test_names_of_parameters(name: str) -> None:
    """Ours are those that Gluon exports, without its prefix; PUBLISHED has those that it saves."""
    net, network = by_gluon(name), models.create(name, CLASSES)
    params, aux = network.shapes()
    exported = {parameter.removeprefix(net.prefix) for parameter in net.collect_params()}
    assert params.keys() | aux.keys() == exported
    *_, published = models.published(name)
    saved = {place: parameter.name.removeprefix(net.prefix)
             for place, parameter in net._collect_params_with_prefix().items()}
    assert {published.name(ours): ours for ours in exported} == saved
    assert len(params[network.classifier[0]]) in (4, 2) and params[network.classifier[0]][0] == CLASSES


TORCHVISION_S = {
    "vgg11": {"conv0_weight": "features.0.weight", "conv7_bias": "features.18.bias",
              "dense1_bias": "classifier.3.bias"},
    "vgg19_bn": {"batchnorm15_running_mean": "features.50.running_mean", "dense2_weight": "classifier.6.weight"},
    "densenet121": {
        "conv0_weight": "features.conv0.weight", "batchnorm0_gamma": "features.norm0.weight",
        "stage4_batchnorm31_beta": "features.denseblock4.denselayer16.norm2.bias",
        "stage2_conv2_weight": "features.denseblock2.denselayer2.conv1.weight",
        "batchnorm3_running_var": "features.transition3.norm.running_var",
        "conv3_weight": "features.transition3.conv.weight", "batchnorm4_gamma": "features.norm5.weight",
        "dense0_bias": "classifier.bias",
    },
}


@pytest.mark.parametrize("name", TORCHVISION_S)
def test_torchvision_s_names(name: str) -> None:
    published = models.published(name)[0]
    assert {ours: published.name(ours) for ours in TORCHVISION_S[name]} == TORCHVISION_S[name]


def test_names_in_torchvision_s_files_of_densenet() -> None:
    """torchvision renames the layers when it reads the file: norm.1 becomes norm1."""
    program, files, _ = models.published("densenet121")
    assert files.layers["stage1_conv3"] == "features.denseblock1.denselayer2.conv.2"
    assert {re.sub(r"(denselayer\d+\.\w+)\.(\d)", r"\1\2", theirs) for theirs in files.layers.values()} == {
        *program.layers.values()}


@pytest.mark.skipif("PEER_PYTHON" not in os.environ, reason="PEER_PYTHON is not set")
def test_all_names_and_shapes_of_torchvision() -> None:
    names = [name for name in ZOO if name.startswith(("vgg", "densenet"))]
    program = """
import json, sys
import torch, torchvision
with torch.device("meta"):
    found = {name: torchvision.models.get_model(name).state_dict() for name in sys.argv[1:]}
print(json.dumps({name: {key: list(tensor.shape) for key, tensor in state.items()} for name, state in found.items()}))
"""
    output = subprocess.run([os.environ["PEER_PYTHON"], "-c", program, *names], check=True, capture_output=True).stdout
    for name, theirs in json.loads(output).items():
        published, shapes = models.published(name)[0], models.create(name).shapes()
        ours = {published.name(key): list(published.shape(key, shape))
                for each in shapes for key, shape in each.items()}
        assert ours == {key: shape for key, shape in theirs.items() if not key.endswith("num_batches_tracked")}, name


@pytest.mark.parametrize("name", EACH)
def test_same_scores_and_gradients(name: str, rng: np.random.Generator) -> None:
    size = SIZES[name]
    net, network = by_gluon(name), models.create(name, CLASSES)
    with_global_pooling(net)
    with_values(net, size, rng)
    assert_same(net, network, size, rng)


@pytest.mark.long
@pytest.mark.parametrize("name", OF_ITS_SIZE)
def test_same_at_its_own_size(name: str, rng: np.random.Generator) -> None:
    """With Gluon's layers that fit images of one size: a pooling, or a fully connected layer that reads all pixels."""
    size = models.image_size(name)
    net, network = by_gluon(name), models.create(name, CLASSES)
    with_values(net, size, rng)
    assert_same(net, network, size, rng)
    assert network.has_one_size == (name in ("alexnet", "vgg11"))


@pytest.mark.parametrize("name", ["squeezenet1_1", pytest.param("alexnet", marks=pytest.mark.long)])
def test_same_by_the_oracle(name: str, rng: np.random.Generator) -> None:
    """The NumPy executor, which has no gradient of a BatchNorm as in inference: networks without one."""
    net, network = by_gluon(name), models.create(name, CLASSES)
    with_global_pooling(net)
    with_values(net, 64, rng)
    assert_same(net, network, 64, rng, "reference")


@pytest.mark.parametrize("name", ["squeezenet1_1", *(pytest.param(name, marks=pytest.mark.long) for name in (
    "mobilenet_v2_0_25", "resnet50_v1", "densenet121", "vgg11_bn", "inception_v3"))])
def test_files_of_gluon_load_unchanged(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Files of save_parameters and of export load, with any number of networks made before."""
    by_gluon(name)  # the next one has another prefix
    size = models.image_size(name)
    net = with_values(by_gluon(name), size, rng)
    net.save_parameters(str(tmp_path / "saved.params"))
    net.hybridize()
    net(mx.nd.zeros((1, 3, size, size)))
    net.export(str(tmp_path / "net"))
    (tmp_path / "net-symbol.json").unlink()
    for file in ("saved.params", "net-0000.params"):
        found = weights.read(str(tmp_path / file), name)
        assert (found.trained.config.model, found.num_classes) == (name, CLASSES)
        assert found.trained.config.image_size == size
        for wanted, arrays in zip(in_our_form(net, models.create(name, CLASSES)),
                                  (found.trained.params, found.trained.aux), strict=True):
            assert arrays.keys() == wanted.keys()
            for each, array in arrays.items():
                np.testing.assert_array_equal(array, wanted[each], err_msg=each)


def test_gluon_loads_an_export(tmp_path: Path, rng: np.random.Generator) -> None:
    """`export --params --layout NCHW` writes what Gluon's network of that name loads."""
    from train.checkpoint import Checkpoint
    from train.commands.export import mxnet_params, network
    from train.config import Config
    from train.options.commands import ExportOptions

    net = with_values(by_gluon("squeezenet1_1"), 224, rng)
    params, aux = in_our_form(net, models.create("squeezenet1_1", CLASSES))
    trained = Checkpoint(params, aux, {}, Config(model="squeezenet1_1"), [str(label) for label in range(CLASSES)])
    _, arrays = network(trained, ExportOptions(layout="NCHW"))
    (tmp_path / "ours.params").write_bytes(mxnet_params(arrays))
    again = by_gluon("squeezenet1_1")
    again.load_parameters(str(tmp_path / "ours.params"))
    images = mx.nd.array(rng.standard_normal((1, 3, 224, 224)))
    np.testing.assert_array_equal(again(images).asnumpy(), net(images).asnumpy())


def test_one_network_has_one_name() -> None:
    for alias, name in models.ALIASES.items():
        assert str(models.create(alias, 5)) == f"{name} with 5 classes" and alias not in models.names()
    zoo = {name for name in dir(mx.gluon.model_zoo.vision) if name.startswith(
        ("alexnet", "densenet1", "densenet2", "inception_", "mobilenet0", "mobilenet1", "mobilenet_v", "resnet1",
         "resnet3", "resnet5", "squeezenet1", "vgg1"))}
    assert zoo <= {*models.names(), *models.ALIASES}


def test_images_of_one_size() -> None:
    """AlexNet and VGG have fully connected layers that read every pixel of the last convolution."""
    network = models.create("vgg11", 3)
    assert network.has_one_size
    network.check_image_size(224)
    with pytest.raises(TrainError, match=r"^vgg11 reads images of 224 pixels only, .* give --image-size 224"):
        network.check_image_size(192)
    models.create("squeezenet1_0", 3).check_image_size(96)


def test_classifiers(rng: np.random.Generator) -> None:
    """A convolution may be the classifier: it is what fine-tuning trains, and its input is what `embed` gives."""
    from train.features import features_graph

    network = models.create("squeezenet1_1", CLASSES)
    assert network.classifier == ("conv25_weight", "conv25_bias")
    frozen = passes.freeze(network.graph, passes.BACKBONE)
    assert {*network.shapes()[0]} - roles.frozen(frozen) == {*network.classifier}
    graph = features_graph(network)
    assert graph.infer_shapes({"data": (2, 96, 96, 3)})[graph.outputs[0]] == (2, 1, 1, 512)
    params, _ = network.initial_values(seed=1)
    assert 0.008 < params["conv25_weight"].std() < 0.012  # like other classifiers
    assert Graph.from_json(network.symbol.tojson())["softmax"].op == "SoftmaxOutput"
    assert models.create("mobilenet_v2_0_25", CLASSES).classifier == ("output_pred_weight",)
