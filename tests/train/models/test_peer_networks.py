"""Networks compute what torchvision's and timm's of these names do, with weights that go in and out unchanged.

Needs PyTorch, torchvision and timm: PEER_PYTHON names an interpreter that has them.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from common.mxnet_compat import mx
from graph_passes.executors import create_executor
from train import models, weights
from train.models.libraries import TIMM, TORCH, TORCHVISION, Published
from train.weights import publish, torch_file

pytestmark = pytest.mark.skipif("PEER_PYTHON" not in os.environ, reason="PEER_PYTHON is not set")

# Makes networks of 1,000 classes with random values, and writes state_dict, images and logits of each.
PEER = """
import sys
import numpy as np, torch
torch.set_num_threads(2)
folder, seed, height, width = sys.argv[1], *map(int, sys.argv[2:5])
images = np.random.default_rng(seed).standard_normal((2, 3, height, width)).astype(np.float32)
np.save(f"{folder}/images.npy", images.transpose(0, 2, 3, 1))
for place, (library, name) in enumerate(each.split(":") for each in sys.argv[5:]):
    torch.manual_seed(seed)
    if library == "timm":
        import timm
        network = timm.create_model(name)
    else:
        import torchvision
        network = torchvision.models.get_model(name)
    state = network.state_dict()
    for key, tensor in state.items():
        if key.endswith(("running_mean", "bias")):
            tensor.uniform_(-0.3, 0.3)
        elif key.endswith("num_batches_tracked"):
            tensor.fill_(7)
        elif key.endswith("running_var"):
            tensor.uniform_(0.8, 1.2)
        elif tensor.ndim == 1 or key.endswith("layer_scale"):
            tensor.uniform_(0.2, 0.6)  # larger ones make deep networks chaotic
    network.load_state_dict(state, strict=True)
    with torch.no_grad():
        logits = network.eval()(torch.from_numpy(images))
        for key in list(state)[-2:]:  # the classifier's: probabilities must not be 0 in fp32
            state[key] *= 10 / (logits.max() - logits.min())
        network.load_state_dict(state, strict=True)
        torch.save(state, f"{folder}/{place}.pth")
        logits = network(torch.from_numpy(images)).numpy()
        exact = network.double()(torch.from_numpy(images).double()).numpy()
    np.savez(f"{folder}/{place}.npz", exact=exact, error=np.abs(logits - exact).max())
"""

ONLY_TIMM = ("resnet_d", "se_resnet")  # families whose names are torchvision's or timm's, but only timm has them
QUICK = ("tf_efficientnet_lite1:timm", "mobilenet_v3_small:torchvision", "regnet_y_400mf:torchvision",
         "convnext_tiny:torchvision", "seresnet18:timm", "densenet121:torchvision")


def cases() -> list[str]:
    """name:library of each network that torchvision or timm has."""
    found = [f"{name}:{_library(family, published)}" for family, names in models.FAMILIES.items() for name in names
             for published in models.published(name) if published.library in (TORCH, TORCHVISION, TIMM)]
    return list(dict.fromkeys(found))  # a library may have two forms of its names


def _library(family: str, published: Published) -> str:
    if published.library == TORCH:
        return TIMM if family in ONLY_TIMM else TORCHVISION
    return published.library


@pytest.mark.long(but=QUICK)
@pytest.mark.parametrize("case", cases())
def test_weights_and_logits(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Logits in fp32 differ from PyTorch's in float64 by less than ten times the error of PyTorch's own fp32, or less
    than 1e-5 of their range."""
    name, library = case.split(":")
    published = next(each for each in models.published(name) if each.library in (TORCH, library))
    there = published.model or name
    network = models.create(name)
    size = 2 * (str(network.image_size),) if network.has_one_size else ("75", "96")
    subprocess.run([os.environ["PEER_PYTHON"], "-c", PEER, tmp_path, str(rng.integers(1 << 30)), *size,
                    f"{library}:{there}"], check=True)
    file = tmp_path / "0.pth"
    file.with_suffix(".json").write_text(f'{{"architecture": "{there}"}}')
    trained = weights.load(str(file), quiet=True)
    assert trained.config.model == name

    data = np.load(tmp_path / "images.npy")
    shapes = {"data": data.shape, "softmax_label": data.shape[:1]}
    executor = create_executor("mxnet", network.graph, shapes)
    executor.set_params(trained.params, trained.aux)
    found = np.log(executor.forward(mx.nd.array(data)).asnumpy().astype(np.float64))
    executor.close()
    with np.load(tmp_path / "0.npz") as peer:
        wanted, error = peer["exact"], float(peer["error"])
    difference = np.abs((found - found.mean(axis=1, keepdims=True)) - (wanted - wanted.mean(axis=1, keepdims=True)))
    print(f"{case}: {difference.max() / np.ptp(wanted):.1e} of the range, PyTorch {error / np.ptp(wanted):.1e}")
    assert 9 < np.ptp(wanted) < 11 and difference.max() < max(10 * error, 1e-5 * np.ptp(wanted))

    ours, theirs = publish.state_dict(trained, published), torch_file.read(file)
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array, err_msg=key, strict=True)
