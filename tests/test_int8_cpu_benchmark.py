"""benchmarks/int8_cpu.py: the timed networks compute correct results, and alternate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from train.models import resnet


@pytest.mark.long
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
    scores = {name: np.log(once()[0]) for name, once in ways.items()}
    noise, signal = (np.var(each, axis=1).mean() for each in (scores["int8"] - scores["fp32"], scores["fp32"]))
    assert noise < signal / 40  # 16 dB: 25 dB here, and about 0 dB with other weights
    times = program.times_in_turn({name: lambda name=name: turns.append(name) for name in ways}, rounds=3, warm_up=1)
    assert turns == ["int8", "fp32"] * 4 and [len(each) for each in times.values()] == [3, 3]
