"""Recurrent layers on the CPU, in fp32, through MXNet's RNN."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from common.mxnet_compat import mx
from gpu_report.kernels_cpu import milliseconds
from gpu_report.recurrent import TRAINING, Layer, layer_graph
from graph_passes.executors.mxnet import check_recurrent
from graph_passes.operators.rnn import GATES
from train.devices import Placement


def open_machine(placement: Placement) -> CpuMachine:
    return CpuMachine()


class CpuMachine:
    """Implements `recurrent.Machine` on the CPU."""

    precisions = ("fp32",)

    def close(self) -> None:
        """Does nothing: this machine holds no memory between timings."""

    @contextlib.contextmanager
    def layer(self, layer: Layer, use: str, precision: str) -> Iterator[Callable[[], float]]:
        check_recurrent(layer_graph(layer.mode, layer.hidden, is_training=False))
        shape, state = (layer.steps, layer.batch, layer.hidden), (1, layer.batch, layer.hidden)
        largest = 1 / math.sqrt(layer.hidden)
        count = GATES[layer.mode] * layer.hidden * (2 * layer.hidden + 2)
        inputs = [mx.nd.random.uniform(-1, 1, shape), mx.nd.random.uniform(-largest, largest, (count,)),
                  *[mx.nd.zeros(state)] * (2 if layer.mode == "lstm" else 1)]
        head = mx.nd.random.uniform(-1, 1, shape)

        def forward() -> mx.nd.NDArray:
            return mx.nd.RNN(*inputs, mode=layer.mode, state_size=layer.hidden, num_layers=1)

        def both() -> None:
            with mx.autograd.record():
                result = forward()
            result.backward(head)
            for array in inputs:
                array.grad.wait_to_read()

        if use == TRAINING:
            for array in inputs:
                array.attach_grad()
        yield lambda: milliseconds(both if use == TRAINING else lambda: forward().wait_to_read())
