"""The program that measures INT8 on the CPU: what it times computes, and in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from train.models import resnet


def test_both_files_compute_and_take_turns(
    benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(resnet, "FIRST_WIDTH", 8)
    program = benchmark_module("int8_cpu")
    contents = program.network_files("resnet18", classes=5, size=32)
    assert contents["int8"].count(b"QuantizeLinear") > 20 > contents["fp32"].count(b"QuantizeLinear") == 0
    images = np.random.default_rng(0).standard_normal((2, 3, 32, 32), dtype=np.float32)
    ways, turns = program.passes(contents, images, threads=1), []
    for once in ways.values():
        (probabilities,) = once()
        np.testing.assert_allclose(probabilities.sum(axis=1), [1, 1], rtol=1e-5)
    times = program.measure({name: lambda name=name: turns.append(name) for name in ways}, rounds=3, warm_up=1)
    assert turns == ["int8", "fp32"] * 4 and [len(each) for each in times.values()] == [3, 3]
