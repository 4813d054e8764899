"""PyTorch's side of finetune.py, which starts it: equal weights, images and recipe.

The network is torchvision's ResNet, or EfficientNet-Lite of the package efficientnet_lite_pytorch. Each line of
standard input is a job, a JSON object with peer_cifar10.py's fields and
    weights         a state_dict for this network; none: train from random weights
    classifier      a .npz with the new classifier's `weight` (classes, channels) and `bias`, if there are weights
    packages        the folder with efficientnet_lite_pytorch; none: torchvision's network
    interpolation   how images are resized, bilinear or bicubic
    frozen          whether only the classifier is trained; all BatchNorms then keep the statistics of the weights
    compiled        whether torch.compile is used, before the clock starts; always off without a GPU
    seed            seed of the order of the images, of their augmentation, and of random weights
The answer to a job are lines: if there are weights, the validation before the first step, in float32, as top-1 and
loss; then peer_cifar10.py's lines of a training run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peer_cifar10 import VAL_BATCH, Recipe, train


class FineTuning(Recipe):
    """A recipe that starts from a state_dict, and trains the whole network or only the classifier."""

    def network(self) -> torch.nn.Module:
        network = self.lite() if self.config["packages"] else super().network()
        if path := self.config["weights"]:
            state = torch.load(path, weights_only=True)
            with np.load(self.config["classifier"]) as classifier:
                state |= {f"{classifier_name(network)}.{name}": torch.from_numpy(classifier[name])
                          for name in ("weight", "bias")}
            network.load_state_dict(state)
        return network

    def lite(self) -> torch.nn.Module:
        """EfficientNet-Lite without dropout, as in train/models; TensorFlow's padding depends on the image size."""
        if self.config["packages"] not in sys.path:
            sys.path.insert(0, self.config["packages"])
        from efficientnet_lite_pytorch import EfficientNet

        name = self.config["model"].removeprefix("tf_").replace("_", "-")
        network: torch.nn.Module = EfficientNet.from_name(
            name, num_classes=self.config["num_classes"], image_size=self.config["val_image_size"], dropout_rate=0.0,
            drop_connect_rate=0.0)
        return network

    def freeze(self) -> None:
        """Freeze everything except the classifier."""
        for module in self.model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 0.0  # keeps the running statistics
                module.eval()
                module.train = lambda mode=True, module=module: module  # type: ignore[method-assign]
        trained = f"{classifier_name(self.model)}."
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith(trained))

    @property
    def autocast(self) -> torch.autocast:
        """Ours computes in float16 on a GPU, and in float32 on a CPU."""
        return torch.autocast(self.device, torch.float16, enabled=self.device == "cuda")

    def pixels(self, images: torch.Tensor, size: int) -> torch.Tensor:
        """Resize to whole grey levels, as DALI does, and normalise: (N, height, width, C) to (N, C, size, size)."""
        # with antialias, bicubic weights are those of DALI and Pillow (a = -0.5, not -0.75)
        resized = F.interpolate(images.permute(0, 3, 1, 2).float(), size=(size, size), antialias=True,
                                mode=self.config["interpolation"], align_corners=False).round().clamp(0, 255)
        return (resized - self.mean[:, None, None]) / self.std[:, None, None]

    def network_input(self, images: torch.Tensor, size: int) -> torch.Tensor:
        pixels = self.pixels(images, size)
        return (pixels.half() if self.device == "cuda" else pixels).contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def start(self) -> dict[str, float]:
        """Top-1 (a fraction) and loss (nats) on the validation images, in float32."""
        self.model.eval()
        hits, loss = 0, 0.0
        for begin in range(0, len(self.val_x), VAL_BATCH):
            labels = self.val_y[begin : begin + VAL_BATCH]
            scores = self.model(self.pixels(self.val_x[begin : begin + VAL_BATCH], self.config["val_image_size"]))
            hits += int((scores.argmax(1) == labels).sum())
            loss += F.cross_entropy(scores, labels, reduction="sum").item()
        self.model.train()
        return {"start_top1": hits / len(self.val_x), "start_loss": loss / len(self.val_x)}


def classifier_name(network: torch.nn.Module) -> str:
    """The name of the last fully connected layer."""
    *_, name = (name for name, module in network.named_modules() if isinstance(module, torch.nn.Linear))
    return name


def run(job: dict[str, Any], device: str) -> None:
    """Run a job; prints its answer."""
    torch._dynamo.reset()  # no code of an earlier job's network
    torch._dynamo.config.disable = not job["compiled"] or device == "cpu"
    torch.manual_seed(job["seed"])
    recipe = FineTuning(job, np.load(job["arrays"]), device)
    if job["frozen"]:
        recipe.freeze()
    if job["weights"]:
        print(json.dumps(recipe.start()), flush=True)
    if job["compiled"]:
        recipe.warm_up()
    train(recipe, job["seed"])


def main() -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # `start` is compared in float32
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(json.dumps({"torch": torch.__version__, "can_compile": device == "cuda"}), flush=True)
    for line in sys.stdin:
        run(json.loads(line), device)


if __name__ == "__main__":
    main()
