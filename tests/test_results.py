"""Every published figure follows from the raw data in its file (benchmarks/README.md describes the files)."""

from __future__ import annotations

import importlib
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
KEYS = {"name", "value", "mean", "unit", "spread", "peer", "ratio", "watts", "sm_mhz", "hardware", "versions", "commit",
        "command", "date", "step_ms"}
PEER_KEYS = {"name", "value", "mean", "versions", "step_ms", "others"}


def faults(result: dict[str, Any], file_name: str) -> list[str]:
    """The faults of a result, in words; empty for a correct one."""
    if result.keys() != KEYS:
        return [f"keys differ: {sorted(result.keys() ^ KEYS)}"]
    found = []
    value, unit, times = result["value"], result["unit"], result["step_ms"]
    if f"{result['name']}.json" != file_name:
        found.append("the name is not the file's")
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        return [*found, f"the value {value} is no positive number"]
    least = 5 if unit == "images/sec" else 3  # the others are of whole runs
    if len(times) < least or not all(isinstance(t, (int, float)) and t > 0 for t in times):
        return [*found, f"step_ms needs at least {least} positive times"]

    if unit == "images/sec":
        batch = re.search(r"_b(\d+)_.*_(\d+)gpu", file_name)
        # Images of one step: in the name, or the whole number that fits best, which must then fit well.
        images = int(batch[1]) * int(batch[2]) if batch else max(round(value * statistics.median(times) / 1e3), 1)
        values = [images / (t / 1e3) for t in times]
    elif unit == "seconds":
        values = [t / 1e3 for t in times]
    elif unit in ("top-1 %", "balanced accuracy %"):
        values = times
    else:
        return [*found, f"the unit {unit!r} is none of images/sec, seconds, top-1 % and balanced accuracy %"]
    quartile1, median, quartile3 = statistics.quantiles(values, n=4, method="inclusive")
    if unit == "images/sec":
        median = images * 1e3 / statistics.median(times)
    mean_ms = statistics.fmean(times)
    # 0.1 %: the raw times are rounded to 0.1 us (earlier ones to 1 us), and steps take 0.3 ms and more
    if not math.isclose(value, median, rel_tol=1e-3):
        found.append(f"the value {value} is not the median of step_ms, {median}")
    mean = images / (mean_ms / 1e3) if unit == "images/sec" else statistics.fmean(values)
    if not math.isclose(result["mean"], mean, rel_tol=1e-3):
        found.append(f"the mean {result['mean']} is not that of step_ms")
    if not math.isclose(result["spread"], (quartile3 - quartile1) / 2, rel_tol=1e-2, abs_tol=1e-3 * value):
        found.append(f"the spread {result['spread']} is not half the interquartile range of step_ms")

    if result["peer"] is None:
        if result["ratio"] is not None:
            found.append("a ratio without a peer")
    elif result["peer"].keys() != PEER_KEYS:
        found.append(f"the peer's keys differ: {sorted(result['peer'].keys() ^ PEER_KEYS)}")
    elif not math.isclose(result["ratio"] or 0.0, value / result["peer"]["value"], rel_tol=1e-2):
        found.append(f"the ratio {result['ratio']} is not the value over the peer's")

    if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", result["commit"]):
        found.append(f"{result['commit']!r} is no commit")
    try:
        datetime.fromisoformat(result["date"].replace("Z", "+00:00"))
    except ValueError:
        found.append(f"{result['date']!r} is no date")
    found += missing(result, value)
    if not all(result[key] for key in ("hardware", "versions", "command")):
        found.append("hardware, versions or command is empty")
    if re.search(r"(^|[\s=\"'])/\w", result["command"]):
        found.append("the command holds a path of the machine it ran on")
    return found


def missing(result: dict[str, Any], value: float) -> list[str]:
    """Faults of the peer's times, and of power and clock of a step on GPUs."""
    found = []
    if peer := result["peer"]:
        if not peer["step_ms"]:
            return ["the peer's step_ms is empty"]
        # The peer's steps have as many images as ours.
        expected = value * statistics.median(result["step_ms"]) / statistics.median(peer["step_ms"])
        if result["unit"] != "images/sec":
            expected = statistics.median(peer["step_ms"]) / (1e3 if result["unit"] == "seconds" else 1)
        if not math.isclose(peer["value"], expected, rel_tol=1e-3):
            found.append(f"the peer's value {peer['value']} is not the median of its step_ms")
        if any(statistics.median(times) < statistics.median(peer["step_ms"]) for times in peer["others"].values()):
            found.append("the peer has a faster way to run")
    if re.search(r"_b\d+_.*gpu$", result["name"]) and not all(
            isinstance(result[key], (int, float)) and result[key] > 0 for key in ("watts", "sm_mhz")):
        found.append("watts or sm_mhz is no positive number")
    return found


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_published_result(path: Path) -> None:
    assert faults(json.loads(path.read_text()), path.name) == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_published_result_is_explained(path: Path) -> None:
    """benchmarks/README.md has the result's name, or the pattern of its name."""
    names = re.findall(r"`results/([\w<>]+)\.json`", (BENCHMARKS / "README.md").read_text())
    assert any(re.fullmatch(re.sub("<[a-z]+>", r"\\w+?", name), path.stem) for name in names)


def good_result() -> dict[str, Any]:
    times = [random.Random(1).uniform(99, 101) for _ in range(31)]
    speeds = [512 / (t / 1e3) for t in times]
    quartiles = statistics.quantiles(speeds, n=4, method="inclusive")
    value = statistics.median(speeds)
    twice = [2 * t for t in times]
    return {
        "name": "resnet50_fp16_b256_synthetic_2gpu",
        "value": value,
        "mean": 512 / (statistics.fmean(times) / 1e3),
        "unit": "images/sec",
        "spread": (quartiles[2] - quartiles[0]) / 2,
        "peer": {"name": "somebody else", "value": value / 2, "mean": value / 2, "versions": {}, "step_ms": twice,
                 "others": {"slower": [2 * t for t in twice]}},
        "ratio": 2.0,
        "watts": 690.5,
        "sm_mhz": 1815,
        "hardware": "2x NVIDIA H200",
        "versions": {"mxnet": "1.9.1"},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "command": "python benchmarks/one.py --batch 256",
        "date": "2027-01-02T03:04:05+00:00",
        "step_ms": times,
    }


NAME = "resnet50_fp16_b256_synthetic_2gpu.json"


def test_a_good_result_has_no_faults() -> None:
    assert faults(good_result(), NAME) == []


@pytest.mark.parametrize("images_per_step", [17, None])
def test_what_the_benchmarks_write_has_no_faults(
    images_per_step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("sys.argv", [str(BENCHMARKS / "some.py"), "--batch", "17"])
    from record import Peer, write_result

    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    times, peer_times = ([rng.uniform(50, 80) for _ in range(24)] for _ in range(2))
    peer = Peer("a peer", peer_times, {"torch": "2"}, {"slower": [2 * ms for ms in peer_times]})
    path = write_result("some", times, images_per_step, peer, folder=tmp_path)
    result = json.loads(path.read_text())
    result["commit"] = result["commit"] or "0" * 40  # there is none outside a checkout
    assert faults(result, "some.json") == []
    assert result["command"] == "python benchmarks/some.py --batch 17"


@pytest.mark.parametrize("name, gpus, expected", [
    ("resnet50_fp16_b256_jpeg_2gpu", 4, "2x NVIDIA H200"),
    ("cifar10_time_to_accuracy", 4, "1x NVIDIA H200"),
    ("step_cpu", 4, "8 cores of a CPU, 16 GiB"),
    ("cifar10_time_to_accuracy", 0, "8 cores of a CPU, 16 GiB"),
])
def test_hardware_of_a_figure(name: str, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import record

    machine = {"cpu": "a CPU", "cpu_cores": 8, "memory_gib": 15.9, "gpus": ["NVIDIA H200"] * gpus}
    monkeypatch.setattr(record.environment, "hardware", lambda: machine)
    assert record._hardware(name) == expected


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("name", "another"),
        ("value", 5000.0),
        ("value", math.nan),
        ("mean", 5000.0),
        ("watts", None),
        ("sm_mhz", math.nan),
        ("peer", {**good_result()["peer"], "step_ms": []}),
        ("peer", {**good_result()["peer"], "step_ms": good_result()["step_ms"]}),
        ("peer", {**good_result()["peer"], "others": {"faster": good_result()["step_ms"]}}),
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


@pytest.mark.parametrize("program, arguments, sentence", [
    ("loader_cpu", ("--data", "nowhere"), "error: data path nowhere does not exist"),
    ("learn_gpu", ("--data", "."), "error: --data . has 0 folders with .JPEG files"),
    ("parity_pytorch", ("--data", "nowhere"), "error: PEER_PYTHON is not set"),
    ("cifar10_time_to_accuracy", ("--seeds", "1"), "error: --seeds 1: give at least 2"),
    ("bn_group", ("--gpus", "64"), "error: --gpus 64 must be from 2 to the number of NVIDIA GPUs here"),
    ("scaling_model", ("--results", "nowhere"), "error: nowhere/scaling_b64_4gpu.jsonl is missing"),
])
def test_bad_input_of_a_program(program, arguments, sentence, tmp_path, monkeypatch, capsys):
    """On bad input the program prints one sentence and exits with code 2, like every command line of this project."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("sys.argv", [f"{program}.py", *arguments])
    monkeypatch.delenv("PEER_PYTHON", raising=False)
    from record import run

    with pytest.raises(SystemExit) as end:
        run(importlib.import_module(program).main)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(sentence)
