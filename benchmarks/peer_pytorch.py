"""The peer: PyTorch's ResNet training step on synthetic data or JPEGs; step_gpu.py starts it and takes turns with it.

    python benchmarks/peer_pytorch.py --batch 256 --mode compile
    python benchmarks/peer_pytorch.py --mode eager --data IMAGES --workers 16
    python -m torch.distributed.run --standalone --nproc_per_node=4 benchmarks/peer_pytorch.py --ddp

torchvision's ResNet (v1.5, as ours), or timm's network where torchvision has none of that name, channels_last,
automatic mixed precision, gradient scaler in fp16, fused SGD with momentum, cuDNN autotuning; `--mode compile` puts the
network through torch.compile. For every line on its standard input it measures `--steps` steps and prints one line of
JSON; it ends with its input. With `--ddp`, on several GPUs through DistributedDataParallel, it measures once, and the
first process prints. With `--data`, a folder of class folders, the batches come from torchvision as usual: ImageFolder,
RandomResizedCrop, flip, normalise, a DataLoader with `--workers` processes and pinned memory; with `--loader-only`
nothing is done with them. Runs in an interpreter of its own (the programs beside it start the one named by
PEER_PYTHON): this project itself never imports PyTorch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator

import torch
import torchvision

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
REPEATS = 100  # of a small set of images, so that no epoch ends while it is measured
WARM_UP_SECONDS, NUM_BATCHES = 3.0, 6  # as step_gpu.py has them
PREFETCH = 2  # batches that each worker has ready, PyTorch's default
STRETCHES = 5  # that the loader is timed for

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def make_network(name: str) -> torch.nn.Module:
    if name in torchvision.models.list_models():
        return torchvision.models.get_model(name)
    import timm

    return timm.create_model(name)


def load_batches(folder: str, batch: int, size: int, workers: int) -> Batches:
    """Batches on the host, without end."""
    from torchvision import transforms

    transform = transforms.Compose([
        transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ])
    images = torchvision.datasets.ImageFolder(folder, transform)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.ConcatDataset([images] * REPEATS), batch, shuffle=True, num_workers=workers, pin_memory=True,
        drop_last=True, persistent_workers=True, prefetch_factor=PREFETCH)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def drain(batches: Batches, workers: int) -> None:
    """Take what lies ready, which was loaded while nobody waited for it, and one batch more of each worker."""
    for _ in range((PREFETCH + 1) * workers):
        next(batches)


def measure_loader(batches: Batches, workers: int) -> list[float]:
    """Milliseconds of a batch, each the mean of a stretch of one batch of every worker: they come in bursts."""
    times = [time.perf_counter()]
    for _ in range(STRETCHES):
        for _ in range(workers):
            next(batches)
        times.append(time.perf_counter())
    return [1e3 * (end - start) / workers for start, end in itertools.pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="of torchvision, or else of timm")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "tf32", "float32"), default="float16")
    parser.add_argument("--mode", choices=("eager", "compile"), default="compile")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=0, help="steps before, on several GPUs; 0: three seconds")
    parser.add_argument("--ddp", action="store_true", help="one of the processes that torch.distributed.run started")
    parser.add_argument("--inference", action="store_true", help="weights in the given dtype, no gradients")
    parser.add_argument("--data", help="folder of class folders; without it the data is synthetic")
    parser.add_argument("--workers", type=int, default=16, help="processes that load --data")
    parser.add_argument("--loader-only", action="store_true", help="load --data, and nothing else; needs no GPU")
    arguments = parser.parse_args()
    batches: Batches | None = None
    loader = f"torchvision DataLoader with {arguments.workers} workers"
    if arguments.data:
        batches = load_batches(arguments.data, arguments.batch, arguments.size, arguments.workers)
    if batches and arguments.loader_only:
        for _ in sys.stdin:
            drain(batches, arguments.workers)
            print(json.dumps({"name": loader, "step_ms": measure_loader(batches, arguments.workers)}), flush=True)
        return
    rank = int(os.environ["LOCAL_RANK"]) if arguments.ddp else 0
    if arguments.ddp:
        # Each process sees its own GPU alone, as number 0, so that all share what torch.compile keeps on disk.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
        torch.distributed.init_process_group("nccl")

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = arguments.dtype == "tf32"
    mixed = arguments.dtype in ("float16", "bfloat16")
    dtype = getattr(torch, arguments.dtype) if mixed else torch.float32
    network = make_network(arguments.model).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    loss_function = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    if arguments.ddp:
        network = torch.nn.parallel.DistributedDataParallel(network, device_ids=[0], gradient_as_bucket_view=True)
    forward = torch.compile(network) if arguments.mode == "compile" else network
    shape = (arguments.batch, 3, arguments.size, arguments.size)
    synthetic = itertools.cycle([
        (torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=torch.channels_last),
         torch.randint(0, 1000, (arguments.batch,), device="cuda")) for _ in range(NUM_BATCHES)
    ])

    @torch.inference_mode()
    def infer() -> None:
        torch.softmax(forward(next(synthetic)[0]).float(), 1)

    def train() -> None:
        data, label = next(synthetic)
        if batches:
            images, classes = next(batches)
            data = images.cuda(non_blocking=True).to(memory_format=torch.channels_last)
            label = classes.cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype, enabled=mixed):
            loss = loss_function(forward(data), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    if arguments.inference:
        network.eval().to(dtype)
    step = infer if arguments.inference else train
    for _ in range(1) if arguments.ddp else sys.stdin:
        for _ in range(arguments.warm_up):
            step()
        begin = time.monotonic()
        while not arguments.warm_up and time.monotonic() - begin < WARM_UP_SECONDS:
            step()
            torch.cuda.synchronize()
        if batches:
            drain(batches, arguments.workers)
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(arguments.steps + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        if rank == 0:
            print(json.dumps({
                "name": f"PyTorch {torch.__version__} {arguments.mode}{' DDP' if arguments.ddp else ''}"
                        f"{', ' + loader if batches else ''}",
                "step_ms": [start.elapsed_time(end) for start, end in itertools.pairwise(events)],
                "allocated_bytes": torch.cuda.max_memory_allocated(),
            }), flush=True)
    if arguments.ddp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
