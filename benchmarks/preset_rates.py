"""Images/sec of the ImageNet presets' steps on one GPU, on synthetic data, and the resulting hours of training.

    python benchmarks/preset_rates.py [--presets resnet50_a1_600ep resnet50_a3_100ep]

`python -m train benchmark` measures each preset at each of its image sizes, with the preset's batch size, accumulation,
optimizer and all other options, on a warmed-up GPU. Each measurement is written at once as a line of
results/preset_rates_1gpu.jsonl. Lines of this commit and this kind of GPU are not measured again, so the same command
resumes. Then the program prints a table for docs/recipes.md; its hours are those of the steps alone, for all epochs of
ImageNet's training images.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import record

from common.command_line import Positive, read_options
from common.environment import git_commit, hardware
from common.errors import error_of
from train.presets import load_preset, presets
from train.recording.metrics import RunRecord
from train.schedule import image_sizes

FILE = "preset_rates_1gpu.jsonl"
WARM_UP = 150  # steps (three seconds): a cool GPU is faster, and so are the first steps of a run, with gammas of 0
IMAGES = 1_281_167  # ImageNet's training images (ILSVRC2012)

Line = dict[str, Any]


def of_imagenet() -> tuple[str, ...]:
    """The presets for ImageNet."""
    return tuple(name for name in presets() if load_preset(name).data.endswith("imagenet"))


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    presets: Annotated[tuple[str, ...], "NAME"] = of_imagenet()
    """Presets to measure."""
    steps: Positive = 40
    """Timed steps of each measurement."""
    limit: Positive = 24 * 3600
    """Seconds after which no further measurement begins; the same command resumes later."""
    results: Path = record.RESULTS
    """Folder to write to."""


def command(preset: str, image_size: int, steps: int) -> list[str]:
    """The command that measures a preset at one image size, without interpreter and folder."""
    return ["-m", "train", "benchmark", "--config", preset, "--data", "synthetic", "--num-classes", "1000",
            "--image-size", str(image_size), "--no-tensorboard", "--warmup-steps", str(WARM_UP),
            "--min-steps", str(steps), "--limit-steps", str(steps)]


def measure(preset: str, image_size: int, steps: int) -> Line:
    """Measure a preset at one image size; raises the command's error."""
    words = command(preset, image_size, steps)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        done = subprocess.run([sys.executable, *words, "--output", folder], cwd=record.ROOT, capture_output=True,
                              text=True)
        if done.returncode:
            raise error_of(done.returncode)(f"{shlex.join(words)} ended with exit code {done.returncode}: "
                                            f"{done.stderr[-2000:]}")
        run = RunRecord.read_jsonl(folder / "metrics.jsonl")
    step_ms = record.rounded([run.step_ms[step] for step in run.counted_steps])
    found = record.statistics_of(step_ms, run.images_per_step)
    return {"preset": preset, "image_size": image_size, "batch": run.images_per_step,
            "images_per_sec": round(found["value"], 1), "spread": round(found["spread"], 1), "step_ms": step_ms,
            **machine(), "command": shlex.join(["python", *words])}


def machine() -> dict[str, Any]:
    """The values that lines must share to be comparable."""
    gpus = hardware()["gpus"]
    return {"hardware": f"1x {gpus[0]}" if gpus else hardware()["cpu"], "commit": git_commit()}


def is_of(line: Mapping[str, Any], **values: Any) -> bool:
    """Whether a line has these values."""
    return line.items() >= values.items()


def table(lines: Sequence[Line]) -> str:
    """A Markdown table of the presets whose image sizes are all measured."""
    rows = ["| preset | images a step | images/sec | hours |", "|---|---|---|---|"]
    for name in dict.fromkeys(line["preset"] for line in lines):
        of_preset = {line["image_size"]: line for line in lines if line["preset"] == name}
        sizes = image_sizes(load_preset(name))
        if set(sizes) <= of_preset.keys():
            rates = ", ".join(f"{of_preset[size]['images_per_sec']:,.0f} at {size}" for size in dict.fromkeys(sizes))
            hours = sum(IMAGES / of_preset[size]["images_per_sec"] for size in sizes) / 3600
            rows.append(f"| `{name}` | {of_preset[sizes[-1]]['batch']:,} | {rates} | {hours:.2f} |")
    return "\n".join(rows)


def main() -> None:
    arguments = read_options(Options)
    wanted = [(name, size) for name in arguments.presets for size in dict.fromkeys(image_sizes(load_preset(name)))]
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / FILE
    lines = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
    begin = time.monotonic()
    for name, size in wanted:
        if any(is_of(line, preset=name, image_size=size, **machine()) for line in lines):
            continue
        if time.monotonic() - begin >= arguments.limit:
            print("--limit: not all have begun; the same command goes on", file=sys.stderr)
            break
        new = measure(name, size, arguments.steps)
        # Drop lines of presets that no longer exist.
        lines = [line for line in lines if not is_of(line, preset=name, image_size=size)
                 and line["preset"] in presets()] + [new]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{name} at {size} pixels: {new['images_per_sec']:,.0f} images/sec", flush=True)
    print(table([line for line in lines if is_of(line, **machine())]))


if __name__ == "__main__":
    record.run(main)
