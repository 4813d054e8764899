"""ResNet Symbols: published parameter counts, structure, initial values, gradient of the output layer."""

import json

import numpy as np
import pytest

from common.mxnet_compat import mx
from train import TrainError
from train.model import init_params, resnet

# He et al. 2015 as counted by torchvision's documentation of each network (1000 classes)
PUBLISHED_COUNTS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize("depth", PUBLISHED_COUNTS)
def test_parameter_count_is_the_published_one(depth):
    params, aux = init_params(resnet(depth), seed=0)
    assert sum(p.size for p in params.values()) == PUBLISHED_COUNTS[depth]
    num_batch_norms = sum(name.endswith("_gamma") for name in params)
    assert len(aux) == 2 * num_batch_norms


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


def test_unknown_depth():
    with pytest.raises(TrainError, match="no ResNet-20; choose a depth of 18, 34, 50, 101, 152"):
        resnet(20)
