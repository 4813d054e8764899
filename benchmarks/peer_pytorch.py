"""The peer: PyTorch's ResNet step on synthetic data or JPEGs; step_gpu.py starts it and alternates with it.

    python benchmarks/peer_pytorch.py --batch 256                   # then type: compile
    python benchmarks/peer_pytorch.py --data IMAGES --workers 16    # then type: eager
    torchrun --standalone --nproc_per_node=4 --virtual-local-rank benchmarks/peer_pytorch.py --ddp

It trains torchvision's ResNet (v1.5, like ours), or timm's network if torchvision has none of that name: channels_last,
automatic mixed precision, fused SGD with momentum, cuDNN autotuning. Like ours, it starts with all gammas 1 and, in
fp16, with a loss scale of 1,024. Six batches alternate, and each measurement begins with three seconds of warm-up.

Each line of standard input names a mode; the program measures `--steps` steps in it and prints one line of JSON:

    eager               as written
    compile             through torch.compile
    graph               through torch.compile, with the whole step, optimizer and loss scaling included, replayed as one
                        CUDA graph, so that nothing waits for the host
    reduce-overhead     through torch.compile's mode "reduce-overhead": CUDA graphs of forward and backward pass
    max-autotune        through torch.compile's mode "max-autotune", which times several kernels for each operator:
                        minutes at the first time, seconds with what it has kept on disk
    max-autotune-graph  the same kernels, with the whole step as one CUDA graph

A line `prepare MODE` builds and compiles a mode before the measurements, and prints `{}`. The program ends when its
input ends. With `--ddp` it measures once on several GPUs, through DistributedDataParallel and
torch.compile, and the first process prints. With `--compile-only` it only compiles, to fill torch.compile's cache on
disk. With `--data`, a folder of class folders, the batches come from torchvision as usual: ImageFolder,
RandomResizedCrop, flip, a policy of `--auto-augment`, normalise, `--random-erasing`, and a DataLoader with `--workers`
processes and pinned memory; with `--loader-only` they are loaded and not used. It runs in its own interpreter (the
other programs start the one named by PEER_PYTHON), because this project itself never imports PyTorch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config
import torchvision
from torch.distributed.elastic.multiprocessing.errors import record

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
REPEATS = 100  # times a small set of images is repeated, so that no epoch ends during a measurement
WARM_UP_SECONDS, NUM_BATCHES = 3.0, 6  # equal to step_gpu.py's
LOSS_SCALE, GROWTH_INTERVAL = 1024.0, 2000  # equal to the cuda executor's
CAPTURE_WARM_UP = 11  # steps before a capture; torch.cuda's notes ask for some, 11 for DistributedDataParallel
PREFETCH = 2  # batches that each worker keeps ready, PyTorch's default
STRETCHES = 5  # timed intervals of the loader
NAMES = {"eager": "eager", "compile": "torch.compile", "graph": "torch.compile in a CUDA graph",
         "reduce-overhead": "torch.compile, reduce-overhead", "max-autotune": "torch.compile, max-autotune",
         "max-autotune-graph": "torch.compile, max-autotune, in a CUDA graph"}
WHOLE_GRAPHS = {"graph": "compile", "max-autotune-graph": "max-autotune-no-cudagraphs"}  # mode -> captured mode
VERSIONS = {"python": platform.python_version(), "torch": torch.__version__, "torchvision": torchvision.__version__,
            "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (images, labels) -> loss; in inference: probabilities


def make_network(name: str) -> torch.nn.Module:
    """Build a network with all gammas 1. Some of timm's networks set the last gamma of each branch to 0; their zero
    gradients would make the GPU draw less power."""
    if name in torchvision.models.list_models():
        network = torchvision.models.get_model(name)
    else:
        import timm

        network = timm.create_model(name)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(module.weight)
    return network


def load_batches(arguments: argparse.Namespace) -> Batches:
    """Yield batches on the host, without end."""
    from torchvision import transforms

    policy = {"none": [], "trivialaugment": [transforms.TrivialAugmentWide()],
              "randaugment": [transforms.RandAugment()]}[arguments.auto_augment]
    erasing = [transforms.RandomErasing(arguments.random_erasing)] * (arguments.random_erasing > 0)
    transform = transforms.Compose([
        transforms.RandomResizedCrop(arguments.size), transforms.RandomHorizontalFlip(), *policy,
        transforms.ToTensor(), transforms.Normalize(MEAN, STD), *erasing,
    ])
    images = torchvision.datasets.ImageFolder(arguments.data, transform)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.ConcatDataset([images] * REPEATS), arguments.batch, shuffle=True,
        num_workers=arguments.workers, pin_memory=True, drop_last=True, persistent_workers=True,
        prefetch_factor=PREFETCH)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def drain(batches: Batches, workers: int) -> None:
    """Discard the batches that were loaded ahead while nothing was timed, and one more batch of each worker."""
    for _ in range((PREFETCH + 1) * workers):
        next(batches)


def measure_loader(batches: Batches, workers: int) -> list[float]:
    """Milliseconds per batch. Batches come in bursts, so each value is a mean over one batch of every worker."""
    times = [time.perf_counter()]
    for _ in range(STRETCHES):
        for _ in range(workers):
            next(batches)
        times.append(time.perf_counter())
    return [1e3 * (end - start) / workers for start, end in itertools.pairwise(times)]


class HostEvent:
    """A stand-in for torch.cuda.Event on a CPU."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.seconds - self.seconds)


class Peer:
    """A network and its optimizer on this process's device, and their step in each mode."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.inference = arguments.device, arguments.inference
        self.mixed = arguments.dtype in ("float16", "bfloat16")
        self.dtype = getattr(torch, arguments.dtype) if self.mixed else torch.float32
        network = make_network(arguments.model).to(self.device).to(memory_format=torch.channels_last)
        if arguments.inference:
            network.eval().to(self.dtype)
        self.optimizer = torch.optim.SGD(network.parameters(), lr=arguments.learning_rate, momentum=0.9, fused=True)
        self.scaler = torch.amp.GradScaler(self.device, init_scale=LOSS_SCALE, growth_interval=GROWTH_INTERVAL,
                                           enabled=self.dtype is torch.float16)
        self.loss_function = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
        if arguments.ddp:
            network = torch.nn.parallel.DistributedDataParallel(network, device_ids=[0], gradient_as_bucket_view=True)
        self.network = network
        self.steps: dict[str, Step] = {}

    def synthetic(self, batch: int, size: int) -> Batches:
        """Yield a few batches on the device in rotation, without end."""
        shape = (batch, 3, size, size)
        return itertools.cycle([
            (torch.randn(shape, device=self.device, dtype=self.dtype).to(memory_format=torch.channels_last),
             torch.randint(0, 1000, (batch,), device=self.device)) for _ in range(NUM_BATCHES)
        ])

    def step(self, mode: str, batches: Batches) -> Step:
        """The step in this mode; it is built at its first use."""
        if mode not in self.steps:
            if mode in WHOLE_GRAPHS:
                self.steps[mode] = captured(self.step(WHOLE_GRAPHS[mode], batches), *next(batches))
            elif mode == "eager":
                self.steps[mode] = self.step_of(self.network)
            else:
                chosen = None if mode == "compile" else mode
                self.steps[mode] = self.step_of(torch.compile(self.network, mode=chosen))
        return self.steps[mode]

    def step_of(self, forward: torch.nn.Module) -> Step:
        @torch.inference_mode()
        def infer(data: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return torch.softmax(forward(data).float(), 1)

        def train(data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device, dtype=self.dtype, enabled=self.mixed):
                loss = self.loss_function(forward(data), label)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return loss.detach()

        return infer if self.inference else train


def compile_only(peer: Peer, batches: Batches) -> None:
    """Have torch.compile compile the step, forward and backward, and end this process before the step runs."""
    def compile_and_leave(graph: Any, inputs: Any) -> None:
        from torch._inductor.compile_fx import compile_fx  # the function that torch.compile calls

        compile_fx(graph, inputs)
        os._exit(0)

    peer.step_of(torch.compile(peer.network, backend=compile_and_leave))(*next(batches))


def captured(step: Step, *example: torch.Tensor) -> Step:
    """Capture the step as a CUDA graph, with a static batch that each given batch is copied to.

    The whole step can be captured, because with a fused optimizer the GPU itself decides whether gradients overflowed.
    """
    own = [tensor.clone() for tensor in example]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CAPTURE_WARM_UP):
            step(*own)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(*own)

    def replay(*batch: torch.Tensor) -> torch.Tensor:
        for buffer, tensor in zip(own, batch, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        graph.replay()
        return result

    return replay


def measure(peer: Peer, mode: str, batches: Batches, arguments: argparse.Namespace,
            before_timing: Callable[[], None]) -> dict[str, Any]:
    """Measure once in a mode.

    Returns the step times in ms, the loss of the last step (in inference: the mean sum of an image's probabilities),
    the loss scale before and after the steps, and the peak memory of tensors.
    """
    on_gpu = peer.device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    step = peer.step(mode, batches)

    def next_step() -> torch.Tensor:
        images, labels = next(batches)
        if images.device.type != peer.device:
            images = images.to(peer.device, non_blocking=True).to(memory_format=torch.channels_last)
            labels = labels.to(peer.device, non_blocking=True)
        return step(images, labels)

    for _ in range(arguments.warm_up or 1):  # the first step compiles
        next_step()
    begin = time.monotonic()
    while not arguments.warm_up and time.monotonic() - begin < arguments.warm_up_seconds:
        next_step()
        synchronize()
    before_timing()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    scale_before = peer.scaler.get_scale()
    events: list[Any] = [torch.cuda.Event(enable_timing=True) if on_gpu else HostEvent()
                         for _ in range(arguments.steps + 1)]
    events[0].record()
    for event in events[1:]:
        result = next_step()
        event.record()
    synchronize()
    return {
        "name": f"PyTorch {torch.__version__} {NAMES[mode]}", "versions": VERSIONS,
        "step_ms": [start.elapsed_time(end) for start, end in itertools.pairwise(events)],
        "loss": result.sum().item() / (arguments.batch if peer.inference else 1),
        "loss_scales": [scale_before, peer.scaler.get_scale()],
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }


@record  # lets torch.distributed.run report an error of one of several processes
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="of torchvision, or else of timm")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "tf32", "float32"), default="float16")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=0, help="steps before, on several GPUs; 0: so many seconds")
    parser.add_argument("--warm-up-seconds", type=float, default=WARM_UP_SECONDS)
    parser.add_argument("--ddp", action="store_true", help="one of the processes that torch.distributed.run started")
    parser.add_argument("--inference", action="store_true", help="weights in the given dtype, no gradients")
    parser.add_argument("--data", help="folder of class folders; without it the data is synthetic")
    parser.add_argument("--workers", type=int, default=16, help="processes that load --data")
    parser.add_argument("--auto-augment", choices=("none", "trivialaugment", "randaugment"), default="none")
    parser.add_argument("--random-erasing", type=float, default=0.0, help="probability of a rectangle, of --data")
    parser.add_argument("--loader-only", action="store_true", help="load --data, and nothing else; needs no GPU")
    parser.add_argument("--compile-only", action="store_true", help="run nothing on the GPU, and measure nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this program out")
    arguments = parser.parse_args()
    batches: Batches | None = None
    loader = f"torchvision DataLoader with {arguments.workers} workers"
    if arguments.data:
        batches = load_batches(arguments)
        loader += f", {arguments.auto_augment}" * (arguments.auto_augment != "none")
    if batches and arguments.loader_only:
        for _ in sys.stdin:
            drain(batches, arguments.workers)
            turn = {"name": loader, "versions": VERSIONS, "step_ms": measure_loader(batches, arguments.workers)}
            print(json.dumps(turn), flush=True)
        return
    rank = int(os.environ["RANK"]) if arguments.ddp else 0
    if arguments.ddp:
        torch.distributed.init_process_group("nccl")

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = arguments.dtype == "tf32"
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):  # exists in newer versions
        torch._functorch.config.force_non_lazy_backward_lowering = True  # compile it together with the forward pass
    before_timing: Callable[[], None] = (lambda: drain(batches, arguments.workers)) if batches else lambda: None
    peer: Peer | None = None
    for line in ["compile"] if arguments.ddp or arguments.compile_only else sys.stdin:
        if peer is None:  # built late, so that a waiting peer takes no GPU memory
            peer = Peer(arguments)
            feed = batches or peer.synthetic(arguments.batch, arguments.size)
        if arguments.compile_only:
            compile_only(peer, feed)
        if line.startswith("prepare "):
            peer.step(line.split()[1], feed)(*next(feed))
            print("{}", flush=True)
            continue
        turn = measure(peer, line.strip(), feed, arguments, before_timing)
        turn["name"] += " DDP" * arguments.ddp + f", {loader}" * bool(batches)
        if rank == 0:
            print(json.dumps(turn), flush=True)
    if arguments.ddp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
