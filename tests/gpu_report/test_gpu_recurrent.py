"""The section recurrent: its sizes, the layers it leaves out, and the layers on a CPU and on a GPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_report import recurrent, recurrent_cuda
from gpu_report.recurrent import INFERENCE, TRAINING, Layer
from gpu_report.section import Bench
from graph_passes.errors import GraphError
from graph_passes.graph import Ref
from graph_passes.operators.rnn import flops
from train.devices import Placement


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_relu"])
def test_layer(mode):
    """A layer counts as many operations as its operator; its training graph outputs a gradient for each input."""
    layer = Layer(mode, 8, 3, 5)
    graph = recurrent.layer_graph(mode, 8, is_training=False)
    assert layer.flops == flops(graph["rnn"], (5, 3, 8)) and str(layer) == "hidden 8, batch 3, 5 steps"
    training = recurrent.layer_graph(mode, 8, is_training=True)
    shapes = training.infer_shapes({"data": (5, 3, 8), "head": (5, 3, 8)})
    inputs = [shapes[Ref(name)] for name in training.variables if name != "head"]
    assert [shapes[ref] for ref in training.outputs[1:]] == inputs


def test_what_a_gpu_has_not_is_said(monkeypatch, tmp_path):
    class Machine:
        precisions = ("fp16",)

        def close(self) -> None: ...

        @contextlib.contextmanager
        def layer(self, layer: Layer, use: str, precision: str) -> Iterator[Callable[[], float]]:
            if layer.hidden > 1024:
                raise GraphError("there is no room for it")
            yield lambda: 2.0

    monkeypatch.setattr(recurrent_cuda, "open_machine", lambda placement: Machine())
    section = recurrent.measure(Bench(Placement("cuda", "gpu(0)", ""), "some GPU", tmp_path, 60.0))
    small = [layer for layer in recurrent.LAYERS if layer.hidden <= 1024]
    assert len(section.figures) == 2 * len(small)
    training, inference = section.figures[:2]
    assert training.what == "LSTM, forward and backward" and training.more["tflops"] == 3 * inference.more["tflops"]
    (note,) = section.notes
    assert note.endswith("more: there is no room for it")


ON_THE_CPU = """
from common.mxnet_compat import mx
from gpu_report.recurrent import INFERENCE, TRAINING, Layer
from gpu_report.recurrent_cpu import CpuMachine

seen, layer_of = [], mx.nd.RNN
mx.nd.RNN = lambda *inputs, **options: seen.append(inputs) or layer_of(*inputs, **options)
for mode in ("lstm", "gru", "rnn_relu"):
    for use in (TRAINING, INFERENCE):
        with CpuMachine().layer(Layer(mode, 8, 3, 5), use, "fp32") as sample:
            assert sample() > 0
        gradients = [array.grad for array in seen[-1]]
        assert all(gradient is None for gradient in gradients) if use == INFERENCE else all(
            gradient.abs().max().asscalar() > 0 for gradient in gradients), (mode, use)
"""


@pytest.mark.long
def test_layers_on_the_cpu():
    """The layers run in a separate process: MXNet's RNN needs oneDNN, which the tests turn off (conftest.py)."""
    environment = {name: value for name, value in os.environ.items() if name != "MXNET_MKLDNN_ENABLED"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", ON_THE_CPU], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_layer_on_the_gpu(precision, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path))
    machine = recurrent_cuda.open_machine(Placement("cuda", "gpu(0)", ""))
    times = []
    for use in (TRAINING, INFERENCE):
        with machine.layer(Layer("lstm", 64, 8, 6), use, precision) as sample:
            times.append(sample())
    assert times[0] > times[1] > 0
