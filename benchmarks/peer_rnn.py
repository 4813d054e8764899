"""The peer of rnn_layers.py, which starts it and alternates with it: PyTorch's nn.LSTM, nn.GRU and nn.RNN.

    python benchmarks/peer_rnn.py       # then type: {"way": "graph", "mode": "lstm", "hidden": 1024, ...}

Each line of standard input is a measurement in JSON: the fields of rnn_layers.py's `LayerCase`, and a way to run it:

    eager   as written: forward and, in training, backward
    graph   the eager computation replayed as one CUDA graph, so that nothing waits for the host

The answer is a line with the milliseconds of each timed repetition, and whether all results were finite. Everything,
weights included, is in the given precision; fp32 is with or without TF32. In training, the gradients of data, weights
and initial states are written anew in each step, as in ours. It runs in its own interpreter, named by PEER_PYTHON.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

VERSIONS = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version())}
NAMES = {"eager": "eager", "graph": "in a CUDA graph"}
CAPTURE_WARM_UP = 3  # steps before a capture, which torch.cuda's notes ask for


class Layer:
    """One recurrent layer with random inputs, and its step in eager mode or as a CUDA graph."""

    def __init__(self, turn: dict[str, Any]) -> None:
        dtype = torch.float32 if turn["dtype"] in ("tf32", "float32") else getattr(torch, turn["dtype"])
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = turn["dtype"] == "tf32"
        hidden, batch = turn["hidden"], turn["batch"]
        kinds = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}
        self.training = turn["use"] == "training"
        self.network = kinds[turn["mode"]](hidden, hidden).to("cuda", dtype)
        options: Any = {"device": "cuda", "dtype": dtype}
        self.data = torch.randn(turn["steps"], batch, hidden, requires_grad=self.training, **options)
        states = [torch.zeros(1, batch, hidden, requires_grad=self.training, **options)
                  for _ in range(2 if turn["mode"] == "lstm" else 1)]
        self.states: Any = tuple(states) if turn["mode"] == "lstm" else states[0]
        self.head = torch.randn(turn["steps"], batch, hidden, **options)
        self.leaves = [self.data, *states, *self.network.parameters()]
        self.output = self.head

    def step(self) -> None:
        if not self.training:
            with torch.no_grad():
                self.output, _ = self.network(self.data, self.states)
            return
        for leaf in self.leaves:
            leaf.grad = None
        output, _ = self.network(self.data, self.states)
        output.backward(self.head)
        self.output = output.detach()

    def captured(self) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(CAPTURE_WARM_UP):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def is_finite(self) -> bool:
        results = [self.output, *(leaf.grad for leaf in self.leaves if leaf.grad is not None)]
        return all(bool(torch.isfinite(each).all()) for each in results)


def repeat(step: Callable[[], None], turn: dict[str, Any]) -> list[float]:
    """Milliseconds of a step, like rnn_layers.py's `repeat`; a sample has enough steps to be timed exactly."""
    begin = time.monotonic()
    num_steps = 0
    while time.monotonic() - begin < turn["warm_up_seconds"]:
        step()
        torch.cuda.synchronize()
        num_steps += 1
    per_sample = max(1, math.ceil(turn["sample_ms"] / (1e3 * turn["warm_up_seconds"] / num_steps)))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: list[float] = []
    begin = time.monotonic()
    while len(samples) < turn["least_samples"] or (
            time.monotonic() - begin < turn["limit_seconds"] and error_of_median(samples) > turn["wanted_error"]):
        start.record()
        for _ in range(per_sample):
            step()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / per_sample)
    return samples


def error_of_median(samples: list[float]) -> float:
    """Relative standard error of the median, from the order statistics that bound its 95 % confidence interval (McKean
    and Schrader, 1984)."""
    ordered, z = sorted(samples), 1.96
    below = max(0, math.floor((len(samples) + 1) / 2 - z * math.sqrt(len(samples) / 4)) - 1)
    return (ordered[-1 - below] - ordered[below]) / (2 * z) / statistics.median(samples)


def main() -> None:
    for line in sys.stdin:
        turn = json.loads(line)
        layer = Layer(turn)
        samples = repeat(layer.captured() if turn["way"] == "graph" else layer.step, turn)
        answer = {"name": f"PyTorch {torch.__version__} {NAMES[turn['way']]}", "versions": VERSIONS,
                  "step_ms": samples, "finite": layer.is_finite()}
        del layer
        torch.cuda.empty_cache()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
