"""PyTorch's side of finetune.py, which starts it: equal weights, images and recipe, with torchvision's ResNet.

Each line of standard input is a job, a JSON object with peer_cifar10.py's fields and
    weights   a state_dict as `export --torchvision` writes it; none: train from random weights
    frozen    whether only the classifier is trained; all BatchNorms then keep the statistics of the weights
    seed      seed of the new classifier, the order of the images and their augmentation
The answer is a line with the validation top-1 after the last epoch. Nothing is compiled, as jobs take seconds.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # must be set before PyTorch is imported

import numpy as np
import torch
from peer_cifar10 import Recipe


class FineTuning(Recipe):
    """A recipe that starts from a state_dict, and trains the whole network or only the classifier."""

    def network(self) -> torch.nn.Module:
        network = super().network()
        if path := self.config["weights"]:
            weights = torch.load(path, weights_only=True)
            own = network.state_dict()
            network.load_state_dict(weights | {name: own[name] for name in ("fc.weight", "fc.bias")})
        return network

    def freeze(self) -> None:
        """Freeze everything except the classifier."""
        for module in self.model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 0.0  # keeps the running statistics
                module.eval()
                module.train = lambda mode=True, module=module: module  # type: ignore[method-assign]
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith("fc."))


def top1_of(job: dict[str, Any]) -> float:
    """Run a job; returns the top-1 of the last validation as a fraction."""
    torch.manual_seed(job["seed"])
    recipe = FineTuning(job, np.load(job["arrays"]))
    if job["frozen"]:
        recipe.freeze()
    recipe.reset(job["seed"])
    epochs, batch, count = job["epochs"], job["batch_size"], len(recipe.padded)
    per_epoch = count // batch
    for step in range(epochs * per_epoch):
        number = step % per_epoch
        if number == 0:
            order = torch.randperm(count, device=recipe.device)
        rate = recipe.learning_rate(step, epochs * per_epoch, round(job["warmup_epochs"] * per_epoch))
        for group in recipe.optimizer.param_groups:
            group["lr"] = rate
        recipe.step(step, order[number * batch : (number + 1) * batch], job["image_sizes"][step // per_epoch])
    return recipe.validate()


def main() -> None:
    torch.backends.cudnn.benchmark = True
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"top1": top1_of(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
