"""The pass compact_grad: where it leaves zeros out, where it leaves the graph unchanged, and that results do not
change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from step_networks import random_variables, small_resnet, strided

from common.mxnet_compat import mx
from graph_passes import Graph, Ref, passes, pipeline
from graph_passes.choice import fewest
from graph_passes.executors.reference import run
from graph_passes.passes.compact_grad import compact_grad
from train.models.resnet import resnet
from train.models.resnet_d import MODELS

SHAPES = {"data": (3, 13, 11, 3), "softmax_label": (3,)}


def before(graph: Graph, shapes: dict[str, Any] = SHAPES, dtype: str = "float16") -> Graph:
    """A training step before the pass."""
    listed = pipeline.training_passes(shapes, dtype, fewest)
    names = [*listed]
    return pipeline.run({name: listed[name] for name in names[: names.index("compact_grad")]}, graph)


def two_readers(kernel: int = 1, stride: tuple[int, int] = (2, 2), pad: int = 0, third: bool = False) -> Graph:
    """A BatchNorm + ReLU that is read by a 3x3 convolution and another one."""
    def conv(x: Any, name: str, kernel: int, stride: tuple[int, int], pad: int) -> Any:
        return mx.sym.Convolution(x, num_filter=8, kernel=(kernel, kernel), stride=stride, pad=(pad, pad), no_bias=True,
                                  layout="NHWC", name=name)

    x = mx.sym.relu(mx.sym.BatchNorm(conv(mx.sym.Variable("data"), "stem", 3, (1, 1), 1), axis=3, fix_gamma=False))
    terms = [conv(x, "a", 3, (2, 2), 1), conv(x, "b", kernel, stride, pad)]
    if third:
        terms.append(conv(x, "c", 3, (1, 1), 1))
    pooled = [mx.sym.Pooling(term, global_pool=True, kernel=(1, 1), pool_type="avg", layout="NHWC") for term in terms]
    x = mx.sym.FullyConnected(mx.sym.Flatten(sum(pooled[1:], pooled[0])), num_hidden=7, name="fc")
    return Graph.from_json(mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax").tojson())


def strides(step: Graph) -> list[tuple[int, int]]:
    return [node["grad_stride"] for node in step if node.get("grad_stride")]


@pytest.mark.parametrize("depth, ops", [
    (18, ["BatchNormAddReluBackwardReduce"] * 3), (50, ["DgradStream", "DgradReduce", "DgradReduce"])])
def test_the_shortcuts_of_a_resnet(depth: int, ops: list[str]) -> None:
    """The shortcuts of stages 2 to 4 get compact gradients, which are plain matrix products. `ops`: the operators that
    add them, from stage 4 to stage 2."""
    graph, shapes = Graph.from_json(resnet(depth).tojson()), {"data": (2, 100, 68, 3)}
    step = pipeline.training_step(graph, shapes, "float16", fewest)
    sizes = step.infer_shapes({**shapes, "loss_scale": (1,)})
    compact = [node for node in step if node.get("grad_stride")]
    assert [(node.op, node["grad_stride"]) for node in compact] == [(op, (2, 2)) for op in ops]
    for node, stage in zip(compact, (4, 3, 2), strict=True):
        dgrad = step[node.input("out_grad_2").node]
        assert (dgrad.op, dgrad.name) == ("ConvolutionDgrad", f"stage{stage}_block1_shortcut_conv_dgrad")
        _, *whole, channels = sizes[node.input("data")]
        assert sizes[Ref(dgrad.name)] == (2, *(-(-pixels // 2) for pixels in whole), channels)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("network", ["strided", "basic blocks", "two readers"])
def test_nothing_else_changes(network: str, dtype: str, rng: np.random.Generator) -> None:
    """All outputs of the step equal those without the pass."""
    graph = two_readers(stride=(3, 2)) if network == "two readers" else Graph.from_json(
        (strided() if network == "strided" else small_resnet(False)).tojson())
    values = random_variables(graph, SHAPES, rng)
    values |= {"loss_scale": np.array([8.0])} if dtype == "float16" else {}
    step = before(graph, dtype=dtype)
    compact = compact_grad(step)
    assert strides(compact) == {"strided": [(1, 3), (2, 1), (2, 2)], "basic blocks": [(2, 2)],
                                "two readers": [(3, 2)]}[network]
    assert compact.operators() == step.operators() and compact_grad(compact) == compact
    found = run(compact, values)
    for name, wanted in run(step, values).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("more", [{"pad": 1}, {"kernel": 3, "pad": 1}, {"stride": (1, 1)}, {"third": True}])
def test_what_is_left_alone(more: dict[str, Any]) -> None:
    """Padding, windows of more than a pixel, no zeros to leave out, and a sum that another sum reads."""
    step = before(two_readers(**more))
    assert compact_grad(step) == step


def test_what_others_read_is_left_alone() -> None:
    step = before(two_readers())
    assert strides(compact_grad(step)) == [(2, 2)]
    read_twice = Graph(step, [*step.outputs, Ref("b_dgrad")], step.attrs)
    assert compact_grad(read_twice) == read_twice


def test_other_networks_have_none() -> None:
    """In ResNet-D an average pooling has the stride; in NCHW nothing is left out."""
    shapes = {"data": (2, 64, 64, 3)}
    assert not strides(pipeline.training_step(Graph.from_json(MODELS["resnet50d"]().tojson()), shapes, "float16",
                                              fewest))
    graph = passes.layout(Graph.from_json(small_resnet(False).tojson()), "NCHW", inputs=["data"])
    step = before(graph, {"data": (3, 3, 13, 11)}, "bfloat16")
    assert compact_grad(step) == step
