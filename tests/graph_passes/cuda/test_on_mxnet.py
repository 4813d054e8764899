"""Gates: what waits for the step's stream in MXNet's engine, and what does not. Without a GPU: the arrays are the
CPU's, and an event of the stream is one of threading."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from common.mxnet_compat import mx
from graph_passes.executors.cuda import on_mxnet
from graph_passes.executors.cuda.on_mxnet import OnMXNet

PATIENCE = 10.0  # s; after them what waits goes on, and the test fails


class Stream:
    """What it is asked to do is done when `end` is set."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(sync=lambda: self.end.wait(PATIENCE) or self.end.set())


class Bare(OnMXNet):
    """Without a network."""


Bare.__abstractmethods__ = frozenset()  # none of them is called


@pytest.fixture
def executor() -> Iterator[OnMXNet]:
    made = Bare.__new__(Bare)
    made._seen, made._pending, made._num_gates = [], {}, 0
    made._pass_gate = on_mxnet._ENGINE_CALLBACK(lambda run_context, number: made._pending.pop(number).sync())
    made._step = SimpleNamespace(gpu=Stream())  # type: ignore[assignment]
    yield made
    made._step.gpu.end.set()  # type: ignore[attr-defined]
    mx.nd.waitall()  # the callback is called as long as there are gates


@pytest.mark.parametrize("reading", [True, False])
def test_only_what_is_behind_a_gate_waits(executor: OnMXNet, reading: bool) -> None:
    """Three gates, as many as a host that is ahead of its GPU may have. A new array, as a vote among processes makes in
    every step, is one that the engine is asked to make ready for writing."""
    arrays = [mx.nd.zeros((3,)) for _ in range(3)]
    mx.nd.waitall()
    for array in arrays:
        executor._gate([array], reading=reading)
    assert mx.nd.array([2, 3], dtype="int32").asnumpy().tolist() == [2, 3]
    assert (arrays[0] + 1 if reading else mx.nd.ones((3,)) + 1).asnumpy().max() < 3
    end = executor._step.gpu.end  # type: ignore[attr-defined]
    assert not end.is_set()
    threading.Timer(0.1, end.set).start()
    arrays[0][:] = 4.0
    np.testing.assert_array_equal(arrays[0].asnumpy(), 4.0)
    assert end.is_set()
    assert len(executor._seen) == (0 if reading else 3)
