"""PyTorch's side of cifar10_time_to_accuracy.py, which starts it: its recipe with PyTorch's usual best practice.

The images are decoded and padded on the GPU before the clock starts. Compiled code on the GPU crops, mirrors, cuts out
and resizes them. The rest is torchvision's ResNet v1.5, channels_last, fp16 autocast with a gradient scaler, fused SGD,
`torch.compile`, and moving averages in one launch. Standard input holds the recipe as a JSON object, then one seed per
line; the program prints a JSON line for each validation.
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

VAL_BATCH = 1000


def crops(padded: torch.Tensor, indices: torch.Tensor, corner: torch.Tensor, mirror: torch.Tensor, hole: torch.Tensor,
          cutout: float, fill: torch.Tensor, side: int) -> torch.Tensor:
    """Make square crops of `side` pixels with a hole, as our pipeline does: (N, side, side, C).

    Args:
        padded: all images, (num_images, height, width, C).
        indices: numbers of the images to take, (N,).
        corner: left and top of each crop, (N, 2) integers.
        mirror: whether to flip a crop from left to right, (N,) bool.
        hole: centre of the filled square before the flip, x and y in [0, 1), (N, 2).
        cutout: side of the filled square as a fraction of the crop's side.
        fill: colour of the square, (C,).
    """
    pixels = torch.arange(side, device=padded.device)
    x, y = torch.where(mirror[:, None], pixels.flip(0), pixels), pixels.expand(len(indices), side)
    start, end = ((hole + sign * cutout / 2) * side for sign in (-1, 1))
    in_x, in_y = ((start[:, i, None].floor() <= at) & (at < end[:, i, None].floor()) for i, at in ((0, x), (1, y)))
    rows, columns = corner[:, 1, None] + y, corner[:, 0, None] + x
    images = padded[indices[:, None, None], rows[:, :, None], columns[:, None, :]]
    return torch.where((in_y[:, :, None] & in_x[:, None, :])[..., None], fill, images)


class Recipe:
    """Data, network and optimizer."""

    def __init__(self, config: dict[str, Any], arrays: Any, device: str = "cuda") -> None:
        self.config, self.device = config, device
        self.mean, self.std = (torch.tensor(arrays[k], device=device) for k in ("mean", "std"))
        self.fill = self.mean.round().to(torch.uint8)
        images, self.val_x = (torch.from_numpy(arrays[f"{split}_images"]).to(device) for split in ("train", "val"))
        self.train_y, self.val_y = (
            torch.from_numpy(arrays[f"{split}_labels"]).to(device) for split in ("train", "val")
        )
        count, self.side, padding = len(images), images.shape[1], config["crop_padding"]
        self.padded = self.fill.repeat(count, self.side + 2 * padding, self.side + 2 * padding, 1)
        self.padded[:, padding : padding + self.side, padding : padding + self.side] = images
        self.model = self.network().to(device, memory_format=torch.channels_last)
        self.compiled = torch.compile(self.model, dynamic=False)  # one graph for training, one for validation
        self.inputs = torch.compile(self.network_input, dynamic=False)
        self.crops = torch.compile(crops, dynamic=False)
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.SGD(
            [{"params": weights, "weight_decay": config["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
            lr=config["peak_learning_rate"], momentum=config["momentum"], nesterov=config["nesterov"], fused=True,
        )
        self.averaged = [tensor for tensor in self.model.state_dict().values() if tensor.is_floating_point()]
        self.averages = [tensor.clone() for tensor in self.averaged]
        self.reset(seed=0)

    def network(self) -> torch.nn.Module:
        """A network whose initial weights have our distributions (train/models/network.py: init_params)."""
        network = torchvision.models.get_model(self.config["model"], num_classes=self.config["num_classes"],
                                               zero_init_residual=self.config["zero_init_residual"])
        torch.nn.init.normal_(network.fc.weight, std=0.01)
        torch.nn.init.zeros_(network.fc.bias)
        return network

    def reset(self, seed: int) -> None:
        """Start a new training; compiled code is kept."""
        torch.manual_seed(seed)
        self.model.load_state_dict(self.network().state_dict())
        self.optimizer.state.clear()
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.device == "cuda")

    @property
    def autocast(self) -> torch.autocast:
        """Autocast to float16 on a GPU; a CPU is for trying this program out."""
        return torch.autocast(self.device, torch.float16 if self.device == "cuda" else torch.bfloat16)

    def network_input(self, images: torch.Tensor, size: int) -> torch.Tensor:
        """Normalise and resize uint8 images (N, height, width, C) to (N, C, size, size), channels_last, float16."""
        pixels = ((images.float() - self.mean) / self.std).permute(0, 3, 1, 2)
        pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)
        return pixels.half().contiguous(memory_format=torch.channels_last)

    def training_images(self, indices: torch.Tensor) -> torch.Tensor:
        """Augmented images, (N, side, side, C) uint8."""
        config, count = self.config, len(indices)
        corner = torch.randint(0, 2 * config["crop_padding"] + 1, (count, 2), device=self.device)
        mirror = torch.rand(count, device=self.device) < 0.5
        hole = torch.rand(count, 2, device=self.device)
        return self.crops(self.padded, indices, corner, mirror, hole, config["cutout"], self.fill, self.side)

    def order(self, epoch: int) -> torch.Tensor:
        """Draw the order of the images in an epoch, (count,)."""
        return torch.randperm(len(self.padded), device=self.device)

    def learning_rate(self, step: int, steps: int, warmup: int) -> float:
        """The schedule of train/schedule.py: linear warm-up, then a cosine."""
        if step < warmup:
            return self.config["peak_learning_rate"] * (step + 1) / warmup
        final = self.config["final_learning_rate"]
        done = (step - warmup) / max(1, steps - warmup)
        return final + (self.config["peak_learning_rate"] - final) * (1 + math.cos(math.pi * done)) / 2

    def step(self, number: int, indices: torch.Tensor, image_size: int) -> torch.Tensor:
        """Run optimizer step `number`, counted from 0, on some images; returns their loss."""
        config = self.config
        images = self.inputs(self.training_images(indices), image_size)
        with self.autocast:
            loss = F.cross_entropy(self.compiled(images), self.train_y[indices],
                                   label_smoothing=config["label_smoothing"])
        self.update(number, loss)
        return loss.detach()

    def update(self, number: int, loss: torch.Tensor) -> None:
        """Update the weights and their averages from the loss of step `number`."""
        self.scaler.scale(loss).backward()
        if clip_norm := self.config.get("clip_norm"):
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.config["ema_decay"]:
            decay = min(self.config["ema_decay"], number / (9 + number))  # as in train/optimizer.py
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, self.averaged, 1 - decay)

    @torch.no_grad()
    def validate(self) -> float:
        """Top-1 as a fraction, with the averaged weights if there are any."""
        if self.config["ema_decay"]:
            own = [tensor.clone() for tensor in self.averaged]
            torch._foreach_copy_(self.averaged, self.averages)
        self.model.eval()
        hits = torch.zeros((), dtype=torch.int64, device=self.device)
        for start in range(0, len(self.val_x), VAL_BATCH):
            images = self.inputs(self.val_x[start : start + VAL_BATCH], self.config["val_image_size"])
            with self.autocast:
                hits += (self.compiled(images).argmax(1) == self.val_y[start : start + VAL_BATCH]).sum()
        self.model.train()
        if self.config["ema_decay"]:
            torch._foreach_copy_(self.averaged, own)
        return hits.item() / len(self.val_x)

    def warm_up(self) -> None:
        """Compile, let cuDNN choose its kernels, and allocate memory."""
        for image_size in sorted(set(self.config["image_sizes"])):
            for number in range(3):
                self.step(number, torch.arange(self.config["batch_size"], device=self.device), image_size)
        self.validate()


def train(recipe: Recipe, seed: int) -> None:
    """Train a whole run; prints a line for each validation, with the seconds since the first step began, and then an
    empty line."""
    recipe.reset(seed)
    config, count = recipe.config, len(recipe.padded)
    batch, epochs = config["batch_size"], config["epochs"]
    per_epoch = count // batch
    if recipe.device == "cuda":
        torch.cuda.synchronize()
    step, start = 0, time.perf_counter()
    for epoch in range(epochs):
        order = recipe.order(epoch)
        losses = []
        for number in range(per_epoch):
            rate = recipe.learning_rate(step, epochs * per_epoch, round(config["warmup_epochs"] * per_epoch))
            for group in recipe.optimizer.param_groups:
                group["lr"] = rate
            indices = order[number * batch : (number + 1) * batch]
            losses.append(recipe.step(step, indices, config["image_sizes"][epoch]))
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
