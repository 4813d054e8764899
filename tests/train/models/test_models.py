"""The networks by name: published parameter counts, structure, initial values, gradient of the output layer."""

import importlib
import json

import numpy as np
import pytest

from common.mxnet_compat import mx
from graph_passes import Ref, roles
from graph_passes.executors import create_executor
from train import TrainError, models
from train.models.blocks import BATCH_NORM_EPS
from train.models.network import init_params
from train.models.resnet import resnet

# As counted by torchvision's documentation of each network (1000 classes); ResNet-D's by timm. The counts of
# pre-activation networks are compared with Gluon's below.
PUBLISHED_COUNTS = {
    "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160,
    "resnet152": 60_192_808, "resnext50_32x4d": 25_028_904, "resnext101_32x8d": 88_791_336,
    "resnext101_64x4d": 83_455_272, "wide_resnet50_2": 68_883_240, "wide_resnet101_2": 126_886_696,
    "resnet50d": 25_576_264,
    "efficientnet_b0": 5_288_548, "efficientnet_b1": 7_794_184, "efficientnet_b2": 9_109_994,
    "efficientnet_b3": 12_233_232, "efficientnet_b4": 19_341_616, "efficientnet_v2_s": 21_458_488,
    "mobilenet_v2": 3_504_872, "mobilenet_v3_large": 5_483_032, "mobilenet_v3_small": 2_542_856,
    "regnet_x_400mf": 5_495_976, "regnet_x_800mf": 7_259_656, "regnet_x_1_6gf": 9_190_136,
    "regnet_x_3_2gf": 15_296_552, "regnet_x_8gf": 39_572_648, "regnet_x_16gf": 54_278_536,
    "regnet_x_32gf": 107_811_560, "regnet_y_400mf": 4_344_144, "regnet_y_800mf": 6_432_512,
    "regnet_y_1_6gf": 11_202_430, "regnet_y_3_2gf": 19_436_338, "regnet_y_8gf": 39_381_472,
    "regnet_y_16gf": 83_590_140, "regnet_y_32gf": 145_046_770, "convnext_tiny": 28_589_128,
    "convnext_small": 50_223_688, "convnext_base": 88_591_464, "seresnet50": 28_088_024, "resnetrs50": 35_691_912,
    "tf_efficientnet_lite0": 4_652_008, "tf_efficientnet_lite1": 5_416_680, "tf_efficientnet_lite2": 6_092_072,
}
RESIDUAL = models.named(("resnet", "resnet_d", "resnet_v2", "resnext", "wide_resnet"))


@pytest.mark.parametrize("name", [name for name in models.names() if name not in models.FAMILIES["gluon_zoo"]])
def test_parameter_count_is_the_published_one(name):
    network = models.create(name)
    arg_shapes, _, aux_shapes = network.symbol.infer_shape(data=(1, 224, 224, 3))
    shapes = dict(zip(network.symbol.list_arguments(), arg_shapes, strict=True))
    del shapes["data"], shapes["softmax_label"]
    if name in PUBLISHED_COUNTS:
        assert sum(map(np.prod, shapes.values())) == PUBLISHED_COUNTS[name]
    assert len(aux_shapes) == 2 * network.graph.operators()["BatchNorm"]
    assert roles.weights(network.graph) == {parameter for parameter in shapes if parameter.endswith("_weight")}
    assert len(roles.first_weights(network.graph)) == 1


@pytest.mark.parametrize("name", RESIDUAL)
def test_branches_end_in_the_last_batch_norm(name):
    graph = models.create(name).graph
    if name.endswith("_v2"):
        assert not roles.branch_gammas(graph), "branches end in a convolution"
        return
    blocks = graph.operators()["elemwise_add"]
    last = "bn2" if graph["stage1_block1_relu2"].inputs[0].node.endswith("add") else "bn3"
    assert roles.branch_gammas(graph) == {
        f"stage{stage}_block{block}_{last}_gamma" for stage in range(1, 5) for block in range(1, blocks + 1)
        if f"stage{stage}_block{block}_add" in graph.nodes
    }


@pytest.mark.parametrize("name", [name for name in RESIDUAL if name not in models.FAMILIES["resnext"]])
def test_the_first_width_is_read_when_a_network_is_made(name, monkeypatch):
    """The first width is not read when the network's file is imported: otherwise the order of imports would determine
    the width.
    """
    def weights():
        shapes = models.create(name).graph.infer_shapes({"data": (1, 64, 64, 3), "softmax_label": (1,)})
        return {node: shapes[Ref(node)] for node in (f"stage1_block1_conv{n}_weight" for n in (1, 2))}

    wide = weights()
    monkeypatch.setattr("train.models.resnet.FIRST_WIDTH", 8)
    assert {name: shape[0] for name, shape in weights().items()} == {
        name: shape[0] // 8 for name, shape in wide.items()}


def test_every_file_is_listed():
    for family, names in models.FAMILIES.items():
        assert tuple(importlib.import_module(f"train.models.{family}").MODELS) == names


def test_a_network_by_name():
    network = models.create("resnext50_32x4d", 7, label_smoothing=0.1)
    assert str(network) == "resnext50_32x4d with 7 classes"
    assert network.graph[network.graph.outputs[0].node]["smooth_alpha"] == 0.1
    params, _ = network.initial_values(seed=1)
    assert models.num_classes("resnext50_32x4d", params) == 7
    assert params["stage1_block1_conv2_weight"].shape == (128, 3, 3, 4)
    # Variance 2 / fan_out, all filters counted; the standard error of a standard deviation is std / sqrt(2 n).
    weight = params["stage3_block1_conv2_weight"]
    expected = np.sqrt(2 / (weight.shape[0] * 9))
    assert abs(weight.std() - expected) < 5 * expected / np.sqrt(2 * weight.size)


@pytest.mark.parametrize("wrong, sentence", [
    ("resnet51", "there is no model 'resnet51'; did you mean resnet50?"),
    ("resnext50", "there is no model 'resnext50'; did you mean resnext50_32x4d?"),
    ("nothing", f"there is no model 'nothing'; there are: {', '.join(sorted(models.names()))}"),
])
def test_an_unknown_name_names_the_nearest(wrong, sentence):
    with pytest.raises(TrainError) as error:
        models.create(wrong)
    assert str(error.value).startswith(sentence)


def test_resnet_d_averages_where_a_shortcut_has_a_stride():
    graph = models.create("resnet50d").graph
    assert [node.name for node in graph if node.op == "Pooling" and node["pool_type"] == "avg"] == [
        *(f"stage{stage}_block1_shortcut_pool" for stage in (2, 3, 4)), "pool"
    ]
    assert all(graph[f"stage{stage}_block1_shortcut_conv"]["stride"] == (1, 1) for stage in range(1, 5))
    for size in (224, 225, 32):  # an odd size has a border that the mean covers with fewer pixels
        shapes = graph.infer_shapes({"data": (1, size, size, 3), "softmax_label": (1,)})
        for stage in (2, 3, 4):
            shortcut, branch = (shapes[Ref(f"stage{stage}_block1_{name}")] for name in ("shortcut_bn", "bn3"))
            assert shortcut == branch


def gluon_parameters(zoo):
    """The parameters and running statistics of a network of Gluon's zoo, in order, without the BatchNorm of the images,
    which is set to the identity."""
    zoo.initialize()
    zoo(mx.nd.zeros((1, 3, 32, 32)))
    _, _, _, variance, *parameters = zoo.collect_params().values()
    variance.set_data(mx.nd.full(3, 1 - BATCH_NORM_EPS))
    running = [parameter for parameter in parameters if "running" in parameter.name]
    return [parameter for parameter in parameters if parameter not in running], running


@pytest.mark.long(but=["resnet18_v2", "resnet50_v2"])
@pytest.mark.parametrize("name", models.FAMILIES["resnet_v2"])
def test_pre_activation_networks_have_gluons_parameters(name):
    params, aux = models.create(name).initial_values(seed=1)
    expected, running = gluon_parameters(mx.gluon.model_zoo.vision.get_model(name))
    assert [value.shape for value in aux.values()] == [parameter.shape for parameter in running]
    assert [np.moveaxis(value, -1, 1).shape if value.ndim == 4 else value.shape for value in params.values()] == [
        parameter.shape for parameter in expected]


@pytest.mark.long(but=["resnet18_v2"])
@pytest.mark.parametrize("name", ["resnet18_v2", "resnet50_v2"])
def test_pre_activation_networks_compute_what_gluons_do(name, rng):
    """With the same weights and statistics, in fp32."""
    network, zoo = models.create(name, 7), mx.gluon.model_zoo.vision.get_model(name, classes=7)
    params, aux = network.initial_values(seed=1)
    for value in (*params.values(), *aux.values()):
        if value.ndim == 1:
            value += rng.uniform(0, 0.5, value.shape)
    parameters = [parameter for kind in gluon_parameters(zoo) for parameter in kind]
    for parameter, value in zip(parameters, [*params.values(), *aux.values()], strict=True):
        parameter.set_data(mx.nd.array(np.moveaxis(value, -1, 1) if value.ndim == 4 else value))
    data = rng.standard_normal((3, 75, 64, 3)).astype(np.float32)
    images = mx.nd.array(np.moveaxis(data, -1, 1))
    params["classifier_weight"] /= np.ptp(zoo(images).asnumpy())  # otherwise one class has all the probability
    zoo.output.weight.set_data(mx.nd.array(params["classifier_weight"]))
    wanted = mx.nd.softmax(zoo(images)).asnumpy()
    executor = create_executor("mxnet", network.graph, {"data": data.shape, "softmax_label": (3,)})
    executor.set_params(params, aux)
    assert np.ptp(wanted, axis=0).max() > 1e-3, "images must differ in their answers"
    np.testing.assert_allclose(executor.forward(mx.nd.array(data)).asnumpy(), wanted, rtol=1e-4, atol=1e-6)


def test_resnet50_structure():
    nodes = json.loads(resnet(50).tojson())["nodes"]
    convs = {n["name"]: n["attrs"] for n in nodes if n["op"] == "Convolution"}
    assert len(convs) == 53
    assert all(attrs["layout"] == "NHWC" for attrs in convs.values())
    assert sum(n["op"] == "elemwise_add" for n in nodes) == 16
    # v1.5: the stride of a downsampling block is in its 3x3 convolution
    assert convs["stage2_block1_conv2"]["stride"] == "(2, 2)"
    assert convs["stage2_block1_conv1"]["stride"] == "(1, 1)"


@pytest.mark.parametrize("size, final", [(224, 7), (64, 2), (32, 1), (75, 3)])
def test_spatial_sizes(size, final):
    internals = resnet(50).get_internals()
    _, out_shapes, _ = internals.infer_shape(data=(3, size, size, 3))
    shapes = dict(zip(internals.list_outputs(), out_shapes, strict=True))
    assert shapes["stage4_block3_relu3_output"] == (3, final, final, 2048)
    assert shapes["softmax_output"] == (3, 1000)


@pytest.mark.parametrize("depth, last, zero_init", [(18, "bn2", True), (18, "bn2", False), (50, "bn3", True)])
def test_initial_values(depth, last, zero_init):
    params, aux = init_params(resnet(depth, num_classes=7), seed=3, zero_init_residual=zero_init)
    for name, value in params.items():
        assert value.dtype == np.float32
        if name.endswith("_gamma"):
            assert np.all(value == (0 if zero_init and f"_{last}_" in name and "shortcut" not in name else 1)), name
        elif name.endswith(("_beta", "_bias")):
            assert not value.any(), name
    # He: variance 2 / fan_out; the standard error of a sample standard deviation is std / sqrt(2 n)
    weight = params["stage3_block1_conv2_weight"]
    expected = np.sqrt(2 / (weight.shape[0] * 9))
    assert abs(weight.std() - expected) < 5 * expected / np.sqrt(2 * weight.size)
    assert all(np.all(value == (1 if name.endswith("var") else 0)) for name, value in aux.items())


def test_initial_values_depend_on_seed_only():
    symbol = resnet(18, num_classes=5)
    first, again, other = (init_params(symbol, seed)[0] for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["stem_conv_weight"], other["stem_conv_weight"])


def test_fourth_channel_is_zero_and_changes_nothing_else():
    symbol = resnet(18, num_classes=5)
    three, four = init_params(symbol, 4)[0], init_params(symbol, 4, channels=4)[0]
    assert four["stem_conv_weight"].shape == (64, 7, 7, 4)
    assert not four["stem_conv_weight"][..., 3].any()
    assert np.array_equal(four["stem_conv_weight"][..., :3], three["stem_conv_weight"])
    assert all(np.array_equal(three[name], four[name]) for name in three if name != "stem_conv_weight")


def test_label_smoothing_gradient(rng):
    """The gradient at the logits is (p - target) / N with the smoothed target of the docstring."""
    smoothing, classes, batch = 0.1, 5, 3
    attrs = json.loads(resnet(18, classes, smoothing).tojson())["nodes"][-1]["attrs"]
    out = mx.sym.SoftmaxOutput(mx.sym.Variable("logits"), name="softmax", **attrs)
    logits = rng.standard_normal((batch, classes)).astype(np.float32)
    label = rng.integers(0, classes, batch)
    arrays = {"logits": mx.nd.array(logits), "softmax_label": mx.nd.array(label)}
    grads = {"logits": mx.nd.zeros((batch, classes))}
    executor = out.bind(mx.cpu(), arrays, args_grad=grads, grad_req={"logits": "write", "softmax_label": "null"})
    executor.forward(is_train=True)
    executor.backward()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    target = np.full((batch, classes), smoothing / (classes - 1))
    target[np.arange(batch), label] = 1 - smoothing
    np.testing.assert_allclose(grads["logits"].asnumpy(), (p - target) / batch, atol=1e-6)
