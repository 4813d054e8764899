"""Measures the cost of shared BatchNorm statistics (`--bn-group`): the compiled step on several GPUs, synthetic data.

    python benchmarks/bn_group.py [--gpus 4] [--batch 64]

Groups of 1, 2, 4 ... up to all GPUs alternate in the same processes. For each group size above 1, writes
results/resnet50_fp16_b<batch>_bn_group<size>_synthetic_<n>gpu.json; the peer is the step without groups. A step's time
is the time of the slowest process.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass

from record import Peer, check_trained, flags, run, write_result
from several_gpus import SeveralGpusOptions, check_gpus, measure_in_processes
from step_gpu import WARM_UP_SECONDS, learning_rate, loss_scale, make_step

from common.command_line import Positive, read_options
from common.errors import ProgramError
from train.build import join_bn_group
from train.config import Config
from train.devices import Placement
from train.processes.distributed import Workers
from train.recording.gpu_monitor import GpuMonitor

ROUNDS = 3
IMAGES_PER_SEC = 10_000  # of one GPU, roughly; used to convert three seconds to steps


def sizes(num_gpus: int) -> list[int]:
    return [size for size in (1, 2, 4, 8) if num_gpus % size == 0]


@dataclass(frozen=True)
class Options(SeveralGpusOptions):
    """Options of the measurement."""

    batch: Positive = 64
    """Images on each GPU."""
    steps: Positive = 20
    """Timed steps in each round."""
    gpus: Positive = 4
    """Number of GPUs to use."""


def measure(arguments: Options) -> None:
    """The work of each process; rank 0 writes the times by group size to --worker."""
    workers = Workers()
    placement = Placement("cuda", f"gpu({workers.local_rank})", "")
    made = {}
    for size in sizes(workers.size):
        group = join_bn_group(Config(bn_group=size), placement, workers)
        executor, batches = make_step("resnet50", arguments.batch, 224, "float16", workers.local_rank, num_buckets=2,
                                      group=group)
        made[size] = executor, itertools.cycle(batches), workers.gradient_all_reduce(executor)
    monitor = GpuMonitor(made[1][0].gpu_bus_id)
    monitor.start()
    found: dict[int, dict[str, list[float]]] = {size: {"step_ms": [], "watts": [], "sm_mhz": []} for size in made}
    warm_up = round(WARM_UP_SECONDS * IMAGES_PER_SEC / arguments.batch)  # steps, equal in all processes
    for _, size in itertools.product(range(ROUNDS), made):
        executor, in_turn, all_reduce = made[size]
        ends = [executor.gpu.timing_event() for _ in range(arguments.steps + 1)]
        for number in range(-warm_up, len(ends)):
            if number == 0:
                executor.read_metrics()  # drop the warm-up's metrics
                monitor.sample()
                monitor.take()
                scale_before = loss_scale(executor)
            data, label = next(in_turn)
            executor.forward_backward(data, label, on_bucket=all_reduce.start)
            all_reduce.finish()
            executor.optimizer.step(learning_rate(arguments.batch))
            if number >= 0:
                executor.gpu.record(ends[number])
            executor.end_step()
        metrics = executor.read_metrics()  # also reports a GPU that timed out waiting
        check_trained(f"groups of {size}", [metrics.loss_sum / metrics.count], [scale_before, loss_scale(executor)])
        monitor.sample()
        readings = monitor.take()
        step_ms = [executor.gpu.elapsed_ms(first, second) for first, second in itertools.pairwise(ends)]
        found[size]["step_ms"] += [max(every) for every in zip(*workers.gather(step_ms), strict=True)]
        found[size]["watts"] += workers.gather(readings.power)
        found[size]["sm_mhz"] += workers.gather(readings.clock)
    if workers.rank == 0:
        assert arguments.worker
        arguments.worker.write_text(json.dumps(found))


def main() -> None:
    arguments = read_options(Options)
    if arguments.worker:
        measure(arguments)
        return
    count, batch = arguments.gpus, arguments.batch
    check_gpus(count)
    found = measure_in_processes(count, __file__, flags(arguments, "batch", "steps"))
    if found is None:
        raise ProgramError(f"the measurement on {count} GPUs failed, see above")
    for size in sizes(count)[1:]:
        ours = found[str(size)]
        write_result(f"resnet50_fp16_b{batch}_bn_group{size}_synthetic_{count}gpu", ours["step_ms"], count * batch,
                     Peer("the same without groups", found["1"]["step_ms"]), statistics.fmean(ours["watts"]),
                     statistics.fmean(ours["sm_mhz"]), arguments.results)


if __name__ == "__main__":
    run(main)
