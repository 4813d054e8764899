"""What shared BatchNorm statistics (`--bn-group`) cost: the compiled step on several GPUs, synthetic data.

    python benchmarks/bn_group.py [--gpus 4] [--batch 64]

Groups of 1, 2, 4 ... GPUs as far as there are, in turn in the same processes. Writes, for each size above 1,
results/resnet50_fp16_b<batch>_bn_group<size>_synthetic_<n>gpu.json; the peer is the step without groups. A step's time
is that of the slowest process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record import RESULTS, run, write_result
from scaling import LAUNCH, run_command
from step_gpu import LEARNING_RATE, WARM_UP, make_step

from nvidia_gpus import find_gpus
from train.build import join_bn_group
from train.config import Config
from train.devices import Placement
from train.distributed import Workers
from train.errors import TrainError

ROUNDS = 3


def sizes(num_gpus: int) -> list[int]:
    return [size for size in (1, 2, 4, 8) if num_gpus % size == 0]


def measure(arguments: argparse.Namespace) -> None:
    """What each process does; rank 0 writes the times by size of group to --worker."""
    workers = Workers()
    placement = Placement("cuda", f"gpu({workers.local_rank})", "")
    made = {}
    for size in sizes(workers.size):
        group = join_bn_group(Config(bn_group=size), placement, workers)
        executor, data, label = make_step(50, arguments.batch, 224, "float16", workers.local_rank,
                                          num_buckets=2, group=group)
        made[size] = executor, data, label, workers.gradient_average(executor)
    times: dict[int, list[float]] = {size: [] for size in made}
    for _, size in itertools.product(range(ROUNDS), made):
        executor, data, label, average = made[size]
        ends = [executor.gpu.timing_event() for _ in range(arguments.steps + 1)]
        for number in range(-WARM_UP, len(ends)):
            executor.forward_backward(data, label, on_bucket=average.start)
            average.finish()
            executor.update(LEARNING_RATE)
            if number >= 0:
                executor.gpu.record(ends[number])
            executor.end_step()
        executor.read_metrics()  # which also tells of a GPU that has waited in vain
        step_ms = [executor.gpu.elapsed_ms(first, second) for first, second in itertools.pairwise(ends)]
        times[size] += [max(every) for every in zip(*workers.gather(step_ms), strict=True)]
    if workers.rank == 0:
        arguments.worker.write_text(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="images on each GPU")
    parser.add_argument("--steps", type=int, default=20, help="in each of the three turns")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments)
        return
    num_gpus, count, batch = len(find_gpus()), arguments.gpus, arguments.batch
    if num_gpus < count or count < 2:
        raise TrainError(f"--gpus {count} must be from 2 to the number of NVIDIA GPUs here, {num_gpus}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, "-c", LAUNCH, count, sys.executable, __file__,
                   "--worker", out, "--batch", batch, "--steps", arguments.steps]
        if not run_command(command):
            raise TrainError(f"the measurement on {count} GPUs failed, see above")
        times = {int(size): step_ms for size, step_ms in json.loads(out.read_text()).items()}
    for size in sizes(count)[1:]:
        write_result(f"resnet50_fp16_b{batch}_bn_group{size}_synthetic_{count}gpu", times[size], count * batch,
                     "the same without groups", times[1], folder=arguments.results)


if __name__ == "__main__":
    run(main)
