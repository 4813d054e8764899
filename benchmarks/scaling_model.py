"""A plan for more GPUs than were measured: a step of ResNet-50 on up to 3,584 H100. Needs no GPU.

    python benchmarks/scaling_model.py      # prints the tables of docs/scaling_model.md, which explains the model
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import NamedTuple

import numpy as np
from record import RESULTS, run
from scaling import DAMAGED, Row, read_rows

from common.command_line import read_options
from common.errors import UserError

FILES = ("scaling_b64_4gpu.jsonl", "scaling_b256_4gpu.jsonl")  # as in scaling.py
NCCL = ("ring", "tree")  # its tuner takes the faster one for each message
# (number of H100s, batch per GPU, images/sec per GPU) of NVIDIA's MXNet with LARS
MLPERF = ((64, 50, 4908.0), (3584, 16, 2815.0))


@dataclass(frozen=True)
class Machine:
    """A machine, with values from `fit` except for the second group. A line is (ms per image, ms independent of the
    batch)."""

    alone: tuple[float, float]  # time of a step on one GPU
    beside: tuple[float, float]  # factor by which it is longer beside other GPUs and all-reduces
    spread: float  # standard deviation of the GPUs' times in one step, relative
    nvlink_gbs: float  # GB/s that a GPU sends in an all-reduce within a host
    message_us: float  # an empty all-reduce between two GPUs
    buckets: tuple[tuple[int, float], ...]  # bytes, and the share of the pass after which they are computed

    gpus_per_host: int = 8
    nvlink_hop_us: float = 3.0  # each further hop within a host; NCCL's tuner has 3.4 us (Simple, NVLink)
    network_gbs: float = 45.0  # a GPU's share: 400 Gbit/s (NVIDIA DGX H100), 90 % of it
    network_hop_us: float = 8.0  # one hop between hosts; NCCL's tuner has 14 us (Simple) and 5 us (LL)


class Step(NamedTuple):
    ms: float
    alone_ms: float
    beside_ms: float  # including the cost of other GPUs and all-reduces at the same time
    slowest_ms: float  # the slowest GPU, for which all wait
    exposed_ms: float  # the part of the all-reduces that is not hidden
    all_reduce_ms: float
    algorithm: str  # for the largest bucket


def all_reduce_ms(num_bytes: float, gpus: int, machine: Machine, algorithm: str) -> float:
    """Latency + bytes / bandwidth, for `num_bytes` on each GPU. ring: Patarasuk and Yuan, 2009. tree: a chain in each
    host, two binary trees between them (Sanders, Speck and Traeff, 2009). switches: the network's switches do
    the additions (SHARP); each has 64 ports, half of them towards the next level."""
    hosts = math.ceil(gpus / machine.gpus_per_host)
    gbs = min(machine.nvlink_gbs, machine.gpus_per_host * machine.network_gbs) if hosts > 1 else machine.nvlink_gbs
    local, network, sent = {  # hops within and between hosts; how often a byte is sent
        "ring": (2 * (gpus - hosts), 2 * hosts * (hosts > 1), 2 * (gpus - 1) / gpus),
        "tree": (2 * (min(gpus, machine.gpus_per_host) - 1), 2 * math.ceil(math.log2(hosts)), 2.0),
        "switches": (2, 2 * math.ceil(math.log(hosts, 32)), 1.0),
    }[algorithm]
    # message_us was measured between two GPUs, so it includes their two hops.
    latency_us = machine.message_us + max(0.0, (local - 2) * machine.nvlink_hop_us + network * machine.network_hop_us)
    return latency_us / 1e3 + sent * num_bytes / (gbs * 1e6)


def largest_of(number: int) -> float:
    """Mean of the largest of this many standard normal variables (Blom, 1958; at most 5 % too large)."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25)) if number > 1 else 0.0


def predict(machine: Machine, gpus: int, batch: int, allowed: Sequence[str] = NCCL) -> Step:
    """Predict a step. A bucket's all-reduce begins when the slowest GPU has computed the bucket and the previous
    all-reduce is over."""
    alone, extra = (slope * batch + fixed for slope, fixed in (machine.alone, machine.beside))
    if gpus == 1:
        return Step(alone, alone, alone, alone, 0.0, 0.0, "none")
    slowest = (alone + extra) * (1 + machine.spread * largest_of(gpus))
    costs = [min((all_reduce_ms(size, gpus, machine, name), name) for name in allowed) for size, _ in machine.buckets]
    end = 0.0
    for (_, ready), (cost, _) in zip(machine.buckets, costs, strict=True):
        end = max(end, ready * slowest) + cost
    return Step(max(end, slowest), alone, alone + extra, slowest, max(0.0, end - slowest), sum(ms for ms, _ in costs),
                costs[0][1])


def measurements(results: Path = RESULTS) -> list[Row]:
    """The measurements of scaling.py on synthetic data. Raises UserError."""
    rows = []
    for path in (results / name for name in FILES):
        try:
            found = [row for row in read_rows(path.read_text()) if row["what"] == "synthetic"]
            if [(row["gpus"], len(row.get("buckets", ()))) for row in found] != [(1, 0), (2, 3), (4, 3)]:
                raise ValueError("its rows are not of 1, 2 and 4 GPUs with three messages each")
        except FileNotFoundError:
            raise UserError(f"{path} is missing: measure it as benchmarks/README.md says, or give --results") from None
        except DAMAGED as error:
            raise UserError(f"{path} is cut off or of another kind ({type(error).__name__}: {error}): measure it again "
                            "as benchmarks/README.md says, or give another --results") from None
        rows += found
    return rows


def fit(rows: Sequence[Row], most_gpus: int = 4) -> Machine:
    """A machine fitted to the rows with at most this many GPUs."""
    one = {row["batch"]: median(row["step_ms"]) for row in rows if row["gpus"] == 1}
    several = [row for row in rows if 1 < row["gpus"] <= most_gpus]
    longer = [fmean(row["each_alone_ms"]) - one[row["batch"]] + median(row["pass_ms"]) - median(row["pass_alone_ms"])
              for row in several]
    waits = [(fmean(row["wait_ms"]) - fmean(row["exposed_ms"])) / median(row["pass_ms"]) / largest_of(row["gpus"])
             for row in several if row["batch"] == max(one)]  # smaller ones do not reach the power limit
    messages: dict[tuple[int, int], float] = {}  # the shortest time of each, because a late host makes it longer
    for row in several:
        for (_, size, _), ms in zip(row["buckets"], row["all_reduce_ms"], strict=True):
            messages[row["gpus"], size] = min(ms, messages.get((row["gpus"], size), math.inf))
    sent, times, hops = np.asarray([(2 * (n - 1) / n * size, ms, 2 * (n - 2) * Machine.nvlink_hop_us / 1e3)
                                    for (n, size), ms in messages.items()]).T
    per_byte, message = np.polyfit(sent, times - hops, 1, w=1 / times)
    shares = [[ready / row["timeline"]["parts"][0] for ready, _ in row["timeline"]["buckets"]] for row in several]
    buckets = zip((size for _, size, _ in several[0]["buckets"]), map(fmean, zip(*shares, strict=True)), strict=True)
    alone = np.polyfit(list(one), list(one.values()), 1)
    beside = np.polyfit([row["batch"] for row in several], longer, 1)
    return Machine(tuple(alone), tuple(beside), fmean(waits), 1e-6 / per_byte, 1e3 * message, tuple(buckets))


def table(heads: str, rows: Iterable[Iterable[object]]) -> list[str]:
    head, *lines = [f"| {line} |" for line in (heads, *(" | ".join(map(str, row)) for row in rows))]
    return [head, "|---" * (head.count("|") - 1) + "|", *lines]


def error_table(rows: Sequence[Row]) -> list[str]:
    known, whole, cells = fit(rows, most_gpus=2), fit(rows), []
    for one, _, four in (rows[3:], rows[:3]):
        measured = median(four["step_ms"]) / median(one["step_ms"]) - 1
        step = predict(known, 4, four["batch"])
        cells.append((f"a step of 4 GPUs, batch {four['batch']}, longer than that of one (fitted to 1 and 2)",
                      f"{step.ms / step.alone_ms - 1:.1%}", f"{measured:.1%}"))
    few, many = (1e3 * batch / predict(whole, gpus, batch).ms for gpus, batch, _ in MLPERF)
    return table("| predicted | measured", [*cells, (
        "images/sec of each of 3,584 H100 at batch 16, over those of 64 at batch 50 (measured: MLPerf)",
        f"{many / few:.1%}", f"{MLPERF[1][2] / MLPERF[0][2]:.1%}")])


def plan_table(rows: Sequence[Row]) -> list[str]:
    wanted = [(gpus, batch, NCCL) for batch in (256, 64, 16) for gpus in (8, 64, 3584)]
    cells = []
    for gpus, batch, allowed in (*wanted, (3584, 16, ("switches",))):
        ms, alone, beside, slowest, exposed, all_reduce, by = predict(fit(rows), gpus, batch, allowed)
        times = (f"{each:.2f}" for each in (ms, alone, beside - alone, slowest - beside, exposed))
        cells.append((f"{gpus:,}", batch, *times, f"{all_reduce:.2f}, {by}", f"{1e3 * batch / ms:,.0f}",
                      f"{alone / ms:.1%}"))
    return table("GPUs | batch on each | step, ms | one GPU alone | others beside it | the slowest | not hidden | "
                 "all-reduces | images/sec of each | efficiency", cells)


@dataclass(frozen=True)
class Options:
    """Options of the fit."""

    results: Path = RESULTS
    """Folder of the measurements."""


def main() -> None:
    rows = measurements(read_options(Options).results)
    print(*("\n".join(make(rows)) for make in (error_table, plan_table)), sep="\n\n")


if __name__ == "__main__":
    run(main)
