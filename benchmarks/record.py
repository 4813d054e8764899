"""What the programs of this folder share, above all `write_result`: a published figure with its raw data, written to
benchmarks/results/<name>.json; README.md says what that holds.

    from record import write_result
    write_result("step_cpu", images_per_step=32, step_ms=ours, peer_name="stock Gluon", peer_step_ms=theirs)
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # the project need not be installed: all programs here import this first
    sys.path.insert(0, str(ROOT))

from common import environment  # noqa: E402
from common.command_line import exit_code_of  # noqa: E402
from common.errors import UserError  # noqa: E402

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


def speed(step_ms: Sequence[float], images_per_step: int | None) -> tuple[float, float, str]:
    """Median, half the interquartile range and unit: images/sec, or seconds where there are no images to count."""
    values = [images_per_step * 1e3 / ms if images_per_step else ms / 1e3 for ms in step_ms]
    quartile1, median, quartile3 = statistics.quantiles(values, n=4, method="inclusive")
    return median, (quartile3 - quartile1) / 2, "images/sec" if images_per_step else "seconds"


def write_result(
    name: str,
    step_ms: Sequence[float],
    images_per_step: int | None = None,
    peer_name: str | None = None,
    peer_step_ms: Sequence[float] = (),
    peer_value: float | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write one figure and print it.

    step_ms          raw times of all counted steps, warm-up left out, in ms; at least MIN_STEPS, or MIN_RUNS
    images_per_step  images in one step (of all GPUs); None for a figure in seconds
    peer_step_ms     the peer's times for steps of as many images; or give its figure, `peer_value`
    """
    least = MIN_STEPS if images_per_step else MIN_RUNS
    if len(step_ms) < least:
        raise UserError(f"{name}: a figure needs at least {least} times, and {len(step_ms)} were measured; ask for "
                        "more steps, rounds or seeds")
    value, spread, unit = speed(step_ms, images_per_step)
    if peer_step_ms:
        peer_value = speed(peer_step_ms, images_per_step)[0]
    script, *arguments = sys.argv
    result = {
        "name": name,
        "value": value,
        "unit": unit,
        "spread": spread,
        "peer": {"name": peer_name, "value": peer_value} if peer_value else None,
        "ratio": value / peer_value if peer_value else None,
        "hardware": _hardware(name),
        "versions": environment.versions(),
        "commit": environment.git_commit() or "",
        "command": shlex.join(["python", os.path.relpath(script, ROOT), *arguments]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step_ms": [round(ms, 3) for ms in step_ms],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    against = f", {value / peer_value:.3f} times {peer_name} ({peer_value:,.1f})" if peer_value else ""
    print(f"{name}: {value:,.1f} +/- {spread:,.1f} {unit}{against} -> {os.path.relpath(path)}")
    return path


def _hardware(name: str) -> str:
    """The GPUs that the figure's name tells of, or one, though the machine may have more. Of a figure whose name says
    'cpu', and where there is no GPU, its cores."""
    machine = environment.hardware()
    if machine["gpus"] and not name.endswith("cpu"):
        used = re.search(r"(\d+)gpu$", name)
        return f"{used[1] if used else 1}x {machine['gpus'][0]}"
    return f"{machine['cpu_cores']} cores of {machine['cpu']}, {machine['memory_gib']:.0f} GiB"
