"""Training on 1, 2, 4 and 8 GPUs of one machine, with equal batch per GPU: images/sec, and the all-reduce's cost.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/scaling.py [--data FOLDER]

For each number of GPUs that the machine has, this measures three things:
- our compiled step on synthetic data that lies on the GPU;
- the whole program, `python -m train benchmark`, on JPEGs (those of loader_gpu.py);
- PyTorch's DistributedDataParallel with torch.compile on synthetic data, on the fewest and the most GPUs.
Without images or without PEER_PYTHON, that part is left out. A step's time is the time of the slowest process.

With n the largest number of GPUs, writes results/scaling_b<batch>_<n>gpu.jsonl (a line for each measurement, with raw
times, written at once), its table (.md) and plot (.png), and allreduce_timeline_b<batch>_<n>gpu.png. For each number of
GPUs from two on, writes resnet50_fp16_b<batch>_<synthetic|jpeg>_<number>gpu.json; its peer is our figure for one GPU
times this number. `--redraw FILE` measures nothing: it draws the table and the plots from an earlier run's .jsonl.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from loader_gpu import repeated_records
from record import SAMPLE, Peer, check_trained, flags, run, write_result
from several_gpus import SeveralGpusOptions, measure_in_processes, run_command
from step_gpu import learning_rate, loss_scale, make_step

from common import files
from common.command_line import Positive, read_options
from common.errors import ProgramError, UserError
from common.nvidia_gpus import find_gpus
from graph_passes.executors.cuda.buckets import Bucket
from train.config import Config
from train.processes.allreduce import BucketAllReduce
from train.processes.distributed import Workers
from train.recording.gpu_monitor import GpuMonitor

PEER = Path(__file__).with_name("peer_pytorch.py")
# The peer's title is its own name.
LABELS = {"synthetic": "ours, synthetic", "jpeg": "ours, JPEGs"}
TURNS = 2  # rounds, each with every GPU alone and all GPUs together
ALONE_REPEATS = 10  # repetitions of the all-reduces that run with nothing beside them
Row = dict[str, Any]
DAMAGED = (ValueError, KeyError, TypeError, ArithmeticError)  # errors on reading a truncated or foreign file


# --- one process ---


class Moments(NamedTuple):
    """The CUDA events of a step, in order."""

    start: Any
    computed: Any  # end of the backward pass
    reduced: Any  # all gradients have been averaged
    end: Any


@dataclass(frozen=True)
class Options(SeveralGpusOptions):
    """Options of the measurement."""

    data: Path = SAMPLE
    """Class folders with JPEGs."""
    warm_up: int = 120
    """Warm-up steps, about 3 s of work: after an idle time, a GPU exceeds its power limit for the first second
    (docs/multi_gpu.md)."""
    buckets: Positive = Config().buckets
    """Number of buckets in which gradients are averaged."""
    wire_dtype: Literal["auto", "float32"] = "auto"
    """Type in which gradients are averaged."""
    gpus: tuple[Positive, ...] = (1, 2, 4, 8)
    """Numbers of GPUs to measure on, if the machine has them."""
    redraw: Annotated[Path | None, "FILE"] = None
    """Measure nothing, and draw the table and the plots from an earlier run's scaling_*.jsonl."""


class Steps:
    """Training steps on a few batches that lie on this process's GPU and alternate."""

    def __init__(self, workers: Workers, arguments: Options) -> None:
        wire = None if arguments.wire_dtype == "auto" else arguments.wire_dtype
        options: dict[str, Any] = {} if workers.alone else {"num_buckets": arguments.buckets, "wire_dtype": wire}
        self.executor, batches = make_step("resnet50", arguments.batch, 224, "float16", workers.local_rank, **options)
        self.batches = itertools.cycle(batches)
        self.learning_rate = learning_rate(arguments.batch)
        self.monitor = GpuMonitor(self.executor.gpu_bus_id)

    def run(self, count: int, all_reduce: BucketAllReduce | None, one_by_one: bool = False) -> list[Moments]:
        """Run `count` steps; with `all_reduce`, average the gradients of all processes.

        With `one_by_one`, each bucket is handed over when the previous bucket is in the GPU's queue, so that its event
        `done` is recorded directly after the bucket and not after all buckets.
        """
        def start(bucket: Bucket) -> None:
            if all_reduce:
                all_reduce.start(bucket)
                if one_by_one:
                    all_reduce.wait()

        executor, gpu = self.executor, self.executor.gpu
        steps = [Moments(*(gpu.timing_event() for _ in range(4))) for _ in range(count)]
        for moments in steps:
            gpu.record(moments.start)
            executor.forward_backward(*next(self.batches), on_bucket=start if all_reduce else None)
            gpu.record(moments.computed)
            if all_reduce:
                all_reduce.finish()
            gpu.record(moments.reduced)
            executor.optimizer.step(self.learning_rate)
            gpu.record(moments.end)
            executor.end_step()
        executor.synchronize()
        return steps

    def timeline(self, all_reduce: BucketAllReduce) -> Row:
        """The events of one step, in ms from its start: when each bucket was computed and averaged, and the others."""
        gpu = self.executor.gpu
        begin, *others = self.run(3, all_reduce, one_by_one=True)[-1]
        return {"buckets": [[gpu.elapsed_ms(begin, event) for event in (bucket.ready, bucket.done)]
                            for bucket in self.executor.step.buckets],
                "parts": [gpu.elapsed_ms(begin, event) for event in others]}

    def all_reduce_ms(self, all_reduce: BucketAllReduce) -> list[float]:
        """The time of each bucket's all-reduce in ms, with nothing beside it.

        It contains no wait, neither for another GPU nor for a host. The timed all-reduce follows the all-reduces of a
        whole pass, which all GPUs finish at the same time, and it is enqueued while that pass or the one before runs.
        """
        executor = self.executor
        executor.forward_backward(*next(self.batches))
        executor.forward_backward(*next(self.batches), on_bucket=all_reduce.start)
        all_reduce.finish()
        for bucket in executor.step.buckets:
            executor.gpu.record(bucket.ready)
            all_reduce.start(bucket)
            all_reduce.finish()
        executor.synchronize()
        return [executor.gpu.elapsed_ms(bucket.ready, bucket.done) for bucket in executor.step.buckets]


@dataclass
class ProcessTimes:
    """The step times of one process in ms, over all rounds in which GPUs work alone, or all together."""

    step_ms: list[float] = field(default_factory=list)
    pass_ms: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)  # from the end of the backward pass until gradients are averaged
    nvlink_bytes: int | None = None  # that this GPU sent per step in the last round
    watts: list[float] = field(default_factory=list)  # mean power in each round
    sm_mhz: list[float] = field(default_factory=list)  # mean clock in each round

    def measure(self, steps: Steps, count: int, all_reduce: BucketAllReduce | None) -> None:
        executor, gpu = steps.executor, steps.executor.gpu
        executor.read_metrics()  # drop the metrics of earlier steps
        scale_before = loss_scale(executor)
        steps.monitor.sample()
        steps.monitor.take()
        before = nvlink_bytes(gpu.device_id)
        measured = steps.run(count, all_reduce)
        after = nvlink_bytes(gpu.device_id)
        steps.monitor.sample()
        metrics, readings = executor.read_metrics(), steps.monitor.take()
        check_trained("ours", [metrics.loss_sum / metrics.count], [scale_before, loss_scale(executor)])
        self.watts.append(readings.power)
        self.sm_mhz.append(readings.clock)
        self.step_ms += [gpu.elapsed_ms(first.end, second.end) for first, second in itertools.pairwise(measured)]
        self.pass_ms += [gpu.elapsed_ms(moments.start, moments.computed) for moments in measured]
        self.wait_ms += [gpu.elapsed_ms(moments.computed, moments.reduced) for moments in measured]
        self.nvlink_bytes = None if before is None or after is None else (after - before) // count


def measure_synthetic(arguments: Options) -> None:
    """The work of each process of `run_synthetic`; rank 0 writes the row to --worker."""
    workers = Workers()
    steps = Steps(workers, arguments)
    all_reduce = None if workers.alone else workers.bucket_all_reduce(steps.executor)
    steps.monitor.start()
    nvlink_bytes(workers.local_rank)  # starts NVML now; later the GPU would idle for it
    steps.run(arguments.warm_up, all_reduce)
    alone, together = ProcessTimes(), ProcessTimes()
    for _ in range(TURNS):
        workers.sum([0])  # barrier: all processes start together
        alone.measure(steps, arguments.steps, None)
        if all_reduce:
            workers.sum([0])
            together.measure(steps, arguments.steps, all_reduce)
    if all_reduce:
        row = make_row(workers, steps, arguments.batch, alone, together, all_reduce)
    else:
        row = {"what": "synthetic", "gpus": 1, "batch": arguments.batch, "step_ms": alone.step_ms,
               "watts": statistics.fmean(alone.watts), "sm_mhz": statistics.fmean(alone.sm_mhz)}
    if workers.rank == 0:
        assert arguments.worker
        arguments.worker.write_text(json.dumps(row))


def make_row(workers: Workers, steps: Steps, batch: int, alone: ProcessTimes, together: ProcessTimes,
             all_reduce: BucketAllReduce) -> Row:
    """Combine the times of all processes into a row; a collective operation."""
    repeats = [steps.all_reduce_ms(all_reduce) for _ in range(ALONE_REPEATS)]
    waits = workers.gather(together.wait_ms)
    row: Row = {
        "what": "synthetic", "gpus": workers.size, "batch": batch,
        "step_ms": [max(times) for times in zip(*workers.gather(together.step_ms), strict=True)],
        "each_alone_ms": [statistics.median(times) for times in workers.gather(alone.step_ms)],
        "buckets": [(bucket.name, bucket.num_bytes, bucket.dtype) for bucket in steps.executor.step.buckets],
        "nvlink_bytes": together.nvlink_bytes,
        # The GPU that finishes its backward pass last waits only for the all-reduce.
        "exposed_ms": [min(times) for times in zip(*waits, strict=True)],
        "all_reduce_ms": [statistics.median(times) for times in zip(*repeats, strict=True)],  # of each bucket
        "timeline": steps.timeline(all_reduce),
        "watts": statistics.fmean(itertools.chain(*workers.gather(together.watts))),  # per GPU
        "sm_mhz": statistics.fmean(itertools.chain(*workers.gather(together.sm_mhz))),
    }
    # For each step, means over the GPUs: of the pass, and of the wait until gradients are averaged.
    for name, times in (("pass_alone_ms", workers.gather(alone.pass_ms)),
                        ("pass_ms", workers.gather(together.pass_ms)), ("wait_ms", waits)):
        row[name] = [statistics.fmean(each) for each in zip(*times, strict=True)]
    return row


def nvlink_bytes(device_id: int) -> int | None:
    """Payload bytes that this GPU has sent over all its NVLinks since the driver started; None if NVML has no count."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(device_id)
        every_link = 0xFFFFFFFF
        (value,) = pynvml.nvmlDeviceGetFieldValues(
            handle, [(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, every_link)]
        )
    except pynvml.NVMLError:
        return None
    return None if value.nvmlReturn != pynvml.NVML_SUCCESS else 1024 * int(value.value.ullVal)  # NVML counts KiB


# --- all processes ---


def run_synthetic(count: int, arguments: Options) -> list[Row]:
    options = flags(arguments, "batch", "steps", "warm_up", "buckets", "wire_dtype")
    row = measure_in_processes(count, __file__, options)
    return [row] if row else []


def run_jpeg(count: int, arguments: Options, folder: Path, records: Path) -> list[Row]:
    output = folder / f"jpeg{count}"
    start = ["-m", "train"] if count == 1 else ["-m", "train.processes.launch", "-n", count]
    command = [sys.executable, *start, "benchmark", "--config", "resnet50_90ep", "--data", records,
               "--num-classes", 1000, "--batch-size", arguments.batch, "--output", output, "--no-tensorboard",
               "--no-zero-init-residual",
               "--min-steps", arguments.steps, "--warmup-steps", arguments.warm_up,
               *flags(arguments, "buckets", "wire_dtype")]
    if run_command(command) is None:
        return []
    record = json.loads((output / "report" / "report.json").read_text())
    row: Row = {"what": "jpeg", "gpus": count, "batch": arguments.batch,
                **{name: record[name][arguments.warm_up :] for name in ("step_ms", "loader_wait_ms")}}
    meters = record["summary"]
    if meters["gpu_power"]:  # None if NVML has no reading
        row |= {"watts": meters["gpu_power"] / count, "sm_mhz": meters["gpu_clock"]}
    return [row]


def run_peer(count: int, arguments: Options) -> list[Row]:
    """Measure PyTorch's DistributedDataParallel, in an environment without our own libraries.

    Each process sees only its own GPU, as number 0, so that all share torch.compile's cache on disk.
    """
    command = [os.environ["PEER_PYTHON"], "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}",
               "--virtual-local-rank", PEER, "--ddp", "--learning-rate", learning_rate(arguments.batch),
               *flags(arguments, "batch", "steps", "warm_up")]
    environment = dict.fromkeys(("PYTHONPATH", "LD_LIBRARY_PATH"), "")
    lines = [line for line in (run_command(command, environment) or "").splitlines() if line.startswith("{")]
    if not lines:
        return []
    result = json.loads(lines[-1])
    check_trained(result["name"], [result["loss"]], result["loss_scales"])
    return [{"what": result["name"], "gpus": count, "batch": arguments.batch, "step_ms": result["step_ms"]}]


def images_per_sec(row: Row) -> float:
    return row["gpus"] * row["batch"] * 1e3 / statistics.median(row["step_ms"])


def single_of(row: Row, rows: list[Row]) -> Row | None:
    """The one-GPU row with this row's program and batch; None if it was not measured."""
    wanted = row["what"], row["batch"], 1
    return next((other for other in rows if (other["what"], other["batch"], other["gpus"]) == wanted), None)


def sent_bytes(row: Row) -> float:
    """Bytes that each GPU must send per step: a ring all-reduce of M bytes over n GPUs sends 2 M (n - 1) / n."""
    return 2 * (row["gpus"] - 1) / row["gpus"] * sum(num_bytes for _, num_bytes, _ in row["buckets"])


def table(rows: list[Row]) -> str:
    """The Markdown table.

    `efficiency` is the speed relative to n times one GPU whose neighbours rest; `of all alone` is relative to n GPUs
    that all train at once, but each alone. Three columns explain why a step on several GPUs takes longer than the step
    of a mean GPU alone: the pass is slowed down by concurrent all-reduces, a GPU waits for the slowest GPU, and a part
    of the all-reduces is exposed.
    """
    heads = ("", "GPUs", "images/sec", "per GPU", "efficiency", "joules per image", "mean GPU alone", "slowest",
             "of all alone", "pass slowed by", "wait for the slowest", "all-reduce alone", "exposed", "hidden",
             "GPU sends")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        single = single_of(row, rows)
        speed = images_per_sec(row)
        per_gpu = speed / row["gpus"]
        cells = [LABELS.get(row["what"]) or row["what"], str(row["gpus"]), f"{speed:,.0f}", f"{per_gpu:,.0f}",
                 f"{per_gpu / images_per_sec(single):.1%}" if single else "",
                 f"{row['watts'] / per_gpu:.4f}" if "watts" in row else ""]
        if "buckets" in row:
            each_alone = [row["batch"] * 1e3 / ms for ms in row["each_alone_ms"]]
            mean_alone = statistics.fmean(each_alone)
            alone, exposed = sum(row["all_reduce_ms"]), statistics.median(row["exposed_ms"])
            slowed = statistics.median(row["pass_ms"]) - statistics.median(row["pass_alone_ms"])
            straggling = statistics.median(row["wait_ms"]) - exposed
            moved, source = (row["nvlink_bytes"], "NVML") if row["nvlink_bytes"] else (sent_bytes(row), "computed")
            cells += [f"{mean_alone:,.0f}", f"{min(each_alone):,.0f}", f"{per_gpu / mean_alone:.1%}",
                      f"{slowed:.2f} ms", f"{straggling:.2f} ms", f"{alone:.2f} ms", f"{exposed:.2f} ms",
                      f"{max(0.0, 1 - exposed / alone):.0%}", f"{moved / 1e6:.0f} MB ({source})"]
        cells += [""] * (len(heads) - len(cells))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Plot images/sec over GPUs, one line for each kind of measurement; dashed: linear scaling from one GPU."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (total, each) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for what in dict.fromkeys(row["what"] for row in rows):
        points = [(row["gpus"], images_per_sec(row)) for row in rows if row["what"] == what]
        gpus, speeds = zip(*points, strict=True)
        (line,) = total.plot(gpus, speeds, "o-")
        each.plot(gpus, [speed / count for count, speed in points], "o-", label=LABELS.get(what, what))
        if gpus[0] == 1:
            for axes, ideal in ((total, [count * speeds[0] for count in gpus]), (each, [speeds[0] for _ in gpus])):
                axes.plot(gpus, ideal, "--", color=line.get_color(), linewidth=0.8)
    for axes, title in ((total, "images/sec, all GPUs"), (each, "images/sec per GPU")):
        axes.set(title=title, xlabel="GPUs", xticks=sorted({row["gpus"] for row in rows}))
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
    each.legend(loc="lower left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_timeline(row: Row, path: Path) -> None:
    """Plot a step: computation above, all-reduces below; and a second time its end, enlarged to show microseconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    computed, reduced, end = row["timeline"]["parts"]
    figure, (whole, close) = plt.subplots(1, 2, figsize=(11, 2.8), layout="constrained", width_ratios=(2, 1))
    for axes in (whole, close):
        axes.set_ylim(-0.6, 2)  # room for text and legend below the bars
        for start, stop, name, colour in ((0.0, computed, "forward and backward", "tab:blue"),
                                          (reduced, end, "optimizer", "tab:green")):
            axes.broken_barh([(start, stop - start)], (1.1, 0.8), color=colour, label=name)
        before, small = 0.0, []
        for (name, num_bytes, dtype), (ready, done) in zip(row["buckets"], row["timeline"]["buckets"], strict=True):
            start = max(ready, before)  # buckets are averaged one after the other
            axes.broken_barh([(start, done - start)], (0.1, 0.8), color="tab:orange", edgecolor="black", linewidth=0.5)
            text = f"{name}, {num_bytes / 1e6:.1f} MB {dtype}: {1e3 * (done - start):.0f} us"
            if num_bytes < 2e6:
                small.append(text)
            elif axes is whole:
                axes.annotate(text, (start, 0.5), (-4, 0), textcoords="offset points", ha="right", va="center",
                              fontsize=8)
            axes.axvline(ready, color="black", linewidth=0.5, linestyle=":")
            before = done
        if axes is close:
            axes.text(0.97, 0.05, "\n".join(small), transform=axes.transAxes, ha="right", fontsize=8)
    last = row["timeline"]["buckets"][-1][0]
    whole.set(yticks=[0.5, 1.5], yticklabels=["all-reduce", "GPU 0"], xlim=(0, end * 1.01))
    whole.set(xlabel="ms since the step began; dotted: the moment when a bucket of gradients is computed",
              title=f"A step of ResNet-50, batch {row['batch']} on each of {row['gpus']} GPUs")
    close.set(yticks=[], xlim=(last - (end - last) / 3, end + (end - last) / 10), xlabel="ms", title="its end")
    whole.legend(loc="lower left", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def read_rows(text: str) -> list[Row]:
    """Read the rows of a scaling_*.jsonl. Raises one of DAMAGED if they cannot be drawn.

    All rows must have one batch size. Times must be positive; waits (for a GPU, the all-reduces or the loader) may be
    0. Rows with buckets must have all fields of buckets.
    """
    rows: list[Row] = [json.loads(line) for line in text.splitlines()]
    if len({row["batch"] for row in rows}) != 1:
        raise ValueError("there are no rows, or rows with different batch sizes")
    for row in rows:
        counts, waits = [row["gpus"], row["batch"]], [*row.get("loader_wait_ms", [])]
        lists: list[list[Any]] = [counts, row["step_ms"], [row.get("watts", 1)]]
        num_alone = row["gpus"]
        if "buckets" in row:
            computed, reduced, end = row["timeline"]["parts"]
            buckets = [(num_bytes, ms, ready, done) for (_, num_bytes, _), ms, (ready, done) in zip(
                row["buckets"], row["all_reduce_ms"], row["timeline"]["buckets"], strict=True)]
            lists += [row["each_alone_ms"], row["pass_alone_ms"], row["pass_ms"], [computed, reduced, end],
                      [row["nvlink_bytes"] or 1], list(itertools.chain(*buckets))]
            waits += [*row["exposed_ms"], *row["wait_ms"]]
            num_alone = len(row["each_alone_ms"])
        numbers = [*itertools.chain(*lists), *(wait or 1 for wait in waits)]
        if (not all(lists) or num_alone != row["gpus"] or not all(type(count) is int for count in counts)
                or not all(type(number) in (int, float) and 0 < number < math.inf for number in numbers)):
            raise ValueError(f"the row of {row['what']} on {row['gpus']} GPUs has missing or impossible numbers")
    return rows


def redraw(path: Path, results: Path) -> None:
    """Draw the table and plots of an earlier run, named by the number of GPUs in its file's name. Raises UserError if
    they would overwrite another run's."""
    text = path.read_bytes()
    try:
        rows = read_rows(text.decode())
        name = re.fullmatch(r"scaling_b\d+_(\d+)gpu", path.stem)
        num_gpus, drawn = int(name[1]) if name else max(row["gpus"] for row in rows), table(rows)
    except DAMAGED as error:
        raise UserError(f"--redraw {path} is not a file of {Path(__file__).name}, or is cut off "
                        f"({type(error).__name__}: {error}); give another file, or measure again") from None
    measured = path_of_rows(rows, num_gpus, results)
    if measured.exists() and measured.read_bytes() != text:
        raise UserError(f"--redraw {path} would overwrite the table and plots of another run, {measured}: give another "
                        "--results")
    draw(rows, measured)
    print(drawn)


def main() -> None:
    arguments = read_options(Options)
    if arguments.worker:
        measure_synthetic(arguments)
        return
    if arguments.redraw:
        redraw(arguments.redraw, arguments.results)
        return
    num_gpus = len(find_gpus())
    counts = [count for count in arguments.gpus if count <= num_gpus]
    if not counts:
        raise UserError(f"--gpus {min(arguments.gpus)} is more than the {num_gpus} NVIDIA GPUs here")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        records = repeated_records(arguments.data, folder / "records") if arguments.data.is_dir() else None
        if not records:
            print(f"{arguments.data} is not a folder: nothing is measured from JPEGs", file=sys.stderr)
        measurements: list[Callable[[], list[Row]]] = []
        for count in counts:
            measurements.append(partial(run_synthetic, count, arguments))
            if records:
                measurements.append(partial(run_jpeg, count, arguments, folder, records))
        if "PEER_PYTHON" in os.environ:
            measurements += [partial(run_peer, count, arguments) for count in dict.fromkeys((max(counts), min(counts)))]
        failed = 0
        for measure in measurements:
            measured = measure()
            failed += not measured
            rows = sorted([*rows, *measured], key=order)
            if rows:
                write(rows, max(counts), arguments.results)  # now, as the peer may take minutes to compile
            for row in measured:
                publish(row, rows, arguments.results)
    print(table(rows))
    if failed:
        raise ProgramError(f"{failed} of {len(measurements)} measurements failed, see above")


def order(row: Row) -> tuple[bool, int, str]:
    """Sort key of rows: ours first."""
    return row["what"] not in LABELS, row["gpus"], row["what"]


def write(rows: list[Row], num_gpus: int, folder: Path) -> None:
    """Write the rows, their table and their plots, named by the whole run. Raises UserError."""
    path = path_of_rows(rows, num_gpus, folder)
    files.write(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    draw(rows, path)


def path_of_rows(rows: list[Row], num_gpus: int, folder: Path) -> Path:
    return folder / f"scaling_b{rows[0]['batch']}_{num_gpus}gpu.jsonl"


def draw(rows: list[Row], path: Path) -> None:
    """Draw the table and the plots beside `path`, the file of the rows, which need not exist. Raises UserError."""
    files.write(path.with_suffix(".md"), f"{table(rows)}\n".encode())
    plot(rows, path.with_suffix(".png"))  # --redraw makes it, too
    with_buckets = [row for row in rows if "buckets" in row]
    if with_buckets:  # the row with the most GPUs
        plot_timeline(with_buckets[-1], path.with_name(f"{path.stem.replace('scaling', 'allreduce_timeline')}.png"))


def publish(row: Row, rows: list[Row], folder: Path) -> None:
    """Publish a row of ours on several GPUs as a figure; the peer is one GPU of the same run."""
    single = single_of({**row, "what": "synthetic"}, rows)
    if row["what"] in LABELS and row["gpus"] > 1 and single:
        write_result(f"resnet50_fp16_b{row['batch']}_{row['what']}_{row['gpus']}gpu", row["step_ms"],
                     row["gpus"] * row["batch"],
                     Peer(f"{row['gpus']} times one GPU, synthetic, same run", single["step_ms"]),
                     row.get("watts", math.nan), row.get("sm_mhz", math.nan), folder)


if __name__ == "__main__":
    run(main)
