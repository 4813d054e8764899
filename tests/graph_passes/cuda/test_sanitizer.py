"""compute-sanitizer over steps of small networks in which every kernel of ours runs. `make sanitize` prints a table."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from int8_networks import STREAMS, SUMS, quantised
from step_networks import (
    bottlenecks,
    convnext,
    dropping,
    efficient,
    elements,
    gradients_alone,
    hidden_layers,
    mobile,
    narrow,
    own_fusions,
    own_kernels,
    pre_activation,
    preferring,
    streamed_gradients,
    strided,
)
from test_compile import kernels
from test_training_step import RULES, fused, random_batch, random_state, small_network

from common.mxnet_compat import mx
from graph_passes import Graph, passes
from graph_passes.choice import Price, plain
from graph_passes.executors import Box, Draws
from graph_passes.executors.cuda import prices
from graph_passes.executors.cuda.kernel_library import Kernel, KernelLibrary
from graph_passes.executors.cuda.optimizer import OptimizerConfig
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.quantised import QuantisedNetwork
from graph_passes.executors.cuda.statistics_group import StatisticsGroup
from graph_passes.executors.cuda.training_step import TrainingStep
from graph_passes.passes.quantise import Kept
from pipelines.progress import num_cores
from train.language_model import LanguageModel
from train.models.resnet import resnet

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

REPOSITORY = Path(__file__).resolve().parents[3]
OWN = {kernel.strip("!") for _, kernel in kernels()}
NOT_IN_A_STEP = {"copy"}  # kernel of --profile only
LOSSES = {  # network -> its loss, if not the default
    "poolings": lambda network: passes.binary_cross_entropy(fused(network), 0.2),
    "BatchNorm first": lambda network: passes.weigh_classes(fused(network), [0.5, 1.5] * 5),
}
INT8 = (("resnet18", Kept()), ("resnet50", Kept()), ("resnet18_v2", Kept(classifier=False)))
AT_ONCE = 8  # processes on one GPU


def run_here(cache: Path, *command: str) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run the steps that the sanitizer checks, each network in a separate process, several at a time: racecheck makes a
    step take minutes."""
    path = os.pathsep.join([str(REPOSITORY), *sys.path])  # including the folders of the tests' modules

    def look_at(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, sys.executable, "-W", "ignore", __file__, str(cache), name],
                              capture_output=True, text=True, timeout=1200, env={**os.environ, "PYTHONPATH": path})

    names = list(steps(cache))
    with ThreadPoolExecutor(min(AT_ONCE, num_cores())) as pool:
        return dict(zip(names, pool.map(look_at, names), strict=True))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of compiled kernels, so that the sanitizers need not wait for the compiler."""
    if not shutil.which("compute-sanitizer"):
        pytest.skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    folder = tmp_path_factory.mktemp("cache")
    launched: set[str] = set()
    for name, run in run_here(folder).items():
        assert run.returncode == 0, f"{name}: {run.stdout[-3000:]}{run.stderr[-3000:]}"
        launched.update(run.stdout.split())
    assert launched >= OWN - NOT_IN_A_STEP, f"not looked at: {OWN - NOT_IN_A_STEP - launched}"
    return folder


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_a_sanitizer_finds_nothing(tool: str, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sanitizer finds nothing in our kernels; findings in cuDNN's kernels are counted."""
    begin, found_by_others, total = time.monotonic(), 0, 0
    in_ours: list[str] = []
    for name, run in run_here(cache, "compute-sanitizer", "--tool", tool).items():
        report = run.stdout + run.stderr
        ours, others = findings(report)
        if ours:  # one of many threads with the same report, for each place
            alike = Counter("\n".join(text.splitlines()[:2]) for text in ours)
            in_ours += [f"{name}, {times} times: {text}" for text, times in alike.most_common(5)]
            continue
        assert run.returncode == 0, f"{name}: " + "\n".join(others[:3]) + report[-4000:]
        summary = re.search(r"SUMMARY: (\d+) (?:error|hazard)", report)
        assert summary, f"{name}: {report[-4000:]}"
        assert others or summary[1] == "0", f"{name}, in kernels without a name:\n{report[-4000:]}"
        found_by_others += len(others)
        total += int(summary[1])
    assert not in_ours, "\n".join(in_ours)
    with capsys.disabled():
        print(f"\n{tool:10} {total:>4} found, 0 in own kernels, {found_by_others} in others; "
              f"{len(OWN - NOT_IN_A_STEP)} kernels, {time.monotonic() - begin:.0f} s", end=" ")


def findings(report: str) -> tuple[list[str], list[str]]:
    """A sanitizer's findings, one text each: in our kernels and in others. A finding begins with a line that is not
    indented, and names the kernel there or in the next lines."""
    blocks: list[list[str]] = []
    for line in report.splitlines():
        text = line.removeprefix("========= ")
        if not line.startswith("=========") or "SUMMARY" in text or text.startswith("COMPUTE-SANITIZER"):
            continue
        if line == "=========":
            blocks.append([])
        elif not line[len("========= "):].startswith(" ") or not blocks:
            blocks.append([text])
        else:
            blocks[-1].append(text)
    found = ["\n".join(block) for block in blocks if block]
    ours = [text for text in found if any(re.search(rf"\b{name}\b", text) for name in OWN)]
    return ours, [text for text in found if text not in ours]


def pooled() -> Any:
    """The kernels that the other networks lack: average pooling over windows, two gradients of a max pooling."""
    def conv_bn(x: Any, name: str) -> Any:
        x = mx.sym.Convolution(x, num_filter=16, kernel=(3, 3), pad=(1, 1), layout="NHWC", name=name)
        return mx.sym.BatchNorm(x, axis=3, fix_gamma=False, name=f"{name}_bn")

    window = {"kernel": (2, 2), "stride": (2, 2), "layout": "NHWC"}
    x = mx.sym.Pooling(mx.sym.relu(conv_bn(mx.sym.Variable("data"), "a")), pool_type="max", **window)
    x = mx.sym.Pooling(mx.sym.elemwise_add(conv_bn(x, "b"), x), pool_type="avg", **window)
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=10, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


@dataclass(frozen=True)
class Network:
    """A network for the sanitizers: training steps and inference."""

    name: str
    network: Any
    size: tuple[int, int, int, int]
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)
    price: Price = own_kernels  # of the candidates; default: all own kernels that the GPU can run


def networks(**group: Any) -> tuple[Network, ...]:
    """`group`: options of the network in a group."""
    return (
        Network("all fusions", bottlenecks(), (3, 19, 23, 4), "float16"),
        Network("all fusions after ResNet's stem", bottlenecks(7), (3, 36, 38, 3), "float16",
                {"wire_dtype": "float32"}),
        Network("ResNet-18 in a group", resnet(18, 10), (3, 36, 38, 3), "float16", group, own_fusions),
        Network("the fusions that others replace", bottlenecks(), (3, 19, 23, 4), "float16", {}, own_fusions),
        Network("wide bottlenecks", bottlenecks(width=256), (3, 9, 11, 4), "bfloat16"),
        Network("strided shortcuts", strided(10, 256), (2, 9, 11, 4), "float16", {}, streamed_gradients),
        Network("bottlenecks in clusters", bottlenecks(width=128), (3, 9, 11, 4), "float16"),
        Network("all operators", small_network(), (3, 29, 23, 3), "float32"),
        Network("BatchNorm first", dropping(pre_activation(10)), (3, 19, 17, 3), "bfloat16"),
        Network("poolings", pooled(), (3, 17, 14, 4), "float16"),
        Network("squeeze and excitation", efficient(classes=10, squeeze=8), (3, 9, 11, 4), "float16"),
        Network("hard swish, parts and means", mobile(classes=10), (3, 9, 11, 4), "bfloat16"),
        Network("LayerNorm and GELU", convnext(classes=10), (3, 9, 11, 4), "float16"),
        Network("fully connected layers", hidden_layers(classes=10), (4, 8, 7, 4), "float16"),
        Network("channels that are no multiples of 8", narrow(classes=10), (3, 13, 11, 3), "float16"),
        Network("functions of elements", elements(classes=10, prelu=False), (3, 9, 11, 4), "float32"),
        Network("stochastic depth and dropout", dropping(bottlenecks()), (3, 19, 23, 4), "float16", {},
                gradients_alone),
    )


def graph_of(case: Network) -> tuple[Graph, dict[str, tuple[int, ...]]]:
    """The graph with its loss, and the shapes of its inputs."""
    return LOSSES.get(case.name, fused)(case.network), {"data": case.size, "softmax_label": case.size[:1]}


def train(case: Network, cache: Path) -> None:
    """Every kernel of training steps and of inference."""
    prices.deterministic = case.price  # type: ignore[assignment]
    graph, shapes = graph_of(case)
    step = TrainingStep(graph, shapes, StepOptions(case.dtype, deterministic=True, **case.options), cache_folder=cache)
    step.set_params(*random_state(graph, shapes, seed=1))
    step.load(*random_batch(shapes, seed=2))
    step.set_seed(3)
    for accumulate in (False, True):
        step.forward_backward(accumulate)
        if step.options.wire_dtype:
            step.hand_over(lambda bucket: None)
        step.update(0.1)
    step.infer()
    step.set_num_valid(2)
    step.infer(num_images=2)
    height, width = shapes["data"][1:3]
    for draws in (Draws(0.7), Draws(cutmix=Box(1, 2, min(9, height), min(11, width)))):
        step.mix(draws)
        step.forward_backward()
    if case.name == "all operators":
        for rule in RULES.values():
            step.set_optimizer(OptimizerConfig(rule, ema=True, clip_norm=0.5))
            step.update(0.01, ema_decay=0.9)
        step.swap_ema()
    assert step.read_metrics()[3] > 0
    step.gpu.synchronize()


def train_language_model(cache: Path) -> None:
    model = LanguageModel(words=24, hidden=16, layers=1, steps=3, sequences=4)
    step = TrainingStep(model.graph, model.shapes, StepOptions("float16", deterministic=True), cache_folder=cache)
    step.set_params(model.initial_values(seed=1), {})
    step.load(np.arange(12, dtype=np.float32).reshape(12, 1, 1, 1), np.arange(12, 24, dtype=np.float32))
    step.forward_backward()
    step.update(0.1)
    step.gpu.synchronize()


def infer_in_int8(name: str, kept: Kept, cache: Path) -> None:
    # In networks other than ResNet-50 the max pooling is not fused.
    pairs = ["QuantisedStemPool", "QuantisedPair", "QuantisedPairSum"]
    hopper = (*STREAMS, *SUMS, *(pairs if name == "resnet50" else ()))

    prices.deterministic = preferring(plain, *hopper)  # type: ignore[assignment]
    int8 = quantised(name, 2, 33, np.random.default_rng(0), kept)
    network = QuantisedNetwork(int8.network, int8.shapes, int8.scales, kept, int8.params, deterministic=True,
                               cache_folder=cache)
    network.load(int8.images, np.zeros(2))
    network.infer()
    network.gpu.synchronize()


def steps(cache: Path, **group: Any) -> dict[str, Callable[[], None]]:
    """The steps for the sanitizers, by name. Deterministic, so that no plans are timed: timing takes minutes there."""
    return {
        **{case.name: partial(train, case, cache) for case in networks(**group)},
        "language model": partial(train_language_model, cache),
        **{f"{name} in INT8": partial(infer_in_int8, name, kept, cache) for name, kept in INT8},
    }


def main(cache: Path, name: str) -> None:
    """Run one of the steps, and print the names of the kernels that it launched."""
    launched: set[str] = set()
    get, launch = KernelLibrary.get, Kernel.launch

    def named(library: KernelLibrary, source: str, expression: str) -> Kernel:
        kernel = get(library, source, expression)
        kernel.name = expression.split("<")[0]  # type: ignore[attr-defined]
        return kernel

    def recorded(kernel: Kernel, *arguments: Any, **options: Any) -> None:
        launched.add(kernel.name)  # type: ignore[attr-defined]
        launch(kernel, *arguments, **options)

    KernelLibrary.get, Kernel.launch = named, recorded  # type: ignore[method-assign]
    group = StatisticsGroup(0)
    group.connect([group.mailbox], 0)  # a group of one process
    steps(cache, group=group)[name]()
    print(*launched)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
