"""Gradients averaged over GPUs by NCCL, through Horovod: against their mean, and whole steps against one GPU alone.

With one GPU, one process runs the same code; the mean is then the gradient itself.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from several_processes import needs_horovod, run_processes

from common.nvidia_gpus import find_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.alone, needs_horovod]


def run_on_gpus(count: int, script: str, *arguments: object) -> str:
    """The output of a script run in one process for each of `count` GPUs."""
    if len(find_gpus()) < count:
        pytest.skip(f"{count} GPUs are needed, {len(find_gpus())} are there")
    done = run_processes(script, *arguments, count=count)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


PREPARE = """
import sys
import numpy as np
from graph_passes import Graph
from graph_passes.executors import create_executor
from common.mxnet_compat import mx
from train.processes.distributed import Workers
from train.models.network import init_params
from train.models.resnet import resnet

SHAPES = {"data": (12, 64, 64, 3), "softmax_label": (12,)}
workers = Workers()
gpu = mx.gpu(workers.local_rank)
symbol = resnet(18, num_classes=10)


def make(dtype, **options):
    graph, device = Graph.from_json(symbol.tojson()), f"gpu({workers.local_rank})"
    executor = create_executor("cuda", graph, SHAPES, device, dtype=dtype, tf32=False, deterministic=True, **options)
    executor.set_params(*init_params(symbol, seed=5))
    return executor


def batch(seed):
    rng = np.random.default_rng(seed)
    data = rng.standard_normal(SHAPES["data"]).astype(np.float32)
    label = rng.integers(0, 10, SHAPES["softmax_label"]).astype(np.float32)
    return mx.nd.array(data, ctx=gpu), mx.nd.array(label, ctx=gpu)


def flat(arrays):
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])
"""

MEANS = """
def gradients(executor):  # one in five, from all over: the processes send them to each other
    executor.synchronize()
    return {b.name: executor.gpu.download(b.address, (b.num_elements,), b.dtype)[::5] for b in executor.step.buckets}


for dtype, wire in (("float32", "float32"), ("float16", "float32"), ("float16", "float16")):
    executor = make(dtype, num_buckets=3, wire_dtype=wire)
    assert len(executor.step.buckets) == 4
    all_reduce = workers.gradient_all_reduce(executor)
    for seed in range(2):
        data, label = batch(workers.rank + 10 * seed)
        executor.forward_backward(data, label)
        executor.hand_over(lambda bucket: None)
        every = workers.gather(gradients(executor))
        executor.forward_backward(data, label, on_bucket=all_reduce.start)
        all_reduce.finish()
        for name, values in gradients(executor).items():
            local = np.stack([rank[name].astype(np.float64) for rank in every])
            assert np.abs(local).max() > 0
            assert workers.size == 1 or np.abs(local[0] - local[1]).max() > 0
            error = np.abs(values - local.mean(0))
            # In float32 1e-6. In float16 each of `size` terms and sums is rounded, by 2^-11 or to a subnormal number.
            half = values.dtype == np.float16
            rounding = workers.size * (2.0**-11 * np.abs(local).sum(0) / workers.size + 2.0**-25)
            bound = rounding if half else 1e-6 * np.abs(local).max()
            assert (error <= bound).all(), (dtype, wire, name, error.max())
            print("worst", dtype, wire, name, error.max() / np.abs(local).max(), flush=True)
"""


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_become_their_mean(count):
    out = run_on_gpus(count, PREPARE + MEANS)
    print("\n".join(line for line in out.splitlines() if "weights 1" in line))
    assert out.count("worst") == count * 3 * 2 * 4


HUNDRED_STEPS = """
import hashlib
for dtype in ("float16", "bfloat16"):
    executor = make(dtype, num_buckets=2, wire_dtype="float32" if dtype == "bfloat16" else None)
    all_reduce = workers.gradient_all_reduce(executor)
    for step in range(100):
        data, label = batch(1000 * workers.rank + step)
        if step in (40, 70) and workers.rank == workers.size - 1 and dtype == "float16":
            # One rank's overflow: all must leave this step out.
            data = mx.nd.array(np.full(SHAPES["data"], np.inf), ctx=gpu)
        executor.forward_backward(data, label, on_bucket=all_reduce.start)
        all_reduce.finish()
        executor.optimizer.step(0.05)
        executor.end_step()
    params, _ = executor.get_params()
    digests = workers.gather([hashlib.sha256(flat(values).tobytes()).hexdigest()
                              for values in (params, executor.step.get_state()["momentum"])]
                             + [executor.optimizer.scalars])
    assert all(digest == digests[0] for digest in digests), digests
    assert np.isfinite(flat(params)).all()
    moved = np.abs(flat(params) - flat(init_params(symbol, seed=5)[0])).max()
    assert moved > 1e-2, moved
    print("scaling", executor.optimizer.scalars, flush=True)
"""


@pytest.mark.parametrize("count", [1, 2, 4])
def test_weights_are_the_same_bits_after_100_steps(count):
    out = run_on_gpus(count, PREPARE + HUNDRED_STEPS)
    # 1024 at first, halved for each of the two skipped steps
    assert re.findall(r"'loss_scale': ([\d.]+)", out) == ["256.0"] * count


SAME_AS_ONE = """
executor = make("float32", num_buckets=2)
all_reduce = workers.gradient_all_reduce(executor)
for step in range(3):
    for part in range(2):  # two passes in each step
        executor.forward_backward(*batch(100 * step + 10 * part + workers.rank), accumulate=part > 0)
    all_reduce.finish()
    executor.optimizer.step(0.1, scale=1 / 2)
if workers.rank == 0:
    alone = make("float32")
    for step in range(3):
        for number in range(2 * workers.size):
            part, rank = divmod(number, workers.size)
            alone.forward_backward(*batch(100 * step + 10 * part + rank), accumulate=number > 0)
        alone.optimizer.step(0.1, scale=1 / (2 * workers.size))
    start, got, wanted = (flat(p) for p in (init_params(symbol, seed=5)[0], executor.get_params()[0],
                                            alone.get_params()[0]))
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted - start)
    print("error", error)
    # fp32 sums in another order, over three steps; where that changes the sign at a ReLU, gradients below it move by up
    # to 1e-2 (docs/cuda_executor.md). One of n independent batches left out or counted twice makes about 1 / sqrt(n).
    assert error < 5e-3, error
workers.sum([0.0])
"""


@pytest.mark.parametrize("count", [1, 2, 4])
def test_several_gpus_do_what_one_does_with_as_many_batches(count):
    assert "error" in run_on_gpus(count, PREPARE + SAME_AS_ONE)


FUSED = """
import hashlib
from graph_passes.executors.cuda.prices import Prices

# The fused kernels wherever this GPU can take them, whatever its clock says; else what is the fastest.
OWN = ("DgradReduce", "NormBackward", "NormBackwardReduce", "StemFprop", "StemWgrad")
times = Prices._times
Prices._times = lambda self, *asked: {each: 1e-9 if each.label in OWN and ms < float("inf") else ms
                                      for each, ms in times(self, *asked).items()}

SHAPES = {"data": (64, 224, 224, 3), "softmax_label": (64,)}
symbol = resnet(50, num_classes=10)
params, aux = init_params(symbol, seed=5)
params = {name: value if value.any() or not name.endswith("_gamma") else value + 0.25 for name, value in params.items()}


def make_fused(**options):
    graph, device = Graph.from_json(symbol.tojson()), f"gpu({workers.local_rank})"
    executor = create_executor("cuda", graph, SHAPES, device, dtype="float16", **options)
    executor.set_params(params, aux)
    operations = {launch.operation for launch in executor.step.training.program.launches}
    assert {"dgrad_reduce", "norm_backward", "stem_fprop", "stem_wgrad"} <= operations, operations
    return executor


executor, alone = make_fused(num_buckets=2), make_fused()
all_reduce = workers.gradient_all_reduce(executor)
executor.forward_backward(*batch(workers.rank), on_bucket=all_reduce.start)
all_reduce.finish()
got = executor.step.get_gradients()
sums = []
for repetition in range(2):
    for rank in range(workers.size):
        alone.forward_backward(*batch(rank), accumulate=rank > 0)
    sums.append(alone.step.get_gradients())


def errors(one, other, factor):
    found = {}
    for name, gradient in other.items():
        assert gradient.any(), name
        found[name] = np.linalg.norm(one[name] - factor * gradient) / np.linalg.norm(factor * gradient)
    return np.array(sorted(found.values()))


# Sums whose order varies are rounded otherwise in each pass, which may put a ReLU on either side of 0: so far does one
# GPU differ from itself. One of n batches left out makes about 1 / sqrt(n).
noise, error = errors(*sums, 1), errors(got, sums[0], 1 / workers.size)
print("errors", np.median(error), error[-1], "of one GPU", np.median(noise), noise[-1], flush=True)
assert np.median(error) < 1.5 * np.median(noise) + 1e-3 and error[-1] < 2 * noise[-1] + 1e-3
assert np.median(error) < 0.25

for step in range(20):
    executor.forward_backward(*batch(1000 * workers.rank + step), on_bucket=all_reduce.start)
    all_reduce.finish()
    executor.optimizer.step(0.02)
    executor.end_step()
trained, _ = executor.get_params()
digests = workers.gather([hashlib.sha256(flat(values).tobytes()).hexdigest()
                          for values in (trained, executor.step.get_state()["momentum"])])
assert all(digest == digests[0] for digest in digests), digests
assert np.isfinite(flat(trained)).all() and np.abs(flat(trained) - flat(params)).max() > 1e-3
print("same bits", flush=True)
"""


@pytest.mark.parametrize("count", [1, 2, 4])
def test_fused_kernels_on_several_gpus(count):
    """ResNet-50 as in real training, not deterministic: averaged gradients equal those of as many batches on one GPU,
    and after 20 steps all GPUs have the same weights."""
    out = run_on_gpus(count, PREPARE + FUSED)
    print("\n".join(line for line in out.splitlines() if line.startswith("errors")))
    assert out.count("same bits") == count


MAILBOXES = """
import ctypes
import tempfile
from pathlib import Path
import numpy as np
from common.disk_cache import Cache
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernel_library import KernelLibrary
from graph_passes.executors.cuda.statistics_group import THREADS, StatisticsGroup
from common.nvidia_gpus import find_gpus
from train.processes.distributed import Workers

workers = Workers()
device_id = workers.rank % len(find_gpus())
group = StatisticsGroup(device_id)
group.join(workers.gather(group.invitation), workers.rank)
gpu = Gpu(device_id)
with tempfile.TemporaryDirectory() as folder:
    kernel = KernelLibrary(gpu, Cache("tests", Path(folder))).get("batch_norm_group.cu", "group_mean")
arrays = np.random.default_rng(workers.rank).standard_normal((50, 3, 700)).astype(np.float32)
addresses = [[gpu.allocate(array.nbytes) for array in exchange] for exchange in arrays]
for exchange, places in zip(arrays, addresses):
    for array, address in zip(exchange, places):
        gpu.upload(address, array)
for places in addresses:
    kernel.launch((-(-700 // THREADS), 1, 1), (THREADS, 1, 1), *places, 0, *group.arguments(700))
got = np.array([[gpu.download(address, (700,), np.float32) for address in places] for places in addresses])
group.check()
every = workers.gather((arrays, got))
wanted = np.mean([array.astype(np.float64) for array, _ in every], axis=0)
assert np.abs(got - wanted).max() < 1e-6, np.abs(got - wanted).max()  # fp32, values of about 1
assert all(other.tobytes() == got.tobytes() for _, other in every)
print("exchanged", flush=True)
"""


def test_gpus_write_into_each_others_memory():
    """GPUs write into each other's memory; with one GPU, its processes write into each other's memory."""
    if not find_gpus():
        pytest.skip("no GPU")
    done = run_processes(MAILBOXES, count=2)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("exchanged") == 2


GROUPS = """
import hashlib
from types import SimpleNamespace
from train.build import join_bn_group

size = int(sys.argv[1])
group = join_bn_group(SimpleNamespace(bn_group=size), SimpleNamespace(executor="cuda"), workers)
first = workers.rank - workers.rank % size
images = SHAPES["data"][0]

# One pass: gradients, running statistics and loss against one GPU with the images of the group.
executor, apart = make("float32", group=group), make("float32")
data, label = batch(1000 * workers.rank)
for one in (executor, apart):
    one.forward_backward(data, label)
every = workers.gather((executor.step.get_gradients(), executor.get_params()[1], executor.read_metrics(),
                        apart.step.get_gradients()))[first : first + size]
mean = {name: np.mean([rank[0][name] for rank in every], axis=0) for name in every[0][0]}
mean_apart = {name: np.mean([rank[3][name] for rank in every], axis=0) for name in every[0][0]}
parts = [batch(1000 * rank) for rank in range(first, first + size)]
SHAPES = {"data": (size * images, 64, 64, 3), "softmax_label": (size * images,)}
alone = make("float32")
alone.forward_backward(*(mx.nd.array(np.concatenate([array.asnumpy() for array in of_all]), ctx=gpu)
                         for of_all in zip(*parts)))
wanted, wanted_aux, wanted_metrics = alone.step.get_gradients(), alone.get_params()[1], alone.read_metrics()


def error(got, wanted):
    return float(np.linalg.norm(flat(got) - flat(wanted)) / np.linalg.norm(flat(wanted)))


errors = error(mean, wanted), error(mean_apart, wanted), error(every[0][1], wanted_aux)
print("errors", *errors, flush=True)
# fp32 sums in another order; where that changes the sign at a ReLU, gradients below it move by up to 1e-2.
assert errors[0] < 1e-2 and errors[2] < 1e-5, errors
assert errors[1] > 0.1, "statistics of half the images make other gradients"
assert np.isclose(sum(rank[2].loss_sum for rank in every), wanted_metrics.loss_sum, rtol=1e-5)
assert all(flat(rank[1]).tobytes() == flat(every[0][1]).tobytes() for rank in every), "running statistics"

# 30 steps, also with two passes each.
SHAPES = {"data": (images, 64, 64, 3), "softmax_label": (images,)}
executor = make("float16", num_buckets=2, group=group)
all_reduce = workers.gradient_all_reduce(executor)
for step in range(30):
    for part in range(1 + step % 2):
        overlap = {} if step % 2 else {"on_bucket": all_reduce.start}
        executor.forward_backward(*batch(1000 * workers.rank + step + 100 * part), accumulate=part > 0, **overlap)
    all_reduce.finish()
    executor.optimizer.step(0.05, scale=1 / (1 + step % 2))
    executor.end_step()
assert all(np.isfinite(flat(values)).all() for values in executor.get_params())
digests = workers.gather([hashlib.sha256(flat(values).tobytes()).hexdigest() for values in executor.get_params()])
assert len({params for params, _ in digests}) == 1, digests
assert len({aux for _, aux in digests}) == workers.size // size, digests
executor.read_metrics()
print("same bits", flush=True)
"""


@pytest.mark.parametrize("count, size", [(2, 2), (4, 2), (4, 4)])
def test_group_has_the_statistics_of_all_its_images(count, size):
    """A group's gradients are those of one GPU with all its images, and the weights stay equal to the bit."""
    out = run_on_gpus(count, PREPARE + GROUPS, size)
    print("\n".join(line for line in out.splitlines() if line.startswith("errors")))
    assert out.count("same bits") == count


PROGRAM = """
import sys
from train.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("count, group", [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_program(count, group, tmp_path):
    """Every validation image counts once."""
    options = ["--data", "synthetic", "--model", "resnet18", "--image-size", "33", "--batch-size", str(512 // count),
               "--epochs", "2", "--warmup-epochs", "1", "--learning-rate", "0.1", "--no-tensorboard",
               "--bn-group", group, "--output", tmp_path / "run"]
    out = run_on_gpus(count, PROGRAM, *options)
    assert f"{count} process" in out
    assert "gradients averaged by Horovod beside the backward pass, in buckets: weights 1" in out
    assert "HOROVOD_CYCLE_TIME=" in out
    validated = run_on_gpus(count, PROGRAM, "validate", "--checkpoint", tmp_path / "run")
    assert "1280 images" in validated
    assert os.listdir(tmp_path) == ["run"]


DIES = """
import os
import pathlib
import signal
import sys
from train.__main__ import main
from train.loop import Trainer

step = Trainer.step


def step_or_die(trainer, batches):
    if trainer.state.progress.step == 5 and trainer.workers.rank == 1:
        pathlib.Path(sys.argv[1]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(trainer, batches)


Trainer.step = step_or_die
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("group", [1, 2])
def test_a_lost_process_ends_the_run(tmp_path, group):
    """The run ends within seconds, although the other GPU waits for gradients or statistics in the middle of a step."""
    if len(find_gpus()) < 2:
        pytest.skip(f"2 GPUs are needed, {len(find_gpus())} are there")
    died = tmp_path / "died"
    done = run_processes(DIES, died, "--data", "synthetic", "--model", "resnet18", "--image-size", 33, "--batch-size",
                         64, "--bn-group", group, "--no-tensorboard", "--output", tmp_path / "run")
    seconds = time.time() - died.stat().st_mtime
    print(f"ended after {seconds:.1f} s")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "was killed by SIGKILL" in done.stderr.splitlines()[-1]
    assert seconds < 15
