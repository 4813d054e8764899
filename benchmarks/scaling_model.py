"""Training on many machines, as a model: what a step costs on 1 to 3,584 GPUs, and where it breaks.

    python benchmarks/scaling_model.py [--results benchmarks/results]

Fits what can be fitted to what was measured (the results of step_gpu.py on one GPU and of scaling.py on a few), takes
the rest from `Machine`, simulates steps, and prints the tables of docs/scaling_model.md, which explains it. Writes
scaling_model.jsonl and scaling_model.png beside the measurements. Needs no GPU.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from record import RESULTS, run
from scaling import DAMAGED, Row, read_rows

from common import files
from common.command_line import read_options
from common.errors import UserError
from graph_passes.executors.cuda.buckets import cut
from train.models.network import init_params
from train.models.resnet import resnet

PROFILE = "resnet50_fp16_b256_profile.txt"
SINGLE_GPU = "resnet50_fp16_b{}_synthetic_1gpu.json"
BATCHES = (64, 256)  # whose files are of one commit
WIRE_BYTES = 2  # of a gradient: fp16
ALGORITHMS = ("ring", "tree", "in-network")
NCCL = ALGORITHMS[:2]  # what NCCL chooses from without a network that computes
T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """All parameters. Those of the first group are fitted by `fit`; the defaults there are only for tests."""

    step_fixed_ms: float = 2.0  # of a step, whatever the batch
    step_image_ms: float = 0.1  # and for each image
    step_jitter: float = 1e-3  # standard deviation of one GPU's step times, relative
    nvlink_gbs: float = 300.0  # GB/s that a GPU sends in an all-reduce within a host
    message_us: float = 30.0  # of an all-reduce of nothing, between two GPUs
    gpu_spread: float = 0.01  # standard deviation of the speeds of GPUs of one kind, relative
    slowdown: float = 0.0  # of the passes by the all-reduces beside them, relative

    # Not measured here.
    gpus_per_host: int = 8
    nvlink_hop_us: float = 3.0  # each further hop within a host. NCCL's tuner has 3.4 us for Simple over NVLink
    network_gbs: float = 45.0  # a GPU's share of the network: 400 Gbit/s (NVIDIA DGX H100), 90 % of it
    network_hop_us: float = 8.0  # one hop between hosts. NCCL's tuner has 14 us for Simple, 5 us for LL over a network
    speed: float = 1.0  # of a GPU, in H200


class Gradient(NamedTuple):
    """One tensor, in the order of the backward pass."""

    num_bytes: int
    ready: float  # when it is computed, as a share of the step


class Bucket(NamedTuple):
    num_bytes: int
    ready: float


class Prediction(NamedTuple):
    gpus: int
    batch: int  # a GPU
    num_buckets: int
    algorithm: str  # of the largest bucket
    compute_ms: float  # of an average GPU alone
    slowed_ms: float  # of an average GPU beside the all-reduces
    slowest_ms: float  # of the slowest one, which all others wait for
    all_reduce_ms: float
    exposed_ms: float  # of it, what nothing hides
    step_ms: float

    @property
    def images_per_sec_per_gpu(self) -> float:
        return 1e3 * self.batch / self.step_ms


# --- the all-reduce ---


def all_reduce_ms(num_bytes: float, gpus: int, machine: Machine, algorithm: str) -> float:
    """Time of one all-reduce of `num_bytes` on each of `gpus` GPUs.

    ring: 2 (n - 1) steps, each of which moves 1/n of the bytes (Patarasuk and Yuan, 2009). As NCCL does it, there is a
        ring for each network card, so hosts exchange bytes with all of them.
    tree: a chain in each host and two binary trees between the hosts, each for half of the bytes (Sanders, Speck and
        Traeff, 2009): as many bytes, but only 2 log2(hosts) hops of the network.
    in-network: switches add (SHARP, NVLink SHARP), so each byte is sent once, and up and down the switches is enough.
    """
    if gpus == 1:
        return 0.0
    hosts = math.ceil(gpus / machine.gpus_per_host)
    local = min(gpus, machine.gpus_per_host)
    bandwidth = machine.nvlink_gbs
    if hosts > 1:
        bandwidth = min(bandwidth, machine.gpus_per_host * machine.network_gbs)
    if algorithm == "ring":
        hops_us = 2 * (gpus - hosts) * machine.nvlink_hop_us + 2 * hosts * (hosts > 1) * machine.network_hop_us
        sent = 2 * (gpus - 1) / gpus * num_bytes
    elif algorithm == "tree":
        hops_us = 2 * (local - 1) * machine.nvlink_hop_us + 2 * math.ceil(math.log2(hosts)) * machine.network_hop_us
        sent = 2 * num_bytes
    elif algorithm == "in-network":
        levels = math.ceil(math.log(hosts, 32)) if hosts > 1 else 0  # switches of 64 ports, half of them up
        hops_us = 2 * machine.nvlink_hop_us + 2 * levels * machine.network_hop_us
        sent = num_bytes
    else:
        raise ValueError(f"unknown algorithm {algorithm!r}")
    # message_us is measured between two GPUs, whose two hops are in it.
    latency_us = machine.message_us + max(0.0, hops_us - 2 * machine.nvlink_hop_us)
    return latency_us / 1e3 + sent / (bandwidth * 1e6)


def best_all_reduce(num_bytes: float, gpus: int, machine: Machine, allowed: Sequence[str]) -> tuple[float, str]:
    """The fastest of the allowed algorithms, as NCCL's tuner chooses: (ms, name)."""
    return min((all_reduce_ms(num_bytes, gpus, machine, algorithm), algorithm) for algorithm in allowed)


# --- the step ---


def read_gradients(profile: str) -> list[Gradient]:
    """ResNet-50's gradients, with their places in a step by the times of its launches, measured by --profile. Raises
    ValueError or KeyError for a profile that is cut off or of another network."""
    symbol = resnet(50)
    params, _ = init_params(symbol, seed=0)
    launches, end_of_launches, _ = profile.partition("\n\n")  # the rest are sums by operation
    rows = re.findall(r"^(\w+) +(\w+) +([\d.]+) +[\d.]+ +\d+ +\d+%$", launches, re.MULTILINE)
    ends = list(itertools.accumulate(float(ms) for _, _, ms in rows))
    found: dict[str, Gradient] = {}  # by node, whose last launch counts
    for (node, _, _), end in zip(rows, ends, strict=True):
        if node.endswith("_wgrad"):
            weight = params[node.removesuffix("_wgrad") + "_weight"]
            found[node] = Gradient(WIRE_BYTES * weight.size, end / ends[-1])
    num_weights = sum(name.endswith("_weight") for name in params)
    if len(found) != num_weights or not end_of_launches:
        raise ValueError(f"it has the gradients of {len(found)} of {num_weights} weights, or not all launches")
    # BatchNorm's and the bias' gradients travel in fp32, in one message behind all others.
    rest = sum(4 * array.size for name, array in params.items() if not name.endswith("_weight"))
    return [*found.values(), Gradient(rest, 1.0)]


def cut_buckets(gradients: Sequence[Gradient], num_buckets: int) -> list[Bucket]:
    """The buckets that the cuda executor makes of these gradients; the fp32 ones are a message more."""
    *weights, small = gradients
    ranges = cut([gradient.num_bytes for gradient in weights], num_buckets)
    buckets = [Bucket(sum(g.num_bytes for g in weights[first:end]), weights[end - 1].ready) for first, end in ranges]
    return [*buckets, Bucket(*small)]


def step_of_one_gpu_ms(batch: int, machine: Machine) -> float:
    return (machine.step_fixed_ms + batch * machine.step_image_ms) / machine.speed


def simulate(machine: Machine, gradients: Sequence[Gradient], gpus: int, batch: int, num_buckets: int = 2,
             allowed: Sequence[str] = NCCL, num_steps: int = 200, seed: int = 0) -> Prediction:
    """Means over `num_steps` steps of `gpus` GPUs that all wait for each other in each.

    Every GPU has a speed of its own and jitter in each step, and is slower beside all-reduces. A bucket's all-reduce
    starts when the slowest GPU has computed it and the all-reduce before is over; the step ends when the last one is
    over and the GPU has computed.
    """
    rng = np.random.default_rng(seed)
    compute = step_of_one_gpu_ms(batch, machine)
    slowed = compute * (1 + machine.slowdown) if gpus > 1 else compute
    chips = 1 + machine.gpu_spread * rng.standard_normal(gpus)
    buckets = cut_buckets(gradients, num_buckets)
    costs = [best_all_reduce(bucket.num_bytes, gpus, machine, allowed) for bucket in buckets]
    slowest_ms, exposed_ms = [], []
    for _ in range(num_steps):
        slowest = slowed * float(np.max(chips * (1 + machine.step_jitter * rng.standard_normal(gpus))))
        network_free = 0.0
        for bucket, (cost, _) in zip(buckets, costs, strict=True):
            network_free = max(network_free, bucket.ready * slowest) + cost
        slowest_ms.append(slowest)
        exposed_ms.append(max(0.0, network_free - slowest))
    slowest, exposed = statistics.fmean(slowest_ms), statistics.fmean(exposed_ms)
    largest = max(range(len(buckets)), key=lambda i: buckets[i].num_bytes)
    return Prediction(gpus, batch, num_buckets, costs[largest][1] if gpus > 1 else "none", compute, slowed,
                      slowest, sum(cost for cost, _ in costs), exposed, slowest + exposed)


def best_buckets(machine: Machine, gradients: Sequence[Gradient], gpus: int, batch: int,
                 allowed: Sequence[str] = NCCL) -> Prediction:
    """With the number of buckets, a power of two, that makes the fastest step."""
    return min((simulate(machine, gradients, gpus, batch, count, allowed) for count in (1, 2, 4, 8, 16)),
               key=lambda prediction: prediction.step_ms)


# --- the fit ---


def read(path: Path, parse: Callable[[str], T]) -> T:
    """What `parse` makes of the text of a measurement. Raises UserError where it is cut off or something else."""
    try:
        return parse(path.read_text())
    except DAMAGED as error:
        raise UserError(f"{path} is cut off or of another kind ({type(error).__name__}: {error}): measure it again as "
                        "benchmarks/README.md says, or give another --results") from None


def median_and_jitter(row: Row) -> tuple[float, float]:
    """Of step times: the median in ms, and the standard deviation relative to it. Raises one of DAMAGED."""
    median = statistics.median(row["step_ms"])
    if not all(0 < ms < math.inf for ms in row["step_ms"]):
        raise ValueError("not all times are positive")
    return median, statistics.stdev(row["step_ms"]) / median


def synthetic_rows(text: str) -> dict[int, Row]:
    """What scaling.py measured on synthetic data, by the number of GPUs. Raises one of DAMAGED."""
    rows = {row["gpus"]: row for row in read_rows(text) if row["what"] == "synthetic"}
    for gpus, row in rows.items():
        median_and_jitter(row)
        if gpus > 1 and "buckets" not in row:
            raise ValueError(f"the row of {gpus} GPUs has no buckets")
    return rows


def fit(results: Path) -> tuple[Machine, list[str]]:
    """The machine whose parameters follow what was measured, and for each fit a sentence on how well it does. Raises
    UserError for a file that is damaged."""
    singles = [read(results / SINGLE_GPU.format(batch), lambda text: median_and_jitter(json.loads(text)))
               for batch in BATCHES]
    times, jitters = zip(*singles, strict=True)
    slope, fixed = np.polyfit(BATCHES, times, 1, w=1 / np.asarray(times))
    errors = [abs(fixed + slope * batch - ms) / ms for batch, ms in zip(BATCHES, times, strict=True)]
    machine = Machine(step_fixed_ms=float(fixed), step_image_ms=float(slope), step_jitter=statistics.fmean(jitters))
    shown = ", ".join(map(str, BATCHES))
    notes = [f"step of one GPU: {fixed:.2f} ms + {slope:.4f} ms an image, within {max(errors):.1%} of the measured "
             f"at {shown} images; jitter {machine.step_jitter:.2%}"]
    runs = sorted(results.glob("scaling_*gpu.jsonl"))  # of each machine that scaling.py has measured
    synthetic = [read(file, synthetic_rows) for file in runs]
    several = [row for rows in synthetic for count, row in rows.items() if count > 1]
    if not several:
        return machine, [*notes, "NVLink: not fitted, there is no scaling_<n>gpu.jsonl of several GPUs: "
                         f"{machine.nvlink_gbs:.0f} GB/s, {machine.message_us:.0f} us a message and GPUs that differ "
                         f"by {machine.gpu_spread:.1%} are assumed"]
    machine = fit_nvlink(machine, several)
    notes.append(f"all-reduce within a host: {machine.nvlink_gbs:.0f} GB/s, {machine.message_us:.0f} us a message")
    single = [rows[1] for rows in synthetic if 1 in rows]
    if single:
        largest = max(row["batch"] for row in single)  # smaller ones do not reach the power limit
        jitter = statistics.fmean(median_and_jitter(row)[1] for row in single if row["batch"] == largest)
        machine = replace(machine, step_jitter=jitter)
        notes.append(f"jitter of one GPU after 3 s of work, at its power limit: {jitter:.2%}")
    slowdowns = [statistics.median(row["pass_ms"]) / statistics.median(row["pass_alone_ms"]) - 1 for row in several]
    machine = replace(machine, slowdown=statistics.fmean(slowdowns))
    notes.append(f"passes beside all-reduces are slower by {machine.slowdown:.1%}")
    each = max(several, key=lambda row: len(row["each_alone_ms"]))["each_alone_ms"]
    machine = replace(machine, gpu_spread=statistics.stdev(each) / statistics.fmean(each))
    notes.append(f"speeds of {len(each)} GPUs: they differ by {machine.gpu_spread:.2%} (standard deviation)")
    gradients = read(results / PROFILE, read_gradients)
    # Against one GPU of the same run: the step may have become faster from one run to the next.
    for file, rows in zip(runs, synthetic, strict=True):
        for gpus, row in rows.items():
            if gpus > 1 and 1 in rows:
                predicted, one = (simulate(machine, gradients, count, row["batch"], len(row["buckets"]) - 1).step_ms
                                  for count in (gpus, 1))
                measured = statistics.median(row["step_ms"]) / statistics.median(rows[1]["step_ms"])
                notes.append(f"{gpus} GPUs, batch {row['batch']}: a step longer than one GPU's by "
                             f"{predicted / one - 1:.1%} is predicted, by {measured - 1:.1%} was measured "
                             f"({file.name})")
    return machine, notes


def fit_nvlink(machine: Machine, rows: Sequence[Row]) -> Machine:
    """Bandwidth and latency from the times of single buckets with nothing beside them, of each the shortest, as a host
    that is late makes them longer. Least squares, relative to the times."""
    points: dict[tuple[float, float], float] = {}  # (bytes sent, hops beyond two in us): ms
    for row in rows:
        n = row["gpus"]
        for (_, num_bytes, _), ms in zip(row["buckets"], row["all_reduce_ms"], strict=True):
            point = 2 * (n - 1) / n * num_bytes, 2 * (n - 2) * machine.nvlink_hop_us
            points[point] = min(ms, points.get(point, math.inf))
    sent, hops_us = (np.asarray(column) for column in zip(*points, strict=True))
    times = np.asarray(list(points.values()))
    design = np.stack([sent, np.ones_like(sent)], axis=1) / times[:, None]
    (ms_per_byte, message_ms), *_ = np.linalg.lstsq(design, (times - hops_us / 1e3) / times, rcond=None)
    return replace(machine, nvlink_gbs=float(1e-6 / ms_per_byte), message_us=float(1e3 * max(0.0, message_ms)))


# --- published points ---


class Published(NamedTuple):
    gpus: int
    batch: int
    images_per_sec_per_gpu: float
    source: str


# NVIDIA's MXNet with LARS, real data. An H100's memory has 3.35 TB/s, an H200's 4.8, and the step is bound by memory.
H100_SPEED = 3.35 / 4.8
MLPERF = (
    Published(64, 50, 4908.0, "MLPerf Training, 64 H100"),
    Published(3584, 16, 2815.0, "MLPerf Training, 3,584 H100"),
)


def calibrated(machine: Machine, gradients: Sequence[Gradient], point: Published) -> Machine:
    """With the speed of a GPU at which the model meets a published point: their program and their GPU, not ours."""
    low, high = 0.1, 10.0
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        reached = best_buckets(replace(machine, speed=middle), gradients, point.gpus, point.batch)
        low, high = (middle, high) if reached.images_per_sec_per_gpu < point.images_per_sec_per_gpu else (low, middle)
    return replace(machine, speed=low)


# --- output ---


def compare(machine: Machine, gradients: Sequence[Gradient]) -> str:
    """Table of the published points."""
    h100 = replace(machine, speed=H100_SPEED)
    as_nvidia = calibrated(machine, gradients, MLPERF[0])
    lines = ["| GPUs, batch a GPU | published | our step at an H100's bandwidth | calibrated on the first |",
             "|---" * 4 + "|"]
    for point in MLPERF:
        cells = [f"{point.gpus:,} H100, {point.batch}", f"{point.images_per_sec_per_gpu:,.0f}"]
        for candidate in (h100, as_nvidia):
            speed = best_buckets(candidate, gradients, point.gpus, point.batch).images_per_sec_per_gpu
            cells.append(f"{speed:,.0f} ({speed / point.images_per_sec_per_gpu - 1:+.1%})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(predictions: Sequence[Prediction]) -> str:
    heads = ("GPUs", "batch a GPU", "step, ms", "of an average GPU alone", "slower pass", "waiting for the slowest",
             "all-reduce", "exposed", "by", "buckets", "images/sec a GPU", "efficiency")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for p in predictions:
        cells = (f"{p.gpus:,}", p.batch, f"{p.step_ms:.2f}", f"{p.compute_ms:.2f}",
                 f"{p.slowed_ms - p.compute_ms:.2f}", f"{p.slowest_ms - p.slowed_ms:.2f}",
                 f"{p.all_reduce_ms:.2f}", f"{p.exposed_ms:.2f}", p.algorithm, p.num_buckets,
                 f"{p.images_per_sec_per_gpu:,.0f}", f"{p.compute_ms / p.step_ms:.1%}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


ASSUMED = ("nvlink_gbs", "message_us", "nvlink_hop_us", "network_gbs", "network_hop_us", "gpu_spread", "slowdown")


def sensitivity(machine: Machine, gradients: Sequence[Gradient], gpus: int = 3584, batch: int = 16) -> str:
    """Table: what half and twice of each parameter that is not measured on one GPU do to the speed."""
    base = best_buckets(machine, gradients, gpus, batch).images_per_sec_per_gpu
    lines = [f"| at {gpus:,} GPUs, batch {batch} | value | half of it | twice |", "|---" * 4 + "|"]
    for name in ASSUMED:
        value = getattr(machine, name)
        half, twice = (
            best_buckets(replace(machine, **{name: factor * value}), gradients, gpus, batch).images_per_sec_per_gpu
            for factor in (0.5, 2.0)
        )
        lines.append(f"| `{name}` | {value:.4g} | {half / base - 1:+.1%} | {twice / base - 1:+.1%} |")
    return "\n".join(lines)


def plot(machine: Machine, gradients: Sequence[Gradient]) -> bytes:
    """Images/sec a GPU against GPUs, and the all-reduce of all gradients by each algorithm, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = [1, 2, 4, *(8 * 2**k for k in range(9)), 3584]
    figure, (speeds, reduces) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for batch in (256, 64, 16):
        values = [best_buckets(machine, gradients, gpus, batch).images_per_sec_per_gpu for gpus in counts]
        speeds.plot(counts, values, "o-", markersize=3, label=f"H200, batch {batch}")
    as_nvidia = calibrated(machine, gradients, MLPERF[0])
    for point in MLPERF:
        values = [best_buckets(as_nvidia, gradients, gpus, point.batch).images_per_sec_per_gpu for gpus in counts]
        speeds.plot(counts, values, "--", linewidth=1, label=f"H100 as in MLPerf, batch {point.batch}")
        speeds.plot(point.gpus, point.images_per_sec_per_gpu, "k*", markersize=10)
    total = sum(gradient.num_bytes for gradient in gradients)
    for algorithm in ALGORITHMS:
        times = [all_reduce_ms(total, gpus, machine, algorithm) for gpus in counts[1:]]
        reduces.plot(counts[1:], times, label=algorithm)
    reduces.axhline(step_of_one_gpu_ms(16, machine), color="grey", linewidth=1, linestyle=":", label="step at batch 16")
    reduces.set(yscale="log", title=f"all-reduce of {total / 1e6:.0f} MB, ms", xlabel="GPUs", xscale="log")
    speeds.set(title="images/sec a GPU (stars: published)", xlabel="GPUs", xscale="log", ylim=(0, None))
    speeds.yaxis.set_major_formatter("{x:,.0f}")
    speeds.legend(fontsize=7, loc="lower left", ncols=2)
    reduces.legend(fontsize=8)
    for axes in (speeds, reduces):
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    plt.close(figure)
    return png.getvalue()


@dataclass(frozen=True)
class Options:
    """What the model is made from."""

    results: Path = RESULTS
    """Folder of the measurements."""


def main() -> None:
    results = read_options(Options).results
    needed = [results / PROFILE, *(results / SINGLE_GPU.format(batch) for batch in BATCHES)]
    missing = [file for file in needed if not file.is_file()]
    if missing:
        raise UserError(f"{missing[0]} is missing: measure it as benchmarks/README.md says, or give --results")
    machine, notes = fit(results)
    gradients = read(results / PROFILE, read_gradients)
    print(*notes, sep="\n")
    predictions = [best_buckets(machine, gradients, gpus, batch)
                   for batch in (256, 64, 16) for gpus in (1, 2, 4, 8, 16, 64, 512, 3584)]
    ideal = [best_buckets(machine, gradients, 3584, 16, ALGORITHMS)]
    print(f"\n{table(predictions)}\n\nwith switches that add:\n\n{table(ideal)}\n\n{compare(machine, gradients)}"
          f"\n\n{sensitivity(machine, gradients)}")
    lines = [{"machine": asdict(machine)}, *({**p._asdict(), "images_per_sec_per_gpu": p.images_per_sec_per_gpu}
                                             for p in (*predictions, *ideal))]
    files.write(results / "scaling_model.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    files.write(results / "scaling_model.png", plot(machine, gradients))


if __name__ == "__main__":
    run(main)
