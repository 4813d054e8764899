"""Gates in MXNet's engine: which operations wait for the step's stream, and which do not. Runs without a GPU: the
arrays are on the CPU, and a threading event stands for an event of the stream. Also checks that the step itself needs
no MXNet."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from common.mxnet_compat import mx
from graph_passes.executors.cuda.engine import Engine

PATIENCE = 10.0  # seconds; then the waiting operations go on, and the test fails


@pytest.fixture
def end() -> Iterator[threading.Event]:
    """Set when the stream has finished its work."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def engine(end: threading.Event) -> Iterator[Engine]:
    made = Engine("gpu(0)", {})
    yield made
    end.set()
    mx.nd.waitall()  # the engine's callback must live as long as there are gates


@pytest.mark.parametrize("reading", [True, False])
def test_only_what_is_behind_a_gate_waits(engine: Engine, end: threading.Event, reading: bool) -> None:
    """Three gates, as many as a host that is ahead of its GPU may have. A vote among processes makes a new array in
    every step, which the engine must make ready for writing."""
    fired = SimpleNamespace(sync=lambda: end.wait(PATIENCE) or end.set())
    arrays = [mx.nd.zeros((3,)) for _ in range(3)]
    mx.nd.waitall()
    for array in arrays:
        engine.gate(fired, [array], reading=reading)
    assert mx.nd.array([2, 3], dtype="int32").asnumpy().tolist() == [2, 3]
    assert (arrays[0] + 1 if reading else mx.nd.ones((3,)) + 1).asnumpy().max() < 3
    assert not end.is_set()
    threading.Timer(0.1, end.set).start()
    arrays[0][:] = 4.0
    np.testing.assert_array_equal(arrays[0].asnumpy(), 4.0)
    assert end.is_set()
    assert len(engine._seen) == (0 if reading else 3)
    engine.wait()
    assert not engine._seen


WITHOUT_MXNET = """
import sys
sys.modules["mxnet"] = None  # whoever imports it gets ImportError
try:
    import mxnet
except ImportError:
    from graph_passes.executors.cuda.quantised import QuantisedNetwork
    from graph_passes.executors.cuda.training_step import TrainingStep
    print(TrainingStep.__name__, QuantisedNetwork.__name__)
"""


def test_the_step_knows_no_mxnet() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_MXNET], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "TrainingStep QuantisedNetwork\n", "")
