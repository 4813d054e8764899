"""The benchmark of recurrent layers: its requests to both sides, the end of its repetitions, and its results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import ProgramError, UserError
from graph_passes import Ref
from graph_passes.operators.rnn import ALGORITHMS
from train.recording.gpu_monitor import GpuReadings

# Stands in for peer_rnn.py: a step takes 0.4 ms eagerly, 0.3 ms as a CUDA graph.
FAKE_PEER = """
import json, sys
for line in sys.stdin:
    turn = json.loads(line)
    ms = {"eager": 0.4, "graph": 0.3}[turn["way"]]
    print(json.dumps({"name": "PyTorch 9.9 " + turn["way"], "versions": {"torch": "9.9"}, "step_ms": [ms] * 12,
                      "finite": turn["hidden"] != 13}), flush=True)
"""


@pytest.fixture
def rnn_layers(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("rnn_layers")


def turn_of(rnn_layers: Any, **changes: Any) -> Any:
    return rnn_layers.LayerCase(**{"mode": "lstm", "hidden": 8, "batch": 3, "steps": 5, "dtype": "float16",
                              "use": "training", "limit_seconds": 1.0, "warm_up_seconds": 0.0, **changes})


def test_all_combinations_are_measured(rnn_layers: Any) -> None:
    turns = list(rnn_layers.cases_of(rnn_layers.Options()))
    assert len({turn.name for turn in turns}) == len(turns) == 3 * 2 * len(rnn_layers.SIZES)
    assert "lstm_fp16_h4096_b128_t25_training" in {turn.name for turn in turns}


@pytest.mark.parametrize("size", ["1024/128", "1024/128/0", "1024/128/x", "1/2/3/4"])
def test_no_size(rnn_layers: Any, size: str) -> None:
    with pytest.raises(UserError, match=f"--sizes has {size}: give hidden/batch/steps"):
        list(rnn_layers.cases_of(rnn_layers.Options(sizes=(size,))))


@pytest.mark.parametrize("mode, gradients", [("lstm", 4), ("gru", 3)])
def test_the_layer(rnn_layers: Any, mode: str, gradients: int) -> None:
    """Both uses; training has gradients of data, weights and initial states."""
    turn = turn_of(rnn_layers, mode=mode)
    graph = turn.graph
    sizes = graph.infer_shapes(turn.shapes)
    assert len(graph.outputs) == 1 + gradients and sizes[Ref("rnn")] == (5, 3, 8)
    assert sizes[graph.outputs[2]] == sizes[Ref("parameters")]
    inference = turn_of(rnn_layers, mode=mode, use="inference")
    assert inference.graph.infer_shapes(inference.shapes)[Ref("rnn")] == (5, 3, 8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_that_are_not_finite_are_seen(rnn_layers: Any, dtype: str, rng: np.random.Generator) -> None:
    values = rng.standard_normal(1000).astype(np.float32)
    bits = rnn_layers.stored(values, dtype).view(rnn_layers.bits_of(dtype))
    assert rnn_layers.is_finite(bits, dtype)
    for bad in (np.inf, -np.inf, np.nan):
        values[int(rng.integers(1000))] = bad
        assert not rnn_layers.is_finite(rnn_layers.stored(values, dtype).view(rnn_layers.bits_of(dtype)), dtype)
        values[~np.isfinite(values)] = 0


class Clock:
    """A fake GPU: a step takes the next time of `step_ms`, and nothing else takes time."""

    def __init__(self, step_ms: Callable[[int], float]) -> None:
        self.now, self.steps, self.step_ms = 0.0, 0, step_ms

    def step(self) -> None:
        self.steps += 1
        self.now += self.step_ms(self.steps) / 1e3

    def monotonic(self) -> float:
        return self.now

    def timing_event(self) -> dict[str, float]:
        return {}

    def record(self, event: dict[str, float]) -> None:
        event["ms"] = 1e3 * self.now

    def elapsed_ms(self, start: dict[str, float], end: dict[str, float]) -> float:
        return end["ms"] - start["ms"]

    def synchronize(self) -> None: ...


def test_repetition_ends_when_the_median_is_known(rnn_layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With constant times, the measurement ends at once, with enough steps per sample; with varying times, at its
    limit."""
    monkeypatch.setattr(rnn_layers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    turn = turn_of(rnn_layers, warm_up_seconds=0.01)
    clock = Clock(lambda step: 0.5)
    assert rnn_layers.repeat(clock, clock.step, turn) == pytest.approx([0.5] * rnn_layers.LEAST_SAMPLES)
    assert clock.steps == 20 + 4 * rnn_layers.LEAST_SAMPLES, "the warm-up; four of 0.5 ms make 2 ms"
    random = np.random.default_rng(0)
    clock = Clock(lambda step: float(random.uniform(1, 9)))
    rnn_layers.repeat(clock, clock.step, turn)
    assert 1.0 <= clock.now < 1.2, "the limit, after the warm-up"


@pytest.fixture
def measured(rnn_layers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run the program with a layer of 0.2 ms and the fake peer; returns the lines that it wrote."""
    program = tmp_path / "peer.py"
    program.write_text(FAKE_PEER)
    monkeypatch.setattr(rnn_layers, "PEER", program)
    monkeypatch.setenv("PEER_PYTHON", sys.executable)
    made: list[str] = []

    class Ours:
        algorithm, times = "persist_static", {"standard": 0.5, "persist_static": 0.2}

        def __init__(self, tools: Any, turn: Any, algorithms: Any) -> None:
            assert algorithms == ALGORITHMS
            self.turn = turn
            made.append(turn.name)

        def measure(self) -> dict[str, Any]:
            return {"step_ms": [0.2] * 12, "finite": True}

        def close(self) -> None: ...

    class Monitor:
        def __init__(self, bus_id: str) -> None: ...
        def start(self) -> None: ...
        def sample(self) -> None: ...
        def close(self) -> None: ...
        def take(self) -> GpuReadings:
            return GpuReadings(600.0, 1.0, 10.0, 1900.0, 1.0)

    monkeypatch.setattr(rnn_layers, "Ours", Ours)
    monkeypatch.setattr(rnn_layers, "GpuMonitor", Monitor)
    monkeypatch.setattr(rnn_layers, "Gpu", lambda: SimpleNamespace(device=SimpleNamespace(pci_bus_id="none")))
    monkeypatch.setattr(rnn_layers, "toolchain", lambda gpu, tf32: None)

    def run(*options: str) -> list[dict[str, Any]]:
        made.clear()
        monkeypatch.setattr(sys, "argv", [rnn_layers.__file__, "--results", str(tmp_path), "--rounds", "2", *options])
        rnn_layers.main()
        first, *lines = map(json.loads, (tmp_path / "rnn_layers_1gpu.jsonl").read_text().splitlines())
        assert {"commit", "gpu", "versions"} <= first.keys()
        return [{**line, "made": line["name"] in made} for line in lines]

    return run


def test_what_is_written(measured: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = measured("--sizes", "8/3/5", "--dtypes", "float16", "--uses", "training")
    assert line["name"] == "lstm_fp16_h8_b3_t5_training"
    assert (line["ms"], len(line["step_ms"]), line["relative_error"]) == (0.2, 24, 0.0)
    assert line["ratio"] == 1.5 and line["peer"]["name"] == "PyTorch 9.9 graph" and len(line["peer"]["step_ms"]) == 24
    assert line["peer"]["others"] == {"PyTorch 9.9 eager": [0.4] * 24}
    # 2 * 5 * 3 * (4 * 8) * (8 + 8) for the forward pass, twice that for the backward pass
    assert line["tflops"] == round(3 * 15_360 / 0.2 / 1e9, 2)
    assert "geometric mean of 1: 1.50 times PyTorch's fastest way" in capsys.readouterr().out
    lines = measured("--sizes", "8/3/5", "16/3/5", "--dtypes", "float16", "--uses", "training")
    assert [each["made"] for each in lines] == [False, True], "it goes on where it was stopped"


def test_what_is_not_finite_is_not_written(measured: Callable[..., list[dict[str, Any]]]) -> None:
    with pytest.raises(ProgramError, match="eager computed numbers that are not finite for lstm_fp16_h13"):
        measured("--sizes", "13/3/5", "--dtypes", "float16", "--uses", "training")
