"""PyTorch's side of parity_pytorch.py: trains from the same weights on the same batches with the same recipe.

    python benchmarks/parity_peer.py FOLDER float16:0 float32:0 float16:1 float32:0:nudged

parity_pytorch.py prepares FOLDER. A run is given as a precision and the number of a batch order; "nudged" changes the
initial weights in their last digit. Prints one line of JSON for each run. It trains torchvision's ResNet (v1.5, like
ours), in channels_last; float16 means automatic mixed precision. It runs in its own interpreter (PEER_PYTHON), because
this project itself never imports PyTorch.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision

NUDGE = 1e-7  # relative change; float32 has relative steps of 0.6e-7 to 1.2e-7
# Suffixes of our parameter names -> torchvision's
ENDS = {"_gamma": ".weight", "_beta": ".bias", "_weight": ".weight", "_bias": ".bias",
        "_moving_mean": ".running_mean", "_moving_var": ".running_var"}
PARTS = {"stem_conv": "conv1", "stem_bn": "bn1", "shortcut_conv": "downsample.0", "shortcut_bn": "downsample.1",
         "classifier": "fc"}


def torchvision_name(name: str) -> str:
    """Convert our name of a parameter or running statistic to torchvision's."""
    name = re.sub(r"stage(\d)_block(\d+)_", lambda match: f"layer{match[1]}.{int(match[2]) - 1}.", name)
    for part, theirs in PARTS.items():
        name = name.replace(part, theirs)
    end = next(end for end in ENDS if name.endswith(end))
    return name.removesuffix(end) + ENDS[end]


def load_network(folder: Path, model: str, num_classes: int, nudged: bool) -> torch.nn.Module:
    network = torchvision.models.get_model(model, num_classes=num_classes)
    ours = {torchvision_name(name): array for name, array in np.load(folder / "weights.npz").items()}
    state = network.state_dict()
    left = state.keys() - ours.keys()
    assert ours.keys() <= state.keys() and all(name.endswith("num_batches_tracked") for name in left), left
    rng = np.random.default_rng(0)
    for name, array in ours.items():
        if nudged:
            array = array * (1 + NUDGE * rng.standard_normal(array.shape)).astype(np.float32)
        tensor = torch.from_numpy(array)
        state[name] = tensor.permute(0, 3, 1, 2) if array.ndim == 4 else tensor  # OHWI -> OIHW
    network.load_state_dict(state)
    return network.to(memory_format=torch.channels_last)


class Sgd:
    """SGD with the learning rate inside the momentum, as in MXNet.

    This is torch's SGD, but the momentum is scaled whenever the learning rate changes. BatchNorm and biases have no
    weight decay.
    """

    def __init__(self, network: torch.nn.Module, momentum: float, nesterov: bool,
                 weight_decay: float) -> None:
        parameters = list(network.parameters())
        groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
                  {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]
        self.torch = torch.optim.SGD(groups, lr=1.0, momentum=momentum, nesterov=nesterov)
        self._rate = 0.0

    def set_rate(self, rate: float) -> None:
        for group in self.torch.param_groups:
            group["lr"] = rate
        for state in self.torch.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"] *= self._rate / rate
        self._rate = rate


def train(folder: Path, recipe: dict[str, Any], dtype: str, order: int, nudged: bool) -> dict[str, Any]:
    """Train; returns the loss of every step before its update, and the final loss and top-1 of the validation images.
    """
    device = recipe["device"]
    network = load_network(folder, recipe["model"], recipe["num_classes"], nudged).to(device)
    optimizer = Sgd(network, recipe["momentum"], recipe["nesterov"], recipe["weight_decay"])
    mixed = dtype == "float16"
    scaler = torch.amp.GradScaler(device, enabled=mixed, init_scale=recipe["loss_scale"])
    smoothing, num_classes = recipe["label_smoothing"], recipe["num_classes"]

    def load(name: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        data = np.load(folder / f"{name}_data.npy", mmap_mode="r")[number]
        images = torch.from_numpy(np.array(data)).to(device)
        label = np.load(folder / f"{name}_label.npy", mmap_mode="r")[number]
        # NHWC in memory, which is channels_last
        return images.permute(0, 3, 1, 2).float(), torch.from_numpy(label.astype(np.int64)).to(device)

    def loss_of(scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Cross-entropy with MXNet's targets: smoothing / (classes - 1) for each wrong class."""
        targets = torch.full_like(scores, smoothing / (num_classes - 1), dtype=torch.float32)
        targets.scatter_(1, label[:, None], 1 - smoothing)
        return torch.nn.functional.cross_entropy(scores.float(), targets)

    def forward(images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.float16, enabled=mixed):
            return network(images)

    losses = []
    for number, rate in enumerate(recipe["learning_rates"]):
        images, label = load(f"order{order}", number)
        optimizer.torch.zero_grad(set_to_none=True)
        loss = loss_of(forward(images), label)
        scaler.scale(loss).backward()
        optimizer.set_rate(rate)
        scaler.step(optimizer.torch)
        scaler.update()
        losses.append(loss.detach())
    network.eval()
    loss_sum, hits, count = 0.0, 0, 0
    with torch.inference_mode():
        for number in range(recipe["val_batches"]):
            images, label = load("val", number)
            scores = forward(images)
            loss_sum += float(loss_of(scores, label)) * len(label)
            hits += int((scores.argmax(1) == label).sum())
            count += len(label)
    return {"side": f"PyTorch {torch.__version__}", "dtype": dtype, "order": order, "nudged": nudged,
            "loss": [round(float(loss), 6) for loss in losses], "val_loss": loss_sum / count, "val_top1": hits / count}


def main() -> None:
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    recipe = json.loads((folder / "recipe.json").read_text())
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for run in runs:
        dtype, order, *nudged = run.split(":")
        print(json.dumps(train(folder, recipe, dtype, int(order), bool(nudged))), flush=True)


if __name__ == "__main__":
    main()
