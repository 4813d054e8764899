"""PyTorch's side of cifar10_recipe.py, which starts it: a strong recipe with PyTorch's usual best practice.

It extends peer_cifar10.py by today's techniques: TrivialAugment and random erasing on the GPU, drawn for each image
(peer_augment.py), mixup or CutMix, label smoothing, stochastic depth by torchvision's operator, repeated augmentation,
and clipping by torch.nn.utils.clip_grad_norm_. One compiled function makes the images, mixing included. Standard input
holds the recipe as a JSON object, and then lines:

    a seed    trains, and prints a JSON line for each validation, then an empty line
    loader    prints images/sec of a DataLoader in which torchvision's own transforms make equal images on the CPU's
              cores: an upper limit for training from it

Without a GPU nothing is compiled: a CPU is for trying this program out.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peer_augment import draw_rectangles, draw_trivial_augment, inside, trivial_augment
from peer_cifar10 import Recipe, train
from peer_pytorch import MEAN, STD, drain, measure_loader
from PIL import Image
from torchvision.models.resnet import BasicBlock
from torchvision.ops import stochastic_depth
from torchvision.transforms import v2


def forward_with_drop(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward pass of torchvision's BasicBlock, with stochastic depth (per sample) in training."""
    branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    branch = stochastic_depth(branch, self.drop_rate, "row", self.training)
    return self.relu(branch + (x if self.downsample is None else self.downsample(x)))


class StrongRecipe(Recipe):
    """The recipe with all techniques; each may be off."""

    def __init__(self, config: dict[str, Any], arrays: Any, device: str = "cuda") -> None:
        super().__init__(config, arrays, device)
        self.inputs_of_training = torch.compile(self.training_input, dynamic=False)

    def network(self) -> torch.nn.Module:
        network = super().network()
        blocks = [module for module in network.modules() if isinstance(module, BasicBlock)]
        for number, block in enumerate(blocks if self.config["stochastic_depth"] else ()):
            block.drop_rate = self.config["stochastic_depth"] * number / (len(blocks) - 1)
            block.forward = forward_with_drop.__get__(block)
        return network

    def order(self, epoch: int) -> torch.Tensor:
        """The order of an epoch; with repeated augmentation, only its first images, each several times in a row."""
        self.mixing = self.draw_mixing(epoch)
        order, copies = super().order(epoch), max(1, self.config["repeated_augmentation"])
        return order[: -(-len(order) // copies)].repeat_interleave(copies)[: len(order)]

    def draw_mixing(self, epoch: int) -> torch.Tensor:
        """Draw, for each batch of an epoch, lambda and CutMix's box (left, top, right, bottom): (batches, 5)."""
        config, size = self.config, self.config["image_sizes"][epoch]
        rng = np.random.default_rng(torch.randint(1 << 31, ()).item())
        drawn = np.zeros((len(self.padded) // config["batch_size"], 5), np.float32)
        drawn[:, 0] = 1.0
        for row in drawn:
            if config["cutmix"] and (not config["mixup"] or rng.random() < config["cutmix_share"]):
                half = int(0.5 * size * np.sqrt(1 - rng.beta(config["cutmix"], config["cutmix"])))
                centre = rng.integers(size, size=2)
                row[1:] = np.clip(np.concatenate([centre - half, centre + half]), 0, size)
            elif config["mixup"]:
                row[0] = rng.beta(config["mixup"], config["mixup"])
        return torch.from_numpy(drawn).to(self.device)

    def training_input(self, images: torch.Tensor, size: int, operation: torch.Tensor, magnitude: torch.Tensor,
                       erased: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
        """Resize, augment, normalise, erase and mix crops (N, side, side, C) uint8: returns (N, C, size, size)."""
        pixels = F.interpolate(images.permute(0, 3, 1, 2).float(), size=(size, size), mode="bilinear").round()
        if self.config["auto_augment"] == "trivialaugment":
            pixels = trivial_augment(pixels, operation, magnitude)
        pixels = (pixels - self.mean[:, None, None]) / self.std[:, None, None]
        pixels = torch.where(inside(erased, size, size), torch.zeros_like(pixels), pixels)
        others, own = pixels.flip(0), mixing[0]
        mixed = torch.where(inside(mixing[None, 1:], size, size), others, own * pixels + (1 - own) * others)
        return mixed.half().contiguous(memory_format=torch.channels_last)

    def step(self, number: int, indices: torch.Tensor, image_size: int) -> torch.Tensor:
        config, count = self.config, len(indices)
        mixing = self.mixing[number % len(self.mixing)]
        erased = draw_rectangles(count, config["random_erasing"], image_size, image_size, self.device)
        images = self.inputs_of_training(self.training_images(indices), image_size,
                                         *draw_trivial_augment(count, self.device), erased, mixing)
        labels = self.train_y[indices]
        area = (mixing[3] - mixing[1]) * (mixing[4] - mixing[2]) / image_size**2
        own = mixing[0] * (1 - area)
        with self.autocast:
            scores = self.compiled(images)
            loss = sum(share * F.cross_entropy(scores, of, label_smoothing=config["label_smoothing"])
                       for share, of in ((own, labels), (1 - own, labels.flip(0))))
        self.update(number, loss)
        return loss.detach()

    def warm_up(self) -> None:
        self.mixing = self.draw_mixing(0)
        super().warm_up()


class Images(torch.utils.data.Dataset):
    """The training images, made by torchvision's transforms."""

    def __init__(self, config: dict[str, Any], images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels
        fill = tuple(round(255 * value) for value in MEAN)
        self.transform = v2.Compose([
            v2.RandomCrop(images.shape[1], padding=config["crop_padding"], fill=fill),
            v2.Resize(config["image_sizes"][-1]), v2.RandomHorizontalFlip(),
            *[v2.TrivialAugmentWide()] * (config["auto_augment"] == "trivialaugment"),
            v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD),
            v2.RandomErasing(config["random_erasing"]),
        ])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        # Pillow images, because on small images Pillow's operations are faster than those on tensors.
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


def loader_speed(config: dict[str, Any], arrays: Any) -> dict[str, Any]:
    """The speed of a DataLoader with one process per core, and batches in pinned memory if there is a GPU."""
    workers = len(os.sched_getaffinity(0))
    dataset = Images(config, arrays["train_images"], arrays["train_labels"])
    loader = torch.utils.data.DataLoader(dataset, config["batch_size"], shuffle=True, num_workers=workers,
                                         drop_last=True, persistent_workers=True, pin_memory=torch.cuda.is_available())

    def without_end() -> Any:
        while True:
            yield from loader

    batches = without_end()
    begin = time.perf_counter()
    while time.perf_counter() - begin < config["loader_seconds"]:
        drain(batches, 1)
    times = measure_loader(batches, workers)
    return {"workers": workers, "images_per_sec": 1e3 * config["batch_size"] / statistics.median(times),
            "batch_ms": [round(ms, 3) for ms in times]}


def main() -> None:
    config = json.loads(sys.stdin.readline())
    begun = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.config.disable = device == "cpu"
    torch.backends.cudnn.benchmark = True
    arrays = np.load(config["arrays"])
    recipe = StrongRecipe(config, arrays, device)
    recipe.warm_up()
    print(json.dumps({"startup_seconds": time.perf_counter() - begun, "torch": torch.__version__}), flush=True)
    for line in map(str.strip, sys.stdin):
        if line == "loader":
            print(json.dumps(loader_speed(config, arrays)), flush=True)
        else:
            train(recipe, int(line))


if __name__ == "__main__":
    main()
