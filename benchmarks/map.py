"""The map: ours against PyTorch's fastest mode for many networks, batches, image sizes and precisions, on one GPU.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/map.py --limit 1500      # as often as needed
    python benchmarks/map.py --networks resnet18 --uses training --batches 32 64      # some cells only
    python benchmarks/map.py --draw                                                   # the picture; needs no GPU

A cell is one network, use, batch, image size and precision. Each is measured by step_gpu.py's turns, in a process of
its own, and is one line of results/map_1gpu.jsonl: both sides' raw times in ms, PyTorch's by mode, and the ratio of the
medians. Cells of this commit and this kind of GPU that are there already are skipped, so the program resumes where it
was stopped. A cell that one side cannot compute, for want of memory for example, is a line with the reason. The cells
that people run most come first. At the end it prints the worst cells and draws results/map_1gpu.png.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from record import RESULTS, ROOT, run
from step_gpu import SHORT, PeerMode
from torch_peer import require_peer

from common.command_line import Positive, read_options
from common.environment import git_commit, hardware, versions
from common.errors import UserError
from common.nvidia_gpus import find_gpus

LINES, PICTURE = RESULTS / "map_1gpu.jsonl", RESULTS / "map_1gpu.png"
Use = Literal["training", "inference"]
DTYPES: dict[str, tuple[str, ...]] = {"training": ("float16", "bfloat16", "tf32"), "inference": ("float16", "int8")}
BATCHES = {"training": (256, 32, 64, 128, 16, 8), "inference": (1, 32, 256, 8, 4, 128, 1024)}
IMAGES = 12_000  # timed per round in each cell, within LEAST_STEPS to MOST_STEPS steps
LEAST_STEPS, MOST_STEPS = 20, 400
WORST = 10  # cells that are named at the end


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    networks: tuple[str, ...] = ("resnet50", "resnet18", "resnet101", "resnext50_32x4d")
    """Networks, in this order."""
    uses: tuple[Use, ...] = ("training", "inference")
    """What is measured."""
    batches: tuple[Positive, ...] = ()
    """Batch sizes; default: 8 to 256 in training, 1 to 1,024 in inference."""
    sizes: tuple[Positive, ...] = (224, 160, 384, 128, 288)
    """Height and width of an image; inference is measured at 224 only."""
    dtypes: tuple[Literal["float16", "bfloat16", "tf32", "int8"], ...] = ()
    """Precisions; default: float16, bfloat16 and tf32 in training, float16 and int8 in inference."""
    peers: tuple[PeerMode, ...] = ("compile", "graph")
    """PyTorch's modes."""
    rounds: Positive = 2
    """Rounds of a cell; ours and the peer alternate."""
    limit: Positive = 24 * 3600
    """Seconds after which no further cell begins."""
    draw: bool = False
    """Draw the picture of what is measured, and measure nothing."""


@dataclass(frozen=True)
class Cell:
    """One configuration."""

    network: str
    use: str
    batch: int
    size: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.network} {self.use} {SHORT[self.dtype]}, batch {self.batch}, {self.size} pixels"

    @property
    def steps(self) -> int:
        return min(max(IMAGES // self.batch, LEAST_STEPS), MOST_STEPS)


def cells(options: Options) -> Iterator[Cell]:
    """All cells of the options: first the first image size, with all precisions, networks and batches; then the
    next."""
    for use in options.uses:
        dtypes = [dtype for dtype in options.dtypes or DTYPES[use] if dtype in DTYPES[use]]
        sizes = options.sizes if use == "training" else options.sizes[:1]
        for size, dtype, network in itertools.product(sizes, dtypes, options.networks):
            for batch in options.batches or BATCHES[use]:
                yield Cell(network, use, batch, size, dtype)


def read_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []


def measured_here(lines: Iterable[dict[str, Any]], commit: str | None, gpu: str) -> set[Cell]:
    """The cells of this commit and kind of GPU."""
    return {Cell(**line["cell"]) for line in lines if (line["commit"], line["hardware"]["gpus"][0]) == (commit, gpu)}


# Runs in a process of its own, so that a cell's memory and its failure end with it.
WORKER = """
import json, sys
sys.path.insert(0, "benchmarks")
import record, step_gpu
compared = step_gpu.compare(step_gpu.Options(**json.loads(sys.argv[1])))
for who, turns in (("ours", compared.ours), *compared.theirs.items()):
    record.check_trained(who, [turn["loss"] for turn in turns],
                         [scale for turn in turns for scale in turn["loss_scales"]])
print(json.dumps({"ours": step_gpu.all_times(compared.ours), "watts": [turn["watts"] for turn in compared.ours],
                  "theirs": {mode: step_gpu.all_times(turns) for mode, turns in compared.theirs.items()},
                  "peer_versions": compared.versions}))
"""


def measure(cell: Cell, options: Options) -> dict[str, Any]:
    """The times of both programs for a cell, or `error`, the reason why they could not be measured."""
    arguments = {"model": cell.network, "batch": cell.batch, "size": cell.size, "dtype": cell.dtype,
                 "steps": cell.steps, "rounds": options.rounds, "peers": options.peers,
                 "inference": cell.use == "inference"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run([sys.executable, "-c", WORKER, json.dumps(arguments)], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"ratio": round(ratio_of(found), 4)}


def ratio_of(found: dict[str, Any]) -> float:
    """How many times as fast as PyTorch's fastest mode, by the medians."""
    return min(map(statistics.median, found["theirs"].values())) / statistics.median(found["ours"])


def worst(lines: Iterable[dict[str, Any]]) -> str:
    """The cells with the lowest ratios, in words."""
    known = sorted((line for line in lines if "ratio" in line), key=lambda line: line["ratio"])
    return "; ".join(f"{Cell(**line['cell'])}: {line['ratio']:.2f}" for line in known[:WORST])


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """A panel for each network, use and precision: batches by image sizes, the ratio as colour and number."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ratios = {Cell(**line["cell"]): line["ratio"] for line in lines if "ratio" in line}  # a cell's last line counts
    panels = sorted({(cell.use, cell.network, cell.dtype) for cell in ratios}, reverse=True)
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3 * columns, 2.6 * rows), layout="constrained", squeeze=False)
    for place in axes.flat[len(panels):]:
        place.set_visible(False)
    for place, (use, network, dtype) in zip(axes.flat, panels, strict=False):
        here = {cell: ratio for cell, ratio in ratios.items() if (cell.use, cell.network, cell.dtype)
                == (use, network, dtype)}
        batches, sizes = (sorted({getattr(cell, name) for cell in here}) for name in ("batch", "size"))
        table = [[here.get(Cell(network, use, batch, size, dtype), float("nan")) for size in sizes]
                 for batch in batches]
        place.imshow(table, cmap="RdYlGn", vmin=0.6, vmax=1.8, aspect="auto")
        place.set_title(f"{network}, {use}, {SHORT[dtype]}", fontsize=8)
        place.set_xticks(range(len(sizes)), sizes, fontsize=7)
        place.set_yticks(range(len(batches)), batches, fontsize=7)
        for (row, values), column in itertools.product(enumerate(table), range(len(sizes))):
            if values[column] == values[column]:
                place.text(column, row, f"{values[column]:.2f}", ha="center", va="center", fontsize=7)
    figure.supxlabel("pixels", fontsize=9)
    figure.supylabel("batch", fontsize=9)
    figure.suptitle(f"times as fast as PyTorch's fastest mode, {lines[-1]['hardware']['gpus'][0]}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    options = read_options(Options)
    if not options.draw:
        require_peer()
        if not find_gpus():
            raise UserError("the map is measured on an NVIDIA GPU, and there is none here")
        measure_all(options)
    lines = read_lines()
    if not any("ratio" in line for line in lines):
        raise UserError(f"{LINES} has no measured cell: run this program without --draw on a GPU first")
    print(f"the worst: {worst(lines)}")
    draw(lines, PICTURE)
    print(f"wrote {PICTURE}")


def measure_all(options: Options) -> None:
    """Measure what is missing, until the limit."""
    begin, commit, here = time.monotonic(), git_commit(), hardware()
    done = measured_here(read_lines(), commit, here["gpus"][0])
    left = [cell for cell in cells(options) if cell not in done]
    for number, cell in enumerate(left):
        if time.monotonic() - begin >= options.limit:
            print(f"{len(left) - number} cells are left after {options.limit} s: start the program again")
            return
        found = measure(cell, options)
        row = {"cell": asdict(cell), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit,
               "hardware": here, "versions": versions(), **found}
        with LINES.open("a") as file:
            print(json.dumps(row), file=file)
        print(f"{number + 1} of {len(left)}: {cell}: {found.get('error') or format(found['ratio'], '.2f')}", flush=True)


if __name__ == "__main__":
    run(main)
