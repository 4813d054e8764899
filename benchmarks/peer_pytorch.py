"""The peer: PyTorch's ResNet training step on synthetic data; step_gpu.py starts it and takes turns with it.

    python benchmarks/peer_pytorch.py --batch 256 --mode compile
    python -m torch.distributed.run --standalone --nproc_per_node=4 benchmarks/peer_pytorch.py --ddp

torchvision's ResNet (v1.5, as ours), channels_last, automatic mixed precision, gradient scaler in fp16, fused SGD with
momentum, cuDNN autotuning; `--mode compile` puts the network through torch.compile. For every line on its standard
input it measures `--steps` steps and prints one line of JSON; it ends with its input. With `--ddp`, on several GPUs
through DistributedDataParallel, it measures once, and the first process prints. Runs in an interpreter of its own
(step_gpu.py and scaling.py start the one named by PEER_PYTHON): this project itself never imports PyTorch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys

import torch
import torchvision

WARM_UP = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=50)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "tf32", "float32"), default="float16")
    parser.add_argument("--mode", choices=("eager", "compile"), default="compile")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ddp", action="store_true", help="one of the processes that torch.distributed.run started")
    parser.add_argument("--inference", action="store_true", help="weights in the given dtype, no gradients")
    arguments = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"]) if arguments.ddp else 0
    torch.cuda.set_device(rank)
    if arguments.ddp:
        torch.distributed.init_process_group("nccl")

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = arguments.dtype == "tf32"
    mixed = arguments.dtype in ("float16", "bfloat16")
    dtype = getattr(torch, arguments.dtype) if mixed else torch.float32
    network = getattr(torchvision.models, f"resnet{arguments.depth}")().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    loss_function = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    if arguments.ddp:
        network = torch.nn.parallel.DistributedDataParallel(network, device_ids=[rank], gradient_as_bucket_view=True)
    forward = torch.compile(network) if arguments.mode == "compile" else network
    shape = (arguments.batch, 3, arguments.size, arguments.size)
    data = torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    label = torch.randint(0, 1000, (arguments.batch,), device="cuda")

    @torch.inference_mode()
    def infer() -> None:
        torch.softmax(forward(data).float(), 1)

    def train() -> None:
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
        for _ in range(WARM_UP):
            step()
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(arguments.steps + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        if rank == 0:
            print(json.dumps({
                "name": f"PyTorch {torch.__version__} {arguments.mode}{' DDP' if arguments.ddp else ''}",
                "step_ms": [start.elapsed_time(end) for start, end in itertools.pairwise(events)],
                "allocated_bytes": torch.cuda.max_memory_allocated(),
            }), flush=True)
    if arguments.ddp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
