"""ONNX models as networks: each operator against ONNX Runtime with random weights; and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import plugins
from common.errors import UserError
from common.mxnet_compat import mx
from graph_passes.executors import create_executor
from train import models, weights
from train.checkpoint import Checkpoint
from train.commands.export import export_onnx
from train.config import Config
from train.models import network_file, onnx_reader

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

CHANNELS, CLASSES, SIZE = 6, 5, 32
Nodes = Sequence[Any]


def node(op: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), [output], output, **attributes)


def model(nodes: Nodes, constants: dict[str, np.ndarray], opset: int = 17, shape: Sequence[Any] = ("N", 3, SIZE, SIZE),
          outputs: Sequence[str] = ("scores",)) -> bytes:
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return made.SerializeToString()


def around(nodes: Nodes, constants: dict[str, np.ndarray], rng: np.random.Generator, channels: int = CHANNELS,
           **more: Any) -> bytes:
    """A network with these nodes, from x (N, 6, 15, 15) to y (N, channels, height, width), between a convolution and
    the classifier."""
    weights = {
        "first.weight": rng.standard_normal((CHANNELS, 3, 3, 3)) / 3, "first.bias": rng.standard_normal(CHANNELS),
        "head.weight": rng.standard_normal((CLASSES, channels)), "head.bias": rng.standard_normal(CLASSES),
    } | constants
    whole = [node("Conv", "images first.weight first.bias", "x", strides=[2, 2]), *nodes,
             node("GlobalAveragePool", "y", "pooled"), node("Flatten", "pooled", "flat"),
             node("Gemm", "flat head.weight head.bias", "scores", transB=1)]
    arrays = {name: array if array.dtype == np.int64 else array.astype(np.float32) for name, array in weights.items()}
    return model(whole, arrays, **more)


def by_onnx_runtime(content: bytes, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: images})
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def by_us(file: Path, content: bytes, images_nhwc: np.ndarray, executor: str = "mxnet") -> np.ndarray:
    file.write_bytes(content)
    trained = weights.load(str(file), quiet=True)
    assert trained.config.model == file.name
    graph = models.create(file.name, trained.num_classes).graph
    computes = create_executor(executor, graph, {"data": images_nhwc.shape, "softmax_label": images_nhwc.shape[:1]})
    computes.set_params(trained.params, trained.aux)
    found = computes.forward(images_nhwc if executor == "reference" else mx.nd.array(images_nhwc))
    return found if executor == "reference" else found.asnumpy()


def assert_same(file: Path, content: bytes, rng: np.random.Generator, executor: str = "mxnet", size: int = SIZE
                ) -> None:
    """Both in float32: 1e-5 is far above the effect of other orders of sums, and far below the effect of a wrong
    operator.
    """
    images = rng.standard_normal((2, size, size, 3), np.float32)
    wanted = by_onnx_runtime(content, np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    assert np.ptp(wanted) > 0.05
    np.testing.assert_allclose(by_us(file, content, images, executor), wanted, atol=1e-5)


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def uniform(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.5, 1.5, shape)


Case = Callable[[np.random.Generator], tuple[Nodes, dict[str, np.ndarray]]]


def one(op: str, **attributes: Any) -> Case:
    return lambda rng: ([node(op, "x", "y", **attributes)], {})


def gelu(order: str) -> Case:
    """GELU in the form of exporters. `order`: the order of the last factors x, 1 + erf and 0.5."""
    def case(rng: np.random.Generator) -> tuple[Nodes, dict[str, np.ndarray]]:
        start = [node("Div", "x root", "scaled"), node("Erf", "scaled", "erf"), node("Add", "erf one", "sum")]
        last = {
            "x first": [node("Mul", "x sum", "product"), node("Mul", "product half", "y")],
            "half first": [node("Mul", "sum half", "product"), node("Mul", "product x", "y")],
            "half of x": [node("Mul", "x half", "product"), node("Mul", "product sum", "y")],
        }[order]
        first = last[:1] if order == "half of x" else []
        rest = last[1:] if order == "half of x" else last
        return [*first, *start, *rest], {"root": vector(2**0.5), "one": vector(1), "half": vector(0.5)}

    return case


CASES: dict[str, Case] = {
    **{op: one(op) for op in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "HardSwish", "Identity", "Selu")},
    "HardSigmoid": one("HardSigmoid", alpha=0.3, beta=0.4),
    "LeakyRelu": one("LeakyRelu", alpha=0.2),
    "Elu": one("Elu", alpha=0.7),
    **{f"GELU, {order}": gelu(order) for order in ("x first", "half first", "half of x")},
    "PRelu": lambda rng: ([node("PRelu", "x slopes", "y")], {"slopes": uniform(rng, CHANNELS, 1, 1)}),
    "PRelu with one slope": lambda rng: ([node("PRelu", "x slopes", "y")], {"slopes": vector(0.3)}),
    "Clip": lambda rng: ([node("Clip", "x low high", "y")], {"low": np.float32(-0.5) * np.ones(()),
                                                            "high": np.ones(())}),
    "BatchNormalization": lambda rng: (
        [node("BatchNormalization", "x n.weight n.bias n.mean n.var", "y", epsilon=1e-3)],
        {f"n.{name}": uniform(rng, CHANNELS) for name in ("weight", "bias", "mean", "var")}),
    "LayerNormalization": lambda rng: (
        [node("Transpose", "x", "last", perm=[0, 2, 3, 1]), node("LayerNormalization", "last gamma beta", "normal"),
         node("Transpose", "normal", "y", perm=[0, 3, 1, 2])],
        {"gamma": uniform(rng, CHANNELS), "beta": uniform(rng, CHANNELS)}),
    "Conv in groups": lambda rng: (
        [node("Conv", "x w", "y", group=3, pads=[2, 1, 2, 1], dilations=[2, 1], kernel_shape=[3, 3])],
        {"w": rng.standard_normal((CHANNELS, 2, 3, 3))}),
    "Conv, padded to its size": lambda rng: (
        [node("Conv", "x w", "y", auto_pad="SAME_UPPER")], {"w": rng.standard_normal((CHANNELS, CHANNELS, 3, 3)) / 5}),
    "MaxPool": one("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    "MaxPool, rounded up": one("MaxPool", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    "AveragePool": one("AveragePool", kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0]),
    "AveragePool with its padding": one("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    "Add": lambda rng: ([node("Sigmoid", "x", "other"), node("Add", "x other", "y")], {}),
    "Mul": lambda rng: ([node("Sigmoid", "x", "other"), node("Mul", "x other", "y")], {}),
    "numbers": lambda rng: (
        [node("Mul", "x two", "twice"), node("Add", "half twice", "more"), node("Sub", "more two", "less"),
         node("Div", "less half", "y")], {"two": vector(1.7), "half": np.float32(0.6) * np.ones(())}),
    "squeeze and excitation": lambda rng: (
        [node("GlobalAveragePool", "x", "mean"), node("Conv", "mean s.weight", "scores_of_it"),
         node("Sigmoid", "scores_of_it", "gate"), node("Mul", "gate x", "y")],
        {"s.weight": rng.standard_normal((CHANNELS, CHANNELS, 1, 1))}),
    "squeeze and excitation by fully connected layers": lambda rng: (
        [node("ReduceMean", "x", "mean", axes=[2, 3], keepdims=0), node("Gemm", "mean s.weight", "wide", transB=1),
         node("HardSigmoid", "wide", "gate"), node("Reshape", "gate shape", "image"), node("Mul", "x image", "y")],
        {"s.weight": rng.standard_normal((CHANNELS, CHANNELS)), "shape": numbers(-1, CHANNELS, 1, 1)}),
    "Concat, Slice": lambda rng: (
        [node("Slice", "x begin end axis", "low"), node("Slice", "x end most axis", "high"),
         node("Concat", "high low", "y", axis=1)],
        {"begin": numbers(0), "end": numbers(2), "most": numbers(2**62), "axis": numbers(1)}),
    "Slice of pixels": lambda rng: (
        [node("Slice", "x begin end axes", "y")],
        {"begin": numbers(1, 2), "end": numbers(-1, 12), "axes": numbers(2, 3)}),
    "Split": lambda rng: (
        [helper.make_node("Split", ["x", "parts"], ["one", "two"], "split", axis=1),
         node("Concat", "two one", "y", axis=1)],
        {"parts": numbers(2, 4)}),
    "Dropout": one("Dropout"),
    "Cast": one("Cast", to=TensorProto.FLOAT),
    "a Constant": lambda rng: (
        [helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(vector(2))),
         node("Mul", "x two", "y")],
        {}),
}


@pytest.mark.parametrize("name", CASES)
def test_operators(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    assert_same(tmp_path / "net.onnx", around(*CASES[name](rng), rng), rng)


@pytest.mark.parametrize("name", ["HardSwish", "Split", "LayerNormalization", "Slice of pixels"])
def test_operators_by_the_oracle(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    assert_same(tmp_path / "net.onnx", around(*CASES[name](rng), rng), rng, "reference")


def test_older_and_newer_opsets(tmp_path: Path, rng: np.random.Generator) -> None:
    """An input in newer opsets may be an attribute in older opsets."""
    older = [node("Clip", "x", "clipped", min=-0.3, max=0.8), node("Dropout", "clipped", "dropped", ratio=0.2),
             node("Slice", "dropped", "y", starts=[1], ends=[4], axes=[1])]
    assert_same(tmp_path / "older.onnx", around(older, {}, rng, channels=3, opset=9), rng)
    newer = [node("Gelu", "x", "gelu"), node("ReduceMean", "gelu axes", "y")]
    assert_same(tmp_path / "newer.onnx", around(newer, {"axes": numbers(2, 3)}, rng, opset=20), rng)


def test_heads(tmp_path: Path, rng: np.random.Generator) -> None:
    """MatMul and Add, a Gemm of other factors, a Reshape or Squeeze, and a Softmax at the end."""
    body = [node("Conv", "images c.weight", "c"), node("Relu", "c", "r")]
    constants = {"c.weight": rng.standard_normal((8, 3, 3, 3), np.float32),
                 "b": rng.standard_normal(CLASSES, np.float32),
                 "w": rng.standard_normal((8, CLASSES), np.float32), "shape": numbers(0, -1), "axes": numbers(2, 3)}
    pooled = [*body, node("GlobalAveragePool", "r", "p")]
    for number, nodes in enumerate((
        [*pooled, node("Reshape", "p shape", "f"), node("MatMul", "f w", "m"), node("Add", "b m", "scores")],
        [*pooled, node("Squeeze", "p axes", "f"), node("Gemm", "f w b", "scores", alpha=0.5, beta=2.0)],
        [*body, node("ReduceMean", "r", "f", axes=[2, 3], keepdims=0), node("MatMul", "f w", "scores")],
    )):
        assert_same(tmp_path / f"head{number}.onnx", model(nodes, constants), rng)
    nodes = [*pooled, node("Flatten", "p", "f"), node("Gemm", "f w b", "g"), node("Softmax", "g", "scores")]
    images = rng.standard_normal((2, SIZE, SIZE, 3), np.float32)
    content = model(nodes, constants)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"images": np.ascontiguousarray(images.transpose(0, 3, 1, 2))})
    np.testing.assert_allclose(by_us(tmp_path / "softmax.onnx", content, images), wanted, atol=1e-5)


@pytest.mark.parametrize("order", ["z m", "m z"])
def test_a_product_that_is_read_with_and_without_its_bias(order: str, tmp_path: Path, rng: np.random.Generator) -> None:
    nodes = [node("Conv", "images a", "x"), node("GlobalAveragePool", "x", "p"), node("Flatten", "p", "f"),
             node("MatMul", "f v", "m"), node("Add", "m b", "z"), node("Sigmoid", order.split()[0], "gate"),
             node("Mul", f"gate {order.split()[1]}", "both"), node("Gemm", "both w", "scores")]
    constants = {name: rng.standard_normal(shape, np.float32) for name, shape in (
        ("a", (8, 3, 3, 3)), ("v", (8, 6)), ("b", (6,)), ("w", (6, CLASSES)))}
    assert_same(tmp_path / "net.onnx", model(nodes, constants), rng)


def test_a_convolution_as_classifier(tmp_path: Path, rng: np.random.Generator) -> None:
    nodes = [node("Conv", "images a", "x"), node("Relu", "x", "r"), node("Conv", "r b", "c"),
             node("GlobalAveragePool", "c", "p"), node("Flatten", "p", "scores")]
    constants = {"a": rng.standard_normal((8, 3, 3, 3), np.float32),
                 "b": rng.standard_normal((CLASSES, 8, 1, 1), np.float32)}
    assert_same(tmp_path / "net.onnx", model(nodes, constants), rng)


def test_all_pixels_are_read(tmp_path: Path, rng: np.random.Generator) -> None:
    """A fully connected layer behind images fits one size, which the file says; else its weights tell it."""
    nodes = [node("Conv", "images a", "x", strides=[2, 2]), node("Relu", "x", "r"), node("Flatten", "r", "f"),
             node("Gemm", "f w", "scores", transB=1)]
    constants = {"a": rng.standard_normal((4, 3, 3, 3), np.float32),
                 "w": rng.standard_normal((CLASSES, 4 * 19 * 19), np.float32) / 20}
    for name, shape in (("said", ("N", 3, 40, 40)), ("unsaid", ("N", 3, "H", "W"))):
        assert_same(tmp_path / f"{name}.onnx", model(nodes, constants, shape=shape), rng, size=40)
        assert weights.read(str(tmp_path / f"{name}.onnx")).trained.config.image_size == 40 - (name == "unsaid")


FIRST: dict[str, Case] = {  # from the images, x, to the input of the network behind them, y
    "numbers": lambda rng: ([node("Sub", "x a", "s"), node("Div", "s b", "y")],
                            {"a": vector(0.4), "b": vector(0.7)}),
    "Relu": one("Relu"),
    "Clip": one("Clip"),
    "Add": lambda rng: ([node("Add", "x x", "y")], {}),
    "BatchNormalization": lambda rng: ([node("BatchNormalization", "x g g g g", "y")], {"g": uniform(rng, 3)}),
    "MaxPool": one("MaxPool", kernel_shape=[2, 2]),
    "swapped colours": lambda rng: (
        [*(node("Slice", f"x n{place} n{place + 1} n1", f"c{place}") for place in range(3)),
         node("Concat", "c2 c1 c0", "y", axis=1)], {f"n{place}": numbers(place) for place in range(4)}),
    "cut pixels": lambda rng: ([node("Slice", "x begin end axis", "y")],
                              {"begin": numbers(3), "end": numbers(20), "axis": numbers(2)}),
    "PRelu": lambda rng: ([node("PRelu", "x s", "y")], {"s": uniform(rng, 3, 1, 1)}),
    "mean of rows": lambda rng: ([node("ReduceMean", "x", "m", axes=[3]), node("Mul", "x m", "y")], {}),
    "mean of colours": lambda rng: ([node("ReduceMean", "x", "m", axes=[1]), node("Add", "x m", "y")], {}),
    "LayerNormalization": lambda rng: ([node("LayerNormalization", "x g", "y")], {"g": uniform(rng, SIZE)}),
    "Transpose": lambda rng: ([node("Transpose", "x", "y", perm=[0, 1, 3, 2])], {}),
}


@pytest.mark.parametrize("end", ["Conv", "Flatten"])
@pytest.mark.parametrize("name", FIRST)
def test_operators_that_read_images_read_them_in_nchw(name: str, end: str, tmp_path: Path, rng: np.random.Generator
                                                      ) -> None:
    nodes, constants = FIRST[name](rng)
    if end == "Conv":
        rest = [node("Conv", "y kernels", "c"), node("Sigmoid", "c", "r"), node("GlobalAveragePool", "r", "p"),
                node("Flatten", "p", "f")]
        features = 8
    else:
        rest = [node("Flatten", "y", "f")]
        features = 3 * {"MaxPool": 31 * 31, "cut pixels": 17 * SIZE}.get(name, SIZE * SIZE)
    constants = constants | {"w": rng.standard_normal((features, CLASSES)) / np.sqrt(features / 9)}
    constants = constants | ({"kernels": rng.standard_normal((8, 3, 3, 3))} if end == "Conv" else {})
    whole = [node("Identity", "images", "x"), *nodes, *rest, node("MatMul", "f w", "scores")]
    arrays = {key: value if value.dtype == np.int64 else value.astype(np.float32) for key, value in constants.items()}
    assert_same(tmp_path / "net.onnx", model(whole, arrays), rng)
    exported, _ = export_onnx(weights.load(str(tmp_path / "net.onnx"), quiet=True))
    images = rng.standard_normal((1, 3, SIZE, SIZE), np.float32)
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"data": images})  # which has the softmax
    np.testing.assert_allclose(found, by_onnx_runtime(model(whole, arrays), images), atol=1e-5)


def test_channels_last(tmp_path: Path, rng: np.random.Generator) -> None:
    """As exported from TensorFlow: transposed before the first convolution."""
    nodes = [node("Transpose", "images", "t", perm=[0, 3, 1, 2]), node("Conv", "t a", "x"), node("Relu", "x", "r"),
             node("GlobalAveragePool", "r", "p"), node("Flatten", "p", "f"), node("Gemm", "f w", "scores", transB=1)]
    constants = {"a": rng.standard_normal((8, 3, 3, 3), np.float32),
                 "w": rng.standard_normal((CLASSES, 8), np.float32)}
    content = model(nodes, constants, shape=("N", SIZE, SIZE, 3))
    images = rng.standard_normal((2, SIZE, SIZE, 3), np.float32)
    found = by_us(tmp_path / "net.onnx", content, images)
    np.testing.assert_allclose(found, by_onnx_runtime(content, images), atol=1e-5)


def test_names_of_layers(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "net.onnx").write_bytes(around(*CASES["BatchNormalization"](rng), rng))
    found = weights.read(str(tmp_path / "net.onnx"))
    assert set(found.trained.params) == {"first_weight", "first_bias", "n_gamma", "n_beta", "head_weight", "head_bias"}
    assert (found.classifier, found.num_classes) == ("head_weight", CLASSES)


WRONG = {
    "an unknown operator": ([node("Relu", "x", "r"), node("InstanceNormalization", "r s s", "y")],
                            "this program does not read the operator InstanceNormalization (y): use only "),
    "unequal pads": ([node("Conv", "x w", "y", pads=[0, 0, 1, 1])],
                     "Conv 'y' has pads=[0, 0, 1, 1], which differ between the sides"),
    "an even kernel, padded to its size": ([node("MaxPool", "x", "y", kernel_shape=[2, 2], auto_pad="SAME_UPPER")],
                                           "MaxPool 'y' has auto_pad=SAME_UPPER with a kernel of (2, 2)"),
    "a mean over channels": ([node("ReduceMean", "x", "y")], "ReduceMean 'y' is over all dimensions"),
    "a mean over images": ([node("ReduceMean", "x", "y", axes=[0])], "ReduceMean 'y' is over the images of a batch"),
    "slopes for each column": ([node("PRelu", "x columns", "y")], "PRelu 'y' has slopes of the shape (15,)"),
    "slopes for each row": ([node("Slice", "x zero six two", "z"), node("PRelu", "z rows", "y")],
                            "PRelu 'y' has slopes of the shape (6, 1)"),
    "a constant for each channel": ([node("Mul", "x s", "y")], "Mul 'y' has a constant of the shape (6, 1, 1)"),
    "weights that are computed": ([node("Relu", "x", "v"), node("MatMul", "x v", "y")],
                                  "MatMul 'y' reads v as its input 1, which must be a constant of the file"),
    "a constant that is computed with": ([node("Relu", "w", "v"), node("Conv", "x v", "y")],
                                         "Relu 'v' reads the constant w as its input 0, which must be computed"),
    "a softmax in the middle": ([node("Softmax", "x", "y", axis=1)], "Softmax 'y' is not the model's last operator"),
    "steps": ([node("Slice", "x zero six one two", "y")], "Slice 'y' has steps=(2,): only 1 is supported"),
    "half precision": ([node("Cast", "x", "half", to=TensorProto.FLOAT16), node("Cast", "half", "y", to=1)],
                       "Cast 'half' has to=10, which this program does not have: it must be 1"),
    "an Erf that is no GELU": ([node("Erf", "x", "y")], "Erf 'y' is not part of a GELU, which reads x / sqrt(2)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    nodes, sentence = WRONG[name]
    constants = {"w": rng.standard_normal((CHANNELS, CHANNELS, 3, 3)), "s": uniform(rng, CHANNELS, 1, 1),
                 "columns": uniform(rng, 15), "rows": uniform(rng, CHANNELS, 1),
                 "zero": numbers(0), "six": numbers(6), "one": numbers(1), "two": numbers(2)}
    file = tmp_path / "net.onnx"
    file.write_bytes(around(nodes, constants, rng))
    assert refused(file).startswith(f"{file}: {sentence}")


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_a_window_of_padding_alone_is_refused(op: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """ONNX leaves it out, and MXNet does not. The other windows that reach beyond the padding are right."""
    file = tmp_path / "net.onnx"
    file.write_bytes(around(*one(op, kernel_shape=[2, 2], strides=[2, 2], pads=[1] * 4, ceil_mode=1)(rng), rng))
    assert "Pooling 'y' has windows outside its 15x15 input (kernel=(2, 2), stride=(2, 2), pad=(1, 1)" in refused(file)
    for stride in (2, 3):
        last = one(op, kernel_shape=[4, 4], strides=[stride] * 2, pads=[1] * 4, ceil_mode=1)
        assert_same(tmp_path / f"last{stride}.onnx", around(*last(rng), rng), rng)


def refused(file: Path) -> str:
    with pytest.raises(UserError) as error:
        weights.read(str(file))
    assert "\n" not in str(error.value)
    assert not plugins.find("model", file.name)
    return str(error.value)


def test_damaged_files(tmp_path: Path, rng: np.random.Generator) -> None:
    content = around(*CASES["Relu"](rng), rng)
    file = tmp_path / "net.onnx"
    for damaged in (content[:-40], b"no protobuf" * 9, b"{}"):
        file.write_bytes(damaged)
        assert refused(file).startswith(f"{file} ") or f"{file}:" in refused(file)
    file.write_bytes(model([node("Identity", "images", "scores")], {}, shape=("N", 3, SIZE)))
    assert "has the shape [None, 3, 32]: a network for images reads (N, 3, size, size)" in refused(file)
    file.write_bytes(model([node("Identity", "images", "scores")], {}))
    assert "ends in transpose (data_nchw): let it end in the classes' scores" in refused(file)
    file.write_bytes(model([node("Relu", "images", "a"), node("Tanh", "images", "b")], {}, outputs=("a", "b")))
    assert "it has 1 inputs and 2 outputs: a network for images has one of each" in refused(file)


@pytest.mark.parametrize("name", ["mobilenet_v2_0_25", *(pytest.param(name, marks=pytest.mark.long) for name in (
    "resnet50_v1", "densenet121", "squeezenet1_1", "resnet18"))])
def test_our_own_exports(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Our own exports are read as the exported network, with its BatchNorms; and as the network of any ONNX file."""
    params, aux = models.create(name, CLASSES).initial_values(seed=int(rng.integers(1000)), zero_init_residual=False)
    for each, array in (*params.items(), *aux.items()):
        if array.ndim == 1:
            array[:] = rng.uniform(0.5, 1, array.shape) if each.endswith(("_gamma", "_var")) else array
        else:  # no layer makes its values much smaller or larger
            array[:] = rng.standard_normal(array.shape) * np.sqrt(3 / np.prod(array.shape[1:]))
    names = [str(label) for label in range(CLASSES)]
    trained = Checkpoint(params, aux, {}, Config(model=name, image_size=64, label_smoothing=0.0), names, names)
    content, _ = export_onnx(trained)
    images = rng.standard_normal((2, 64, 64, 3), np.float32)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"data": np.ascontiguousarray(images.transpose(0, 3, 1, 2))})
    assert np.ptp(wanted) > 0.01
    foreign = onnx.load_from_string(content)
    foreign.producer_name = "another program"
    for file, bytes_, model_name in (("own.onnx", content, name), ("foreign.onnx", foreign.SerializeToString(),
                                                                  "foreign.onnx")):
        (tmp_path / file).write_bytes(bytes_)
        found = weights.load(str(tmp_path / file), quiet=True)
        assert found.config.model == model_name
        graph = models.create(model_name, CLASSES).graph
        executor = create_executor("mxnet", graph, {"data": images.shape, "softmax_label": (2,)})
        executor.set_params(found.params, found.aux)
        np.testing.assert_allclose(executor.forward(mx.nd.array(images)).asnumpy(), wanted, atol=1e-4)


def test_another_number_of_classes(tmp_path: Path, rng: np.random.Generator) -> None:
    made = network_file.read_onnx("net.onnx", around(*CASES["Relu"](rng), rng))
    assert made.classifier["num_hidden"] == CLASSES and made(7)["head"]["num_hidden"] == 7


@pytest.mark.parametrize("damage, words", [
    ("", ""), ("missing", "has its weights in net.onnx.data, which is not beside it: copy that file there too"),
    ("short", "net.onnx.data is too short for the weights"),
    ("outside", "has weights in ../net.onnx.data, outside its folder: write"),
    ("offset -4", "net.onnx is not a complete ONNX file (its weights w have no valid place in another file)"),
    ("length 4", "net.onnx is not a complete ONNX file (its weights w have no valid place in another file)"),
    ("offset 1000000000000", "net.onnx.data is too short for the weights w of net.onnx: copy or write both files")])
def test_weights_in_a_file_beside_it(damage: str, words: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """PyTorch writes its models so. What is read is one piece, which a run can keep."""
    weight, bias = rng.standard_normal((5, 3, 3, 3), np.float32), rng.standard_normal(5, np.float32)
    nodes = [onnx.helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3]),
             onnx.helper.make_node("GlobalAveragePool", ["c"], ["p"]), onnx.helper.make_node("Flatten", ["p"], ["f"]),
             onnx.helper.make_node("Gemm", ["f", "g", "b"], ["y"], transB=1)]
    values = {"w": weight, "g": np.eye(5, dtype=np.float32), "b": bias}
    graph = onnx.helper.make_graph(
        nodes, "net", [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 3, 8, 8])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 5])],
        [onnx.numpy_helper.from_array(array, name) for name, array in values.items()])
    path, data = tmp_path / "net.onnx", tmp_path / "net.onnx.data"
    onnx.save(onnx.helper.make_model(graph), path, save_as_external_data=True, location=data.name, size_threshold=0)
    if damage == "missing":
        data.unlink()
    elif damage == "short":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage:
        key, value = ("location", "../net.onnx.data") if damage == "outside" else damage.split()
        saved = onnx.load_model(path, load_external_data=False)
        (entry,) = (each for each in saved.graph.initializer[0].external_data if each.key == key)
        entry.value = value
        path.write_bytes(saved.SerializeToString())
    if damage:
        with pytest.raises(UserError, match=re.escape(words)):
            onnx_reader.content_of(path)
        return
    content = onnx_reader.content_of(path)
    assert str(data) not in str(content) and content == onnx_reader.content_of(path)
    data.unlink()
    found = onnx_reader.read("net.onnx", content).weights
    assert sorted(array.size for array in found.values()) == [5, 25, 135]
    assert any(np.array_equal(array, weight) for array in found.values())


def changed(change: Callable[[Any], None], rng: np.random.Generator) -> bytes:
    """A complete model in which something is wrong."""
    proto = onnx.load_model_from_string(around(*CASES["Relu"](rng), rng))
    change(proto)
    content: bytes = proto.SerializeToString()
    return content


def without(name: str) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        del proto.graph.node[0].attribute[:]
        getattr(proto.graph.node[0], name)[1:] = []

    return change


def with_node(op: str, domain: str = "", inputs: Sequence[str] = ("x",), **attributes: Any) -> Callable[[Any], None]:
    """Changes the node after the first convolution."""
    def change(proto: Any) -> None:
        made = onnx.helper.make_node(op, inputs, proto.graph.node[1].output, domain=domain, **attributes)
        proto.graph.node[1].CopyFrom(made)

    return change


COMPLETE: dict[str, tuple[Callable[[Any], None], str]] = {
    "opset 6": (lambda proto: setattr(proto.opset_import[0], "version", 6), " has opset 6, and this program reads "
                "opset 7 or later: export it again, or convert it with onnx.version_converter.convert_"),
    "no opset": (lambda proto: proto.ClearField("opset_import"), " is not a complete ONNX file (it does not say its"),
    "no shape": (lambda proto: proto.graph.input[0].type.tensor_type.ClearField("shape"),
                 ": its input images has no shape: export the model with the shape (N, 3, size, size)"),
    "no type": (lambda proto: proto.graph.input[0].ClearField("type"), ": its input images has no shape: export"),
    "another domain": (with_node("Gelu", "com.microsoft"), ": the operator Gelu (y) belongs to com.microsoft, and this "
                       "program reads ONNX's own operators alone: export the model without"),
    "a missing input": (without("input"), ": Conv 'x' cannot be read (Node"),
    "no input": (with_node("Relu", inputs=[]), ": Relu 'y' cannot be read (Node"),
    "an unknown input": (with_node("Relu", inputs=["none"]), ": Relu 'y' reads none as its input 0, which must be"),
    "a missing attribute": (with_node("Concat"), ": Concat 'y' cannot be read (Required attribute 'axis' is missing): "
                            "check its inputs and attributes, or export the model again"),
    "an attribute's type": (with_node("MaxPool", kernel_shape=[2, 2], strides=2.5), ": MaxPool 'y' cannot be read (M"),
    "strides": (with_node("MaxPool", kernel_shape=[2, 2], strides=[2]), ": MaxPool 'y' has strides=[2], which is not"),
    "no strides": (with_node("MaxPool", kernel_shape=[2, 2], strides=[0, 0]), ": MaxPool 'y' has strides=[0, 0], wh"),
    "no starts": (with_node("Slice"), ": Slice 'y' has starts=() and ends=(): it needs as many of both"),
    "text": (with_node("Constant", inputs=[], value_string="a"), ": Constant 'y' has value_string: only a dense "),
    "two values": (with_node("Constant", inputs=[], value_int=1, value_float=1.0), ": Constant 'y' has value_"),
    "a tensor's type": (lambda proto: setattr(proto.graph.initializer[0], "data_type", 0), ": its tensor "),
    "a tensor's length": (lambda proto: setattr(proto.graph.initializer[0], "raw_data", b"abc"), ": its tensor "),
    "a kernel of three": (lambda proto: proto.graph.initializer[0].dims.append(1), ": Conv 'x' has weights of the "),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_what_is_wrong_in_a_complete_file(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """The sentence names it."""
    change, sentence = COMPLETE[name]
    file = tmp_path / "net.onnx"
    file.write_bytes(changed(change, rng))
    for read in (weights.read, lambda place: plugins.load([place])):
        with pytest.raises(UserError) as error:
            read(str(file))
        assert str(error.value).startswith(f"{file}{sentence}") and "\n" not in str(error.value)


def test_cut_off_files(tmp_path: Path, rng: np.random.Generator) -> None:
    content, file = around(*CASES["Relu"](rng), rng), tmp_path / "net.onnx"
    for length in (*rng.integers(1, len(content), 8).tolist(), len(content) - 1):
        file.write_bytes(content[:length])
        for read in (weights.read, lambda place: plugins.load([place])):
            with pytest.raises(UserError, match=f"{file} is not a complete ONNX file"):
                read(str(file))
    file.write_bytes(b"")
    with pytest.raises(UserError, match=f"{file} is empty: fetch or write it again"):
        plugins.load([str(file)])


@pytest.mark.parametrize("opset", [7, 9])
def test_shapes_that_nobody_knows(opset: int, rng: np.random.Generator) -> None:
    """A file without intermediate shapes, in which inference stops at another program's attribute."""
    content = onnx.load_model_from_string(around(*CASES["Relu"](rng), rng))
    content.opset_import[0].version = opset
    content.graph.ClearField("value_info")
    dead = onnx.helper.make_node("Relu", [], ["dead"])  # which makes ONNX's shape inference fail
    content.graph.node.insert(0, dead)
    read = onnx_reader.read("net.onnx", content.SerializeToString())
    assert [each.op for each in read.graph][-1] == "FullyConnected"
