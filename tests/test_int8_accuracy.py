"""benchmarks/int8_accuracy.py: the runs that it trains, and the figure that it publishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ProgramError


@pytest.fixture
def program(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("int8_accuracy")


def test_the_recipe_is_the_presets(program: Any) -> None:
    config = program.configuration(program.Options(epochs=4, image_size=32))
    assert (config.model, config.epochs, config.image_size, config.batch_size) == ("resnet18", 4, 32, 512)
    assert config.warmup_epochs == pytest.approx(0.3)


def test_what_is_published(program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"seed": seed, "top1_float32": 0.9 + 0.01 * seed, "top1_int8": 0.895 + 0.01 * seed} for seed in (1, 2, 3)]
    program.publish("resnet18_int8_accuracy", lines, tmp_path)
    found = json.loads((tmp_path / "resnet18_int8_accuracy.json").read_text())
    assert found["value"] == pytest.approx(91.5) and found["peer"]["value"] == pytest.approx(92)
    assert found["unit"] == "top-1 %"
    assert "at most 0.50 points lost" in capsys.readouterr().out
    with pytest.raises(ProgramError, match="INT8 has lost 2.00 percentage points of top-1, more than 1"):
        program.publish("x", [{**line, "top1_int8": line["top1_float32"] - 0.02} for line in lines], tmp_path)
