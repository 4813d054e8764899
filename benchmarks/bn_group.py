"""What shared BatchNorm statistics (`--bn-group`) cost: the compiled step on several GPUs, synthetic data.

    python benchmarks/bn_group.py [--gpus 4] [--batch 64]

Groups of 1, 2, 4 ... GPUs as far as there are, in turn in the same processes. Writes, for each size above 1,
results/resnet50_fp16_b<batch>_bn_group<size>_synthetic_<n>gpu.json; the peer is the step without groups. A step's time
is that of the slowest process.
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
IMAGES_PER_SEC = 10_000  # of a GPU, about: how many steps three seconds are


def sizes(num_gpus: int) -> list[int]:
    return [size for size in (1, 2, 4, 8) if num_gpus % size == 0]


@dataclass(frozen=True)
class Options(SeveralGpusOptions):
    """What is measured on how many GPUs."""

    batch: Positive = 64
    """Images on each GPU."""
    steps: Positive = 20
    """Counted steps in each turn."""
    gpus: Positive = 4
    """How many to use."""


def measure(arguments: Options) -> None:
    """What each process does; rank 0 writes the times by size of group to --worker."""
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
    warm_up = round(WARM_UP_SECONDS * IMAGES_PER_SEC / arguments.batch)  # steps, as many in all processes
    for _, size in itertools.product(range(ROUNDS), made):
        executor, in_turn, all_reduce = made[size]
        ends = [executor.gpu.timing_event() for _ in range(arguments.steps + 1)]
        for number in range(-warm_up, len(ends)):
            if number == 0:
                executor.read_metrics()  # those of the warm-up
                monitor.sample()
                monitor.take()
                scale_before = loss_scale(executor)
            data, label = next(in_turn)
            executor.forward_backward(data, label, on_bucket=all_reduce.start)
            all_reduce.finish()
            executor.update(learning_rate(arguments.batch))
            if number >= 0:
                executor.gpu.record(ends[number])
            executor.end_step()
        metrics = executor.read_metrics()  # which also tells of a GPU that has waited in vain
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
