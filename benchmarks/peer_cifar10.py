"""PyTorch's side of cifar10_time_to_accuracy.py, which starts it: the same recipe with PyTorch's usual best practice.

Images lie decoded on the GPU before the clock starts; random windows, mirroring and resizing run there too;
torchvision's ResNet v1.5, channels_last, fp16 autocast with a gradient scaler, fused SGD, `torch.compile`. Reads the
recipe, a JSON object, and then a seed a line from standard input, and prints a JSON line for each validation.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchvision

NUM_CANDIDATES = 10  # windows drawn for each image; the first that fits is taken, as in our pipeline
VAL_BATCH = 1000


def windows(count: int, area: tuple[float, float], side: int, device: str) -> torch.Tensor:
    """Random windows of square images of `side` pixels: left, top, right, bottom (count, 4), in whole pixels as in our
    pipeline and torchvision's RandomResizedCrop."""
    shape = (count, NUM_CANDIDATES)
    areas = torch.empty(shape, device=device).uniform_(*area)
    ratios = torch.empty(shape, device=device).uniform_(math.log(3 / 4), math.log(4 / 3)).exp()
    w, h = (areas * ratios).sqrt(), (areas / ratios).sqrt()
    fits = ((w <= 1) & (h <= 1)).float()
    fits[:, -1] += 0.5  # where none fits: the last, cut at the border
    chosen = fits.argmax(1, keepdim=True)
    size = torch.cat([w.gather(1, chosen), h.gather(1, chosen)], dim=1).clamp(max=1)
    start = torch.rand(count, 2, device=device) * (1 - size)
    return (torch.cat([start, start + size], dim=1) * side).round()


def cut(images: torch.Tensor, boxes: torch.Tensor, mirror: torch.Tensor, size: int) -> torch.Tensor:
    """The windows of square images (N, C, side, side), mirrored where `mirror` (N,) is -1 and not 1, resized to `size`
    pixels. Bilinear, and without a look beyond a window's edge, as where only the window is decoded."""
    side = images.shape[-1]
    start, end = boxes.split(2, dim=1)
    (scale_x, scale_y), (x, y) = ((end - start) / side).unbind(1), ((start + end) / side - 1).unbind(1)
    zero = torch.zeros_like(x)
    theta = torch.stack([scale_x * mirror, zero, x, zero, scale_y, y], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, [*images.shape[:2], size, size], align_corners=False)
    first, last = (2 * start + 1) / side - 1, (2 * end - 1) / side - 1  # centres of the window's outermost pixels
    grid = grid.clamp(first[:, None, None], last[:, None, None]).to(images.dtype)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


class Recipe:
    """Data, network and optimizer."""

    def __init__(self, config: dict[str, Any], arrays: Any, device: str = "cuda") -> None:
        self.config, self.device = config, device
        self.train_x, self.val_x = (
            torch.from_numpy(arrays[f"{split}_images"]).to(device).permute(0, 3, 1, 2) for split in ("train", "val")
        )
        self.train_y, self.val_y = (
            torch.from_numpy(arrays[f"{split}_labels"]).to(device) for split in ("train", "val")
        )
        self.mean, self.std = (torch.tensor(arrays[k], device=device).view(1, 3, 1, 1) for k in ("mean", "std"))
        self.model = self.network().to(device, memory_format=torch.channels_last)
        self.compiled = torch.compile(self.model, dynamic=False)  # one graph for training, one for validation
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.SGD(
            [{"params": weights, "weight_decay": config["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
            lr=config["peak_learning_rate"], momentum=config["momentum"], nesterov=config["nesterov"], fused=True,
        )  # fmt: skip
        self.reset(seed=0)

    def network(self) -> torch.nn.Module:
        """With initial weights of the same distributions as ours (train/model.py: init_params)."""
        make = getattr(torchvision.models, f"resnet{self.config['depth']}")
        network = make(num_classes=self.config["num_classes"], zero_init_residual=self.config["zero_init_residual"])
        torch.nn.init.normal_(network.fc.weight, std=0.01)
        torch.nn.init.zeros_(network.fc.bias)
        return network

    def reset(self, seed: int) -> None:
        """Begin anew, with what is compiled."""
        torch.manual_seed(seed)
        self.model.load_state_dict(self.network().state_dict())
        self.optimizer.state.clear()
        self.scaler = torch.amp.GradScaler()

    def normalised(self, images: torch.Tensor) -> torch.Tensor:
        return ((images.float() - self.mean) / self.std).half().contiguous(memory_format=torch.channels_last)

    def learning_rate(self, step: int, steps: int, warmup: int) -> float:
        """As train/schedule.py: linear warm-up, then a cosine."""
        if step < warmup:
            return self.config["peak_learning_rate"] * (step + 1) / warmup
        final = self.config["final_learning_rate"]
        done = (step - warmup) / max(1, steps - warmup)
        return final + (self.config["peak_learning_rate"] - final) * (1 + math.cos(math.pi * done)) / 2

    def step(self, indices: torch.Tensor, image_size: int) -> torch.Tensor:
        config, count = self.config, len(indices)
        images = self.normalised(self.train_x[indices])
        boxes = windows(count, config["random_area"], images.shape[-1], self.device)
        mirror = torch.randint(0, 2, (count,), device=self.device) * 2 - 1
        images = cut(images, boxes, mirror, image_size).contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device, torch.float16):
            loss = F.cross_entropy(self.compiled(images), self.train_y[indices],
                                   label_smoothing=config["label_smoothing"])  # fmt: skip
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def validate(self) -> float:
        """Top-1 as a fraction."""
        self.model.eval()
        hits = torch.zeros((), dtype=torch.int64, device=self.device)
        size = self.config["val_image_size"]
        for start in range(0, len(self.val_x), VAL_BATCH):
            images = self.normalised(self.val_x[start : start + VAL_BATCH])
            images = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
            images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast(self.device, torch.float16):
                hits += (self.compiled(images).argmax(1) == self.val_y[start : start + VAL_BATCH]).sum()
        self.model.train()
        return hits.item() / len(self.val_x)

    def warm_up(self) -> None:
        """Compile, let cuDNN choose and memory be allocated."""
        for image_size in sorted(set(self.config["image_sizes"])):
            for _ in range(3):
                self.step(torch.arange(self.config["batch_size"], device=self.device), image_size)
        self.validate()


def train(recipe: Recipe, seed: int) -> None:
    """The whole run; a line for each validation, with the seconds since the first step began, and an empty one."""
    recipe.reset(seed)
    config, count = recipe.config, len(recipe.train_x)
    batch, epochs = config["batch_size"], config["epochs"]
    per_epoch = count // batch
    torch.cuda.synchronize()
    step, start = 0, time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(count, device=recipe.device)
        losses = []
        for number in range(per_epoch):
            rate = recipe.learning_rate(step, epochs * per_epoch, round(config["warmup_epochs"] * per_epoch))
            for group in recipe.optimizer.param_groups:
                group["lr"] = rate
            indices = order[number * batch : (number + 1) * batch]
            losses.append(recipe.step(indices, config["image_sizes"][epoch]))
            step += 1
        if (epoch + 1) % config["validate_every"] == 0 or epoch + 1 == epochs:
            top1, loss = recipe.validate(), torch.stack(losses).mean().item()
            seconds = time.perf_counter() - start
            print(json.dumps({"epoch": epoch + 1, "seconds": seconds, "top1": top1, "train_loss": loss}), flush=True)
    print(flush=True)


def main() -> None:
    config = json.loads(sys.stdin.readline())
    begun = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    recipe = Recipe(config, np.load(config["arrays"]))
    recipe.warm_up()
    print(json.dumps({"startup_seconds": time.perf_counter() - begun, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        train(recipe, int(line))


if __name__ == "__main__":
    main()
