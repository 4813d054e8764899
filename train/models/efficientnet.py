"""EfficientNet, EfficientNet-Lite and EfficientNetV2-S.

Tan and Le, 'EfficientNet' (arXiv:1905.11946), table 1, and 'EfficientNetV2' (arXiv:2104.00298), table 4; the Lite
networks, without squeeze-and-excitation and with ReLU6, as in TensorFlow's
efficientnet/lite/efficientnet_lite_builder.py. A name with tf_ is timm's name of TensorFlow's network: padding and
BatchNorm's epsilon are TensorFlow's. The other names are PyTorch's networks: efficientnet_b0 and so on are
torchvision's and timm's, efficientnet_v2_s is torchvision's.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from train.models.blocks import USUAL_NORM, Norm, SqueezeExcitation, divisible, repeated
from train.models.inverted_residual import (
    Block,
    Plan,
    network,
    tensorflow_layers,
    timm_layers,
    torchvision_layers,
)
from train.models.libraries import TIMM, TORCHVISION, Published


class Stage(NamedTuple):
    """A row of a paper's table; `stride` is the stride of the first block."""

    expansion: int
    kernel: int
    stride: int
    filters: int
    num_blocks: int
    fused: bool = False


B0 = (Stage(1, 3, 1, 16, 1), Stage(6, 3, 2, 24, 2), Stage(6, 5, 2, 40, 2), Stage(6, 3, 2, 80, 3),
      Stage(6, 5, 1, 112, 3), Stage(6, 5, 2, 192, 4), Stage(6, 3, 1, 320, 1))
V2_S = (Stage(1, 3, 1, 24, 2, fused=True), Stage(4, 3, 2, 48, 4, fused=True), Stage(4, 3, 2, 64, 4, fused=True),
        Stage(4, 3, 2, 128, 6), Stage(6, 3, 1, 160, 9), Stage(6, 3, 2, 256, 15))

# Number -> (width and depth relative to B0, from TensorFlow's efficientnet_builder.py; height and width of an image in
# pixels).
SCALES = {0: (1.0, 1.0, 224), 1: (1.0, 1.1, 240), 2: (1.1, 1.2, 260), 3: (1.2, 1.4, 300), 4: (1.4, 1.8, 380)}
LITE_SCALES = {number: SCALES[number] for number in (0, 1, 2)}

TF_NORM = Norm(eps=1e-3, momentum=0.99)  # from efficientnet_builder.py
V2_NORM = Norm(eps=1e-3)  # from torchvision


def efficientnet(number: int, norm: Norm = USUAL_NORM, is_reversed: bool = False) -> Plan:
    """EfficientNet-B`number`. Its last convolution has four times the channels of its last stage."""
    width, depth, _ = SCALES[number]
    rows = [row._replace(filters=divisible(width * row.filters), num_blocks=repeated(row.num_blocks, depth))
            for row in B0]
    return _plan(rows, divisible(width * 32), divisible(width * 1280), "silu", norm, is_reversed)


def lite(number: int, norm: Norm = USUAL_NORM, is_reversed: bool = False) -> Plan:
    """EfficientNet-Lite`number`: its first and last convolutions have the width of Lite0's, and its first and last
    stages have the depth of Lite0's.
    """
    width, depth, _ = LITE_SCALES[number]
    rows = [row._replace(filters=divisible(width * row.filters),
                         num_blocks=row.num_blocks if row in (B0[0], B0[-1]) else repeated(row.num_blocks, depth))
            for row in B0]
    return _plan(rows, 32, 1280, "relu6", norm, is_reversed, squeezes=False)


def v2_s(norm: Norm = V2_NORM, is_reversed: bool = False) -> Plan:
    """EfficientNetV2-S."""
    return _plan(V2_S, 24, 1280, "silu", norm, is_reversed)


def _plan(rows: Any, stem: int, last: int, act: str, norm: Norm, is_reversed: bool, squeezes: bool = True) -> Plan:
    stages, inputs = [], stem
    for stage, row in enumerate(rows, start=1):
        blocks = []
        for number in range(1, row.num_blocks + 1):
            squeeze = SqueezeExcitation(inputs // 4, act) if squeezes and not row.fused else None
            blocks.append(Block(f"stage{stage}_block{number}", inputs, inputs * row.expansion, row.filters, row.kernel,
                                row.stride if number == 1 else 1, act, squeeze, row.fused))
            inputs = row.filters
        stages.append(blocks)
    return Plan(stages, stem, last, act, norm, is_reversed=is_reversed)


PLANS = {
    **{f"efficientnet_b{number}": efficientnet(number) for number in SCALES},
    "efficientnet_v2_s": v2_s(),
    **{f"efficientnet_lite{number}": lite(number) for number in LITE_SCALES},
    **{f"tf_efficientnet_b{number}": efficientnet(number, TF_NORM, is_reversed=True) for number in SCALES},
    "tf_efficientnetv2_s": v2_s(TF_NORM, is_reversed=True),
    **{f"tf_efficientnet_lite{number}": lite(number, TF_NORM, is_reversed=True) for number in LITE_SCALES},
}
MODELS = {name: partial(network, plan) for name, plan in PLANS.items()}




def _bicubic(size: int, shorter: int) -> dict[str, Any]:
    """Settings of a record: images are resized (bicubic) to a shorter side of `shorter` pixels, and cropped to the
    middle `size` pixels.
    """
    return {"size": size, "crop": size / shorter, "interpolation": "bicubic"}


# from torchvision/models/efficientnet.py, IMAGENET1K_V1
TORCHVISION_IMAGES = {
    "efficientnet_b0": _bicubic(224, 256), "efficientnet_b1": _bicubic(240, 256), "efficientnet_b2": _bicubic(288, 288),
    "efficientnet_b3": _bicubic(300, 320), "efficientnet_b4": _bicubic(380, 384),
    "efficientnet_v2_s": {"size": 384, "crop": 1.0},
}
MARGIN = 32  # pixels by which the shorter side is longer than the crop, in TensorFlow's efficientnet/preprocessing.py
HALVES = {"mean": 3 * (127.5,), "std": 3 * (127.5,)}  # timm's configuration for weights whose input ranges from -1 to 1
LITE_PIXELS = {"mean": 3 * (127.0,), "std": 3 * (128.0,)}  # from efficientnet_lite_builder.py


def _torchvision(name: str) -> Published:
    names = {"stem_conv": "features.0.0", "stem_bn": "features.0.1"}
    for stage, blocks in enumerate(PLANS[name].stages, start=1):
        for number, block in enumerate(blocks):
            names |= torchvision_layers(block, f"features.{stage}.{number}.block")
    last = f"features.{len(PLANS[name].stages) + 1}"
    names |= {"last_conv": f"{last}.0", "last_bn": f"{last}.1", "classifier": "classifier.1"}
    return Published(TORCHVISION, names, images=TORCHVISION_IMAGES[name])


def _timm(name: str, images: dict[str, Any] | None = None) -> Published:
    names = timm_layers(PLANS[name]) | {"last_conv": "conv_head", "last_bn": "bn2", "classifier": "classifier"}
    return Published(TIMM, names, images=images or {}, is_reversed=PLANS[name].is_reversed)


def _tensorflow(name: str, library: str, images: dict[str, Any]) -> Published:
    return Published(library, tensorflow_layers(PLANS[name]), images=images, is_reversed=True)


def _published() -> dict[str, tuple[Published, ...]]:
    found: dict[str, tuple[Published, ...]] = {}
    for number, (_, _, size) in SCALES.items():
        images = _bicubic(size, size + MARGIN)
        name = f"efficientnet_b{number}"
        found[name] = (_torchvision(name), _timm(name))
        name = f"tf_{name}"
        found[name] = (_timm(name, images), _tensorflow(name, "EfficientNet-PyTorch", images))
    for number, (_, _, size) in LITE_SCALES.items():
        images = _bicubic(size, size + MARGIN)
        name = f"efficientnet_lite{number}"
        found[name] = (_timm(name, images),)
        name = f"tf_{name}"
        found[name] = (_timm(name, images | HALVES),
                       _tensorflow(name, "efficientnet-lite-pytorch", images | LITE_PIXELS))
    found["efficientnet_v2_s"] = (_torchvision("efficientnet_v2_s"),)
    found["tf_efficientnetv2_s"] = (_timm("tf_efficientnetv2_s", _bicubic(384, 384) | HALVES),)
    return found


PUBLISHED = _published()
