"""What the programs of this folder share, above all `write_result`: a published figure with its raw data, written to
benchmarks/results/<name>.json; README.md says what that holds.

    from record import Peer, write_result
    write_result("step_cpu", step_ms=ours, images_per_step=32, peer=Peer("stock Gluon", theirs))
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # the project need not be installed: all programs here import this first
    sys.path.insert(0, str(ROOT))

from common import environment  # noqa: E402
from common.command_line import exit_code_of  # noqa: E402
from common.errors import ProgramError, UserError  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
REAL_DATA = Path(os.environ.get("RESNET_REAL_DATA", ROOT.parent / "shared" / "data"))
SAMPLE = REAL_DATA / "imagenet_sample"
MIN_STEPS, MIN_RUNS = 5, 3  # of a figure in images/sec, and of one in seconds


def run(main: Callable[[], None]) -> None:
    """Run a program of this folder; exit code 2 for a user's mistake, 1 for what else goes wrong."""
    sys.exit(exit_code_of(main))


def flags(arguments: object, *names: str) -> list[str]:
    """These options as another program takes them."""
    return [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]


@dataclass(frozen=True)
class Peer:
    """What a figure is compared with, measured in the same run."""

    name: str
    step_ms: Sequence[float]
    """Raw times of steps of as many images as ours, or of whole runs, in ms."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of its libraries, where they are not ours."""
    others: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Times of its other ways to run, which were slower, by name."""


def best_peer(ways: Mapping[str, Sequence[float]], versions: Mapping[str, str]) -> Peer:
    """The way to run, of those that were measured, with the least median time."""
    best = min(ways, key=lambda name: statistics.median(ways[name]))
    return Peer(best, ways[best], versions, {name: times for name, times in ways.items() if name != best})


def times_in_turn(ways: Mapping[str, Callable[[], object]], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Times in ms of what computes on the CPU, by name: one run of each in turn, so that a slow spell of the machine
    hits them all."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(warm_up + rounds):
        for name, once in ways.items():
            start = time.perf_counter()
            once()
            if number >= warm_up:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def check_trained(what: str, losses: Sequence[float], loss_scales: Sequence[float]) -> None:
    """Raises ProgramError where the timed steps did no work that counts: a mean loss of a turn that is not finite, or a
    loss scale that fell, as it does when a step is skipped. `loss_scales`: before and after each turn, in order."""
    if not all(map(math.isfinite, losses)):
        raise ProgramError(f"the timed steps of {what} did not train: their loss is {losses}; nothing is published")
    if any(after < before for before, after in zip(loss_scales[::2], loss_scales[1::2], strict=True)):
        raise ProgramError(f"the timed steps of {what} did not all train: some were skipped, since the loss scale fell "
                           f"({loss_scales}); nothing is published")


def statistics_of(step_ms: Sequence[float], images_per_step: int | None, unit: str = "") -> dict[str, Any]:
    """`value` (median), `mean` and `spread` (half the interquartile range) with their `unit`: images/sec, or seconds
    where there are no images to count. The mean of a speed is that of all images over all the time. Of another unit
    the raw values are those of the figure themselves."""
    if unit:
        quartile1, median, quartile3 = statistics.quantiles(step_ms, n=4, method="inclusive")
        return {"value": median, "mean": statistics.fmean(step_ms), "unit": unit, "spread": (quartile3 - quartile1) / 2}
    # Of the times: with an even number of them the median of the speeds is another speed than that of the median time.
    marks = [*statistics.quantiles(step_ms, n=4, method="inclusive"), statistics.fmean(step_ms)]
    first, median, third, mean = [images_per_step * 1e3 / ms if images_per_step else ms / 1e3 for ms in marks]
    return {"value": median, "mean": mean, "unit": "images/sec" if images_per_step else "seconds",
            "spread": abs(third - first) / 2}


def rounded(step_ms: Sequence[float]) -> list[float]:
    """To 0.1 us: the shortest steps, of inference, take 0.4 ms."""
    return [round(ms, 4) for ms in step_ms]


def write_result(
    name: str,
    step_ms: Sequence[float],
    images_per_step: int | None = None,
    peer: Peer | None = None,
    watts: float = math.nan,
    sm_mhz: float = math.nan,
    folder: Path = RESULTS,
    unit: str = "",
) -> Path:
    """Write one figure and print it.

    step_ms          raw times of all counted steps, warm-up left out, in ms; at least MIN_STEPS, or MIN_RUNS
    images_per_step  images in one step (of all GPUs); None for a figure in seconds
    watts, sm_mhz    power and clock of the GPU in these steps, means; NaN where nothing tells them
    unit             of a figure that is no time, such as "top-1 %": `step_ms` then has the values of all runs
    """
    least = MIN_STEPS if images_per_step else MIN_RUNS
    if len(step_ms) < least:
        raise UserError(f"{name}: a figure needs at least {least} times, and {len(step_ms)} were measured; ask for "
                        "more steps, rounds or seeds")
    found = statistics_of(step_ms, images_per_step, unit)
    script, *arguments = sys.argv
    result = {
        "name": name,
        **found,
        "peer": _described(peer, images_per_step, unit) if peer else None,
        "ratio": None,
        "watts": None if math.isnan(watts) else round(watts, 1),
        "sm_mhz": None if math.isnan(sm_mhz) else round(sm_mhz),
        "hardware": _hardware(name),
        "versions": environment.versions(),
        "commit": environment.git_commit() or "",
        "command": shlex.join(["python", os.path.relpath(script, ROOT), *arguments]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step_ms": rounded(step_ms),
    }
    against = ""
    if result["peer"]:
        result["ratio"] = result["value"] / result["peer"]["value"]
        against = f", {result['ratio']:.3f} times {result['peer']['name']} ({result['peer']['value']:,.1f})"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{name}: {found['value']:,.1f} +/- {found['spread']:,.1f} {found['unit']}, mean {found['mean']:,.1f}"
          f"{against} -> {os.path.relpath(path)}", flush=True)
    return path


def _described(peer: Peer, images_per_step: int | None, unit: str) -> dict[str, Any]:
    """As a file holds it."""
    found = statistics_of(peer.step_ms, images_per_step, unit)
    others = {name: rounded(times) for name, times in peer.others.items()}
    return {"name": peer.name, "value": found["value"], "mean": found["mean"], "versions": dict(peer.versions),
            "step_ms": rounded(peer.step_ms), "others": others}


def _hardware(name: str) -> str:
    """The GPUs that the figure's name tells of, or one, though the machine may have more. Of a figure whose name says
    'cpu', and where there is no GPU, its cores."""
    machine = environment.hardware()
    if machine["gpus"] and not name.endswith("cpu"):
        used = re.search(r"(\d+)gpu$", name)
        return f"{used[1] if used else 1}x {machine['gpus'][0]}"
    return f"{machine['cpu_cores']} cores of {machine['cpu']}, {machine['memory_gib']:.0f} GiB"
