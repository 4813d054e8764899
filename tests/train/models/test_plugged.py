"""Networks of plug-ins: in either layout, from Gluon or as a Symbol, the result is the same; and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common import plugins
from common.errors import UserError
from common.mxnet_compat import mx
from graph_passes.executors import create_executor
from train import models
from train.models import plugged

HEAD = "import mxnet as mx\nfrom mxnet.gluon import nn\nfrom train.plugins import model\n\n@model\n"
GLUON = HEAD + '''
def gluon(num_classes):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D(2),
            nn.Conv2D(16, 3), nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(num_classes))
    return net

@model
def symbol(num_classes):
    x = mx.sym.Variable("data")
    x = mx.sym.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), no_bias=True, layout="NHWC")
    x = mx.sym.Activation(mx.sym.BatchNorm(x, axis=3, fix_gamma=False, eps=1e-5), act_type="relu")
    x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max", layout="NHWC")
    x = mx.sym.Convolution(x, num_filter=16, kernel=(3, 3), layout="NHWC")
    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout="NHWC")
    return mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=num_classes)
'''


def test_both_layouts_and_both_ways(plugin: Callable[..., Path], rng: np.random.Generator) -> None:
    plugins.load([str(plugin(GLUON))])
    shapes, images = {"data": (2, 20, 24, 3), "softmax_label": (2,)}, rng.standard_normal((2, 20, 24, 3), np.float32)
    answers = []
    for name in ("symbol", "gluon"):
        network = models.create(name, 5, label_smoothing=0.1)
        assert network.graph["softmax"]["smooth_alpha"] == 0.1 and network.num_classes == 5
        params, aux = network.initial_values(seed=0)
        assert [array.shape for array in params.values()] == [
            (8, 3, 3, 3), (8,), (8,), (16, 3, 3, 8), (16,), (5, 16), (5,)]
        assert [array.mean() for array in aux.values()] == [0, 1]
        values = iter(np.random.default_rng(1).standard_normal(10000).astype(np.float32))
        params = {each: np.array([next(values) for _ in range(array.size)], np.float32).reshape(array.shape)
                  for each, array in params.items()}
        executor = create_executor("mxnet", network.graph, shapes)
        executor.set_params(params, aux)
        answers.append(executor.forward(mx.nd.array(images)).asnumpy())
        assert models.num_classes(name, params) == 5
        assert models.published(name) == ()
    np.testing.assert_allclose(*answers, rtol=1e-4)
    assert answers[0].std() > 0.01


def test_names_are_equal_whenever_it_is_made(plugin: Callable[..., Path]) -> None:
    """Checkpoints identify arrays by these names."""
    plugins.load([str(plugin(GLUON))])
    first, _, third = (models.create(name).graph for name in ("gluon", "symbol", "gluon"))
    assert first == third and "dense0_weight" in first.variables


WRONG = {
    "return mx.sym.exp(mx.sym.Variable('data'))":
        "has the operator exp (exp0), which this program does not know: make it of Activation, BatchNorm, Co",
    "return mx.sym.FullyConnected(mx.sym.Variable('images'), num_hidden=num_classes)": "has no input named data",
    "return mx.sym.Convolution(mx.sym.Variable('data'), num_filter=8, kernel=(3, 3))":
        "ends in Convolution (convolution0): let it end in the classes' scores",
    "x = mx.sym.Convolution(mx.sym.Variable('data'), num_filter=num_classes, kernel=(3, 3))\n"
    "    return mx.sym.Flatten(mx.sym.Pooling(x, global_pool=True, kernel=(1, 1)))":
        "ends in Flatten (flatten0): let it end in the classes' scores, made by FullyConnected",
    "return mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(mx.sym.Variable('data'), num_hidden=num_classes))":
        "has the operator LinearRegressionOutput (linearregressionoutput0)",
    "return mx.sym.FullyConnected(mx.sym.Variable('data'), num_hidden=10)":
        "has 10 scores for 7 classes: use its argument num_classes",
    "return mx.sym.FullyConnected(mx.sym.Variable('data'), num_hidden=num_classes)":
        "has fullyconnected0_weight, whose shape depends on the size of the images ((7, 150528) for 224 pixels",
    "return nn.Sequential()": "is a Gluon Block of the type Sequential, which has no graph: make it a HybridBlock",
    "x = mx.sym.Pooling(mx.sym.Variable('data'), kernel=(300, 300))\n"
    "    return mx.sym.FullyConnected(x, num_hidden=num_classes)": "does not fit images of 224 pixels in NHWC: ",
    "return num_classes": "is a int: return a Symbol, or a Gluon HybridBlock",
    "return nn.Conv2D(8, 3).no_such_method()": "failed at {file}:7: AttributeError: ",
    "x = mx.sym.Variable('data') + mx.sym.Variable('mask')\n    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1))"
    "\n    return mx.sym.FullyConnected(x, num_hidden=num_classes)":
        "has the variable mask, which is neither data nor a parameter of a layer",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_refused(body: str, plugin: Callable[..., Path]) -> None:
    file = plugin(f"{HEAD}def mine(num_classes):\n    {body}\n")
    plugins.load([str(file)])
    with pytest.raises(UserError) as caught:
        models.create("mine", 7)
    text = str(caught.value).removeprefix(f"the model mine ({file}:5) ").removeprefix("the model mine ")
    assert text.startswith(WRONG[body].format(file=file)), text


def test_known_operators_are_named_and_the_walk_is_linked(plugin: Callable[..., Path]) -> None:
    plugins.load([str(plugin(f"{HEAD}def mine(num_classes):\n    return mx.sym.exp(mx.sym.Variable('data'))\n"))])
    with pytest.raises(UserError, match=re.escape("or add the operator (docs/extending.md)")):
        models.create("mine", 7)
    known = plugged.known_operators()
    assert {"Convolution", "BatchNorm", "Pooling", "FullyConnected", "elemwise_add", "Dropout"} <= set(known)
    assert not {"SoftmaxOutput", "AddRelu", "ConvolutionWgrad"} & set(known)  # a loss, a fused one, a gradient
