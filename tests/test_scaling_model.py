"""The scaling model for many GPUs: limits that any such model must keep, and its fit to the measurements."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from common.command_line import exit_code_of


@pytest.fixture
def model(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("scaling_model")


def test_all_reduces(model: Any) -> None:
    """In one host a ring is 2 (n - 1) / n of the bytes and 2 (n - 1) hops; on many hosts a tree is faster."""
    machine = replace(model.fit(model.measurements()), nvlink_gbs=100.0, message_us=40.0, nvlink_hop_us=5.0)
    for n in range(2, 9):
        expected = 2 * (n - 1) / n * 0.5 + (40 + (2 * (n - 1) - 2) * 5) / 1e3
        assert model.all_reduce_ms(50e6, n, machine, "ring") == pytest.approx(expected)
    assert model.all_reduce_ms(0, 3584, machine, "ring") > 10 * model.all_reduce_ms(0, 3584, machine, "tree")
    free = replace(machine, nvlink_hop_us=0.0, network_hop_us=0.0, message_us=0.0)
    for algorithm in (*model.NCCL, "switches"):
        times = [model.all_reduce_ms(size, 8 * hosts, machine, algorithm)
                 for size, hosts in ((0, 1), (5e7, 1), (5e7, 2), (5e7, 64), (5e7, 448), (6e7, 448))]
        assert times == sorted(times)
        assert 0.5 <= model.all_reduce_ms(50e6, 3584, free, algorithm) <= 1


def test_the_fit_meets_what_it_is_fitted_to(model: Any) -> None:
    rows = model.measurements()
    machine = model.fit(rows)
    for row in rows:
        step = model.predict(machine, row["gpus"], row["batch"])
        assert step.ms == pytest.approx(median(row["step_ms"]), rel=1e-6 if row["gpus"] == 1 else 5e-3)
        for (_, size, _), ms in zip(row.get("buckets", ())[:2], row.get("all_reduce_ms", ())[:2], strict=True):
            assert model.all_reduce_ms(size, row["gpus"], machine, "ring") == pytest.approx(ms, rel=0.25)


def test_more_gpus_are_never_faster_for_each(model: Any) -> None:
    machine = model.fit(model.measurements())
    for batch in (16, 256):
        steps = [model.predict(machine, gpus, batch).ms for gpus in (1, 2, 4, 8, 32, 256, 3584)]
        assert all(earlier < later for earlier, later in itertools.pairwise(steps))
    assert 3.0 < model.largest_of(1000) < math.sqrt(2 * math.log(1000))  # 3.24
    far = replace(machine, network_hop_us=2 * machine.network_hop_us)
    assert model.predict(far, 3584, 16).ms / model.predict(machine, 3584, 16).ms == pytest.approx(1.077, abs=1e-3)
    # ready at the end, so that nothing hides its all-reduce
    one_bucket = replace(machine, buckets=((51_000_000, 1.0),))
    step = model.predict(one_bucket, 8, 256)
    assert step.exposed_ms == pytest.approx(step.all_reduce_ms) and step.exposed_ms > 0.2


@pytest.mark.parametrize("damage", [
    lambda text: "", lambda text: text[: len(text) // 2], lambda text: text.replace('"all_reduce_ms"', '"other"'),
    lambda text: "".join(line for line in text.splitlines(keepends=True) if json.loads(line)["gpus"] != 2)])
def test_damaged_measurements(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str], damage: Callable[[str], str]) -> None:
    """One sentence names the file, and nothing of its content is printed."""
    for name in model.FILES:
        (tmp_path / name).write_text((model.RESULTS / name).read_text())
    file = tmp_path / model.FILES[1]
    file.write_text(damage(file.read_text()))
    monkeypatch.setattr("sys.argv", ["scaling_model.py", "--results", str(tmp_path)])
    assert exit_code_of(model.main) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {file} is cut off or of another kind (") and not printed.out
