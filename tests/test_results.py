"""Every published figure follows from the raw data in its file (benchmarks/README.md says what a file holds)."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))
KEYS = {
    "name", "value", "unit", "spread", "peer", "ratio", "hardware", "versions", "commit", "command", "date", "step_ms"
}  # fmt: skip


def faults(result: dict[str, Any], file_name: str) -> list[str]:
    """What is wrong with a result, in words; empty for a good one."""
    if result.keys() != KEYS:
        return [f"keys differ: {sorted(result.keys() ^ KEYS)}"]
    found = []
    value, unit, times = result["value"], result["unit"], result["step_ms"]
    if f"{result['name']}.json" != file_name:
        found.append("the name is not the file's")
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        return [*found, f"the value {value} is no positive number"]
    if len(times) < 5 or not all(isinstance(t, (int, float)) and t > 0 for t in times):
        return [*found, "step_ms needs at least 5 positive times"]

    if unit == "images/sec":
        images = value * statistics.median(times) / 1e3  # of one step: not a key, but a whole number
        batch = re.search(r"_b(\d+)_.*_(\d+)gpu", file_name)
        expected = int(batch[1]) * int(batch[2]) if batch else max(round(images), 1)
        # 0.5 %: the median of an even number of speeds is not exactly the inverse of the median of the times
        if not math.isclose(images, expected, rel_tol=5e-3):
            found.append(f"{value} images/sec at the median of step_ms are {images:.3f} images, not {expected}")
        values = [expected / (t / 1e3) for t in times]
    elif unit == "seconds":
        values = [t / 1e3 for t in times]
        if not math.isclose(value, statistics.median(values), rel_tol=1e-3):
            found.append(f"the value {value} is not the median of step_ms")
    else:
        values = []
    if values:
        quartile1, _, quartile3 = statistics.quantiles(values, n=4, method="inclusive")
        # Quartiles have several usual definitions, which differ by a fraction of the spread.
        if not math.isclose(result["spread"], (quartile3 - quartile1) / 2, rel_tol=0.25, abs_tol=1e-3 * value):
            found.append(f"the spread {result['spread']} is not half the interquartile range of step_ms")

    if result["peer"] is None:
        if result["ratio"] is not None:
            found.append("a ratio without a peer")
    elif result["peer"].keys() != {"name", "value"}:
        found.append("the peer has other keys than name and value")
    elif not math.isclose(result["ratio"] or 0.0, value / result["peer"]["value"], rel_tol=1e-2):
        found.append(f"the ratio {result['ratio']} is not the value over the peer's")

    if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", result["commit"]):
        found.append(f"{result['commit']!r} is no commit")
    try:
        datetime.fromisoformat(result["date"].replace("Z", "+00:00"))
    except ValueError:
        found.append(f"{result['date']!r} is no date")
    if not all(result[key] for key in ("hardware", "versions", "command")):
        found.append("hardware, versions or command is empty")
    if re.search(r"(^|[\s=\"'])/\w", result["command"]):
        found.append("the command holds a path of the machine it ran on")
    return found


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_published_result(path: Path) -> None:
    assert faults(json.loads(path.read_text()), path.name) == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_published_result_is_explained(path: Path) -> None:
    assert path.name in (BENCHMARKS / "README.md").read_text()


def good_result() -> dict[str, Any]:
    times = [random.Random(1).uniform(99, 101) for _ in range(31)]
    speeds = [512 / (t / 1e3) for t in times]
    quartiles = statistics.quantiles(speeds, n=4, method="inclusive")
    value = statistics.median(speeds)
    return {
        "name": "resnet50_fp16_b256_synthetic_2gpu",
        "value": value,
        "unit": "images/sec",
        "spread": (quartiles[2] - quartiles[0]) / 2,
        "peer": {"name": "somebody else", "value": value / 2},
        "ratio": 2.0,
        "hardware": "2x NVIDIA H200",
        "versions": {"mxnet": "1.9.1"},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "command": "python benchmarks/one.py --batch 256",
        "date": "2026-01-02T03:04:05+00:00",
        "step_ms": times,
    }


NAME = "resnet50_fp16_b256_synthetic_2gpu.json"


def test_a_good_result_has_no_faults() -> None:
    assert faults(good_result(), NAME) == []


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("name", "another"),
        ("value", 5000.0),
        ("value", math.nan),
        ("unit", "seconds"),
        ("spread", 500.0),
        ("ratio", 2.2),
        ("ratio", None),
        ("peer", None),
        ("hardware", ""),
        ("versions", {}),
        ("commit", "none"),
        ("command", "python /home/somebody/one.py"),
        ("date", "yesterday"),
        ("step_ms", [1.0, 2.0]),
        ("extra", 1),
    ],
)
def test_a_wrong_result_is_found(key: str, wrong: Any) -> None:
    assert faults({**good_result(), key: wrong}, NAME)
