"""Our ResNet-50 training step on the CPU against stock Gluon's, alternating. Writes results/step_cpu.json.

    python benchmarks/step_cpu.py

Ours is the step of `python -m train`: the mxnet executor, SGD with momentum, loss, top-1 and top-5.
The peer is MXNet's own recipe: the model zoo's resnet50_v1, hybridized with static memory, gluon.Trainer with the same
SGD, no metrics. It does less arithmetic than our v1.5, because its stride is in the first 1x1 convolution of a block.
Both read synthetic fp32 data from memory: ours in NHWC, as our loader returns it, theirs in NCHW. Both use all physical
cores (common/mxnet_compat.py); by default MXNet would use half of the logical cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from record import Peer, run, times_in_turn, write_result

from common.command_line import Positive, read_options
from common.mxnet_compat import mx
from graph_passes import Graph
from graph_passes.executors import create_executor
from graph_passes.optimizers.sgd import SGD
from train.models.network import init_params
from train.models.resnet import resnet

CLASSES, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 1000, 0.1, 0.9, 1e-4
Step = Callable[[], None]


def our_step(batch: int, size: int) -> Step:
    symbol = resnet(50, CLASSES)
    shapes = {"data": (batch, size, size, 3), "softmax_label": (batch,)}
    executor = create_executor("mxnet", Graph.from_json(symbol.tojson()), shapes)
    executor.set_params(*init_params(symbol, seed=0))
    optimizer = executor.create_optimizer(SGD(momentum=MOMENTUM, weight_decay=WEIGHT_DECAY))
    data, label = mx.nd.random.normal(shape=(batch, size, size, 3)), _labels(batch)

    def step() -> None:
        executor.forward_backward(data, label)
        optimizer.step(LEARNING_RATE)
        executor.synchronize()

    return step


def gluon_step(batch: int, size: int) -> Step:
    network = mx.gluon.model_zoo.vision.resnet50_v1(classes=CLASSES)
    network.initialize(mx.init.MSRAPrelu())
    network.hybridize(static_alloc=True, static_shape=True)
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    settings = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM, "wd": WEIGHT_DECAY}
    trainer = mx.gluon.Trainer(network.collect_params(), "sgd", settings)
    data, label = mx.nd.random.normal(shape=(batch, 3, size, size)), _labels(batch)

    def step() -> None:
        with mx.autograd.record():
            loss = loss_function(network(data), label)
        loss.backward()
        trainer.step(batch)
        mx.nd.waitall()

    return step


def _labels(batch: int) -> mx.nd.NDArray:
    return mx.nd.random.randint(0, CLASSES, shape=batch).astype("float32")


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    batch: Positive = 32
    """Images per step."""
    size: Positive = 64
    """Height and width of an image."""
    rounds: Positive = 60
    """Timed steps of each program."""


def main() -> None:
    arguments = read_options(Options)
    steps = {"ours": our_step(arguments.batch, arguments.size), "gluon": gluon_step(arguments.batch, arguments.size)}
    times = times_in_turn(steps, arguments.rounds, warm_up=5)
    write_result("step_cpu", times["ours"], arguments.batch, Peer("stock Gluon resnet50_v1", times["gluon"]))


if __name__ == "__main__":
    run(main)
