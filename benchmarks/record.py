"""Shared by all programs of this folder: `write_result` writes a published figure to benchmarks/results/<name>.json.

The file also holds the figure's raw data; README.md describes its fields.

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
if str(ROOT) not in sys.path:  # lets the programs run without an installed project: all import this module first
    sys.path.insert(0, str(ROOT))

from common import environment  # noqa: E402
from common.command_line import exit_code_of  # noqa: E402
from common.errors import ProgramError, UserError  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
REAL_DATA = Path(os.environ.get("RESNET_REAL_DATA", ROOT.parent / "shared" / "data"))
SAMPLE = REAL_DATA / "imagenet_sample"
MIN_STEPS, MIN_RUNS = 5, 3  # least number of times for a figure in images/sec, and for one in seconds


def run(main: Callable[[], None]) -> None:
    """Run a program of this folder; exits with code 2 for a user's mistake, with 1 for any other error."""
    sys.exit(exit_code_of(main))


def flags(arguments: object, *names: str) -> list[str]:
    """The named options as command-line words for another program."""
    return [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]


@dataclass(frozen=True)
class Peer:
    """The program that a figure is compared with, measured in the same run."""

    name: str
    step_ms: Sequence[float]
    """Raw times in ms: of steps with as many images as ours, or of whole runs."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the peer's libraries, if they differ from ours."""
    others: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Times of the peer's slower modes, by name."""


def best_peer(modes: Mapping[str, Sequence[float]], versions: Mapping[str, str]) -> Peer:
    """The mode with the least median time."""
    best = min(modes, key=lambda name: statistics.median(modes[name]))
    return Peer(best, modes[best], versions, {name: times for name, times in modes.items() if name != best})


def times_in_turn(modes: Mapping[str, Callable[[], object]], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Time several functions on the CPU, alternating, so that a slow spell of the machine hits all of them.

    Returns the times in ms by name.
    """
    times: dict[str, list[float]] = {name: [] for name in modes}
    for number in range(warm_up + rounds):
        for name, once in modes.items():
            start = time.perf_counter()
            once()
            if number >= warm_up:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def check_trained(what: str, losses: Sequence[float], loss_scales: Sequence[float]) -> None:
    """Raise ProgramError if the timed steps did not train: if a round's mean loss is not finite, or a loss scale fell,
    which means that a step was skipped. `loss_scales` holds the scale before and after each round, in order."""
    if not all(map(math.isfinite, losses)):
        raise ProgramError(f"the timed steps of {what} did not train: their loss is {losses}; nothing is published")
    if any(after < before for before, after in zip(loss_scales[::2], loss_scales[1::2], strict=True)):
        raise ProgramError(f"the timed steps of {what} did not all train: some were skipped, since the loss scale fell "
                           f"({loss_scales}); nothing is published")


def statistics_of(step_ms: Sequence[float], images_per_step: int | None, unit: str = "") -> dict[str, Any]:
    """`value` (median), `mean` and `spread` (half the interquartile range) with their `unit`.

    The unit is images/sec, or seconds if there are no images to count. The mean speed is all images divided by all
    time. If `unit` is given, `step_ms` holds values of this unit instead of times.
    """
    if unit:
        quartile1, median, quartile3 = statistics.quantiles(step_ms, n=4, method="inclusive")
        return {"value": median, "mean": statistics.fmean(step_ms), "unit": unit, "spread": (quartile3 - quartile1) / 2}
    # Take the quantiles of the times. With an even number of times, the median speed is not the speed of the median
    # time.
    marks = [*statistics.quantiles(step_ms, n=4, method="inclusive"), statistics.fmean(step_ms)]
    first, median, third, mean = [images_per_step * 1e3 / ms if images_per_step else ms / 1e3 for ms in marks]
    return {"value": median, "mean": mean, "unit": "images/sec" if images_per_step else "seconds",
            "spread": abs(third - first) / 2}


def rounded(step_ms: Sequence[float]) -> list[float]:
    """Round to 0.1 us: the shortest steps, those of inference, take 0.4 ms."""
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

    step_ms          raw times of all timed steps in ms, without warm-up; at least MIN_STEPS, or MIN_RUNS
    images_per_step  images in one step (of all GPUs); None for a figure in seconds
    watts, sm_mhz    mean power and clock of the GPU in these steps; NaN if unknown
    unit             for a figure that is not a time, such as "top-1 %": `step_ms` then has the values of all runs
    """
    least = MIN_STEPS if images_per_step else MIN_RUNS
    if len(step_ms) < least:
        raise UserError(f"{name}: a figure needs at least {least} times, but {len(step_ms)} were measured; give more "
                        "steps, rounds or seeds")
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
    """The peer in the form of a result file."""
    found = statistics_of(peer.step_ms, images_per_step, unit)
    others = {name: rounded(times) for name, times in peer.others.items()}
    return {"name": peer.name, "value": found["value"], "mean": found["mean"], "versions": dict(peer.versions),
            "step_ms": rounded(peer.step_ms), "others": others}


def _hardware(name: str) -> str:
    """The hardware of a figure: as many GPUs as its name says, or one, although the machine may have more.

    The CPU cores, if the name ends in 'cpu' or there is no GPU.
    """
    machine = environment.hardware()
    if machine["gpus"] and not name.endswith("cpu"):
        used = re.search(r"(\d+)gpu$", name)
        return f"{used[1] if used else 1}x {machine['gpus'][0]}"
    return f"{machine['cpu_cores']} cores of {machine['cpu']}, {machine['memory_gib']:.0f} GiB"
