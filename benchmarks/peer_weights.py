"""PyTorch's side of weights_pytorch.py: makes networks with random weights, and checks the files that we convert.

    python benchmarks/peer_weights.py make FOLDER DEVICE resnet50 resnet50d     # weights, images and logits
    python benchmarks/peer_weights.py check FOLDER resnet50 resnet50d           # prints tensors that are not bit-equal
    python benchmarks/peer_weights.py small FOLDER                              # the files of the tests

Networks are torchvision's, or timm's if torchvision has none of that name. Their running statistics come from random
images and are then changed at random, so that all tensors keep within float16's range. It runs in its own interpreter
(PEER_PYTHON), because this project itself never imports PyTorch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn

NUM_IMAGES, SIZE = 2, 224
LOGITS = 2.0  # standard deviation of the logits; small enough that no probability becomes 0
SMALL_WIDTH, SMALL_CLASSES, SMALL_SIZE = 2, 5, 40


def create(model: str) -> nn.Module:
    if model in torchvision.models.list_models():
        return torchvision.models.get_model(model)
    import timm

    return timm.create_model(model)


def narrow_resnet18(width: int, classes: int) -> nn.Module:
    """torchvision's ResNet-18 with `width` channels instead of 64, and other layers in proportion."""
    network = torchvision.models.resnet18(num_classes=classes)
    network.inplanes = width
    network.conv1, network.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
    for stage in range(4):
        block = torchvision.models.resnet.BasicBlock
        setattr(network, f"layer{stage + 1}", network._make_layer(block, width * 2**stage, 2, 1 + (stage > 0)))
    network.fc = nn.Linear(8 * width, classes)
    return network


@torch.no_grad()
def randomise(network: nn.Module, images: torch.Tensor) -> None:
    """Set random weights and running statistics of realistic magnitudes."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    last = [block.bn3 if hasattr(block, "bn3") else block.bn2 for block in network.modules() if hasattr(block, "bn2")]
    for norm in norms:
        # Random blocks with full-size branches magnify rounding from block to block, unlike trained networks:
        # PyTorch's own float32 was 3e-5 off its float64 in ResNet-101.
        nn.init.uniform_(norm.weight, *((0.1, 0.4) if norm in last else (0.5, 1.5)))
        nn.init.uniform_(norm.bias, -0.5, 0.5)
        norm.momentum = 1.0  # running statistics become those of these images
    network.train()(images)
    for norm in norms:
        norm.running_mean += 0.2 * norm.running_var.sqrt() * torch.randn_like(norm.running_mean)
        norm.running_var *= torch.empty_like(norm.running_var).uniform_(0.7, 1.4)
        norm.num_batches_tracked.fill_(12_345)
        norm.momentum = 0.1
    network.eval()
    nn.init.zeros_(network.fc.bias)
    network.fc.weight *= LOGITS / network(images).std()
    nn.init.uniform_(network.fc.bias, -1, 1)


@torch.no_grad()
def make(folder: Path, device: str, models: list[str]) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    images = torch.randn(NUM_IMAGES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    np.save(folder / "images.npy", images.permute(0, 2, 3, 1).numpy())
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        network = create(model)
        randomise(network, images)
        state = network.state_dict()
        torch.save(state, folder / f"{model}.pth")
        save_file(state, folder / f"{model}.safetensors")
        network, data = network.to(device), images.to(device)
        logits = network(data).cpu().numpy(), network.double()(data.double()).cpu().numpy()
        np.savez(folder / f"{model}.npz", float32=logits[0], float64=logits[1])


def check(folder: Path, models: list[str]) -> None:
    """Print, for each model, the names of tensors that differ after the round trip, in either file format."""
    for model in models:
        before = torch.load(folder / f"{model}.pth", weights_only=True)
        differing = []
        for file in sorted((folder / "back").glob(f"{model}.*")):
            back = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
            create(model).load_state_dict(back, strict=True)
            differing += [name for name, tensor in before.items()
                          if tensor.dtype != back[name].dtype or not torch.equal(tensor, back[name])]
        print(json.dumps({"model": model, "tensors": len(before), "differing": differing}))


@torch.no_grad()
def small(folder: Path) -> None:
    """Write resnet18_small.pth; resnet18_small.npz with images (N, H, W, 3) and logits (N, classes); and tensors.pth
    with all kinds of tensors."""
    torch.manual_seed(0)
    network = narrow_resnet18(SMALL_WIDTH, SMALL_CLASSES)
    images = torch.randn(8, 3, SMALL_SIZE, SMALL_SIZE, generator=torch.Generator().manual_seed(1))
    randomise(network, images)
    torch.save(network.state_dict(), folder / "resnet18_small.pth")
    shown = images[:2].half().float()
    np.savez_compressed(folder / "resnet18_small.npz", images=shown.permute(0, 2, 3, 1).half().numpy(),
                        logits=network(shown).numpy())
    numbers = torch.arange(12.0)
    tensors = {
        "transposed": numbers.reshape(3, 4).t(), "part": numbers[2:9:3], "shared": numbers, "scalar": torch.tensor(7),
        "none": torch.zeros(0, 3), "parameter": nn.Parameter(numbers[:2].clone()), "half": numbers.half(),
        "bfloat16": numbers.bfloat16() / 4, "double": numbers.double() / 3, "bool": numbers > 5,
        "byte": numbers.to(torch.uint8),
        "channels_last": numbers.reshape(1, 3, 2, 2).to(memory_format=torch.channels_last),
    }
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    torch.save({"epoch": 3, "args": ["--lr", (0.1, None, True)], "state_dict": wrapped}, folder / "tensors.pth")


if __name__ == "__main__":
    what, place, *rest = sys.argv[1:]
    if what == "make":
        make(Path(place), rest[0], rest[1:])
    elif what == "check":
        check(Path(place), rest)
    else:
        small(Path(place))
