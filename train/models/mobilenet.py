"""MobileNetV2 and MobileNetV3.

Sandler et al., 'MobileNetV2' (arXiv:1801.04381), table 2, and Howard et al., 'Searching for MobileNetV3'
(arXiv:1905.02244), tables 1 and 2. mobilenet_v2, mobilenet_v3_large and mobilenet_v3_small are torchvision's;
mobilenetv3_large_100 and mobilenetv3_small_100 are timm's networks, whose BatchNorms have another epsilon.
"""

from __future__ import annotations

from functools import partial

from train.models.blocks import USUAL_NORM, Norm, SqueezeExcitation, divisible
from train.models.inverted_residual import Block, Plan, network, timm_layers, torchvision_layers
from train.models.libraries import TIMM, TORCHVISION, Published

# For each stage: expansion, channels, number of blocks, stride of the first block.
V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

# For each block by stage: kernel, channels inside, channels, squeeze-and-excitation?, activation, stride.
Row = tuple[int, int, int, bool, str, int]
RE, HS = "relu", "hard_swish"
V3_LARGE: tuple[tuple[Row, ...], ...] = (
    ((3, 16, 16, False, RE, 1),),
    ((3, 64, 24, False, RE, 2), (3, 72, 24, False, RE, 1)),
    ((5, 72, 40, True, RE, 2), *2 * ((5, 120, 40, True, RE, 1),)),
    ((3, 240, 80, False, HS, 2), (3, 200, 80, False, HS, 1), *2 * ((3, 184, 80, False, HS, 1),)),
    ((3, 480, 112, True, HS, 1), (3, 672, 112, True, HS, 1)),
    ((5, 672, 160, True, HS, 2), *2 * ((5, 960, 160, True, HS, 1),)),
)
V3_SMALL: tuple[tuple[Row, ...], ...] = (
    ((3, 16, 16, True, RE, 2),),
    ((3, 72, 24, False, RE, 2), (3, 88, 24, False, RE, 1)),
    ((5, 96, 40, True, HS, 2), *2 * ((5, 240, 40, True, HS, 1),)),
    ((5, 120, 48, True, HS, 1), (5, 144, 48, True, HS, 1)),
    ((5, 288, 96, True, HS, 2), *2 * ((5, 576, 96, True, HS, 1),)),
)
V3_NORM = Norm(eps=1e-3, momentum=0.99)  # from torchvision/models/mobilenetv3.py


def v2() -> Plan:
    """MobileNetV2."""
    stages, inputs = [], 32
    for stage, (expansion, filters, num_blocks, stride) in enumerate(V2, start=1):
        blocks = []
        for number in range(1, num_blocks + 1):
            blocks.append(Block(f"stage{stage}_block{number}", inputs, expansion * inputs, filters, 3,
                                stride if number == 1 else 1, "relu6"))
            inputs = filters
        stages.append(blocks)
    return Plan(stages, 32, 1280, "relu6")


def v3(rows: tuple[tuple[Row, ...], ...], hidden: int, norm: Norm) -> Plan:
    """MobileNetV3. Its last convolution has six times the channels of its last stage."""
    stages, inputs = [], 16
    for stage, of_stage in enumerate(rows, start=1):
        blocks = []
        for number, (kernel, expanded, filters, squeezes, act, stride) in enumerate(of_stage, start=1):
            squeeze = SqueezeExcitation(divisible(expanded / 4), gate="hard_sigmoid") if squeezes else None
            blocks.append(Block(f"stage{stage}_block{number}", inputs, expanded, filters, kernel, stride, act, squeeze))
            inputs = filters
        stages.append(blocks)
    return Plan(stages, 16, 6 * inputs, "hard_swish", norm, hidden)


PLANS = {
    "mobilenet_v2": v2(),
    "mobilenet_v3_large": v3(V3_LARGE, 1280, V3_NORM),
    "mobilenet_v3_small": v3(V3_SMALL, 1024, V3_NORM),
    "mobilenetv3_large_100": v3(V3_LARGE, 1280, USUAL_NORM),
    "mobilenetv3_small_100": v3(V3_SMALL, 1024, USUAL_NORM),
}
MODELS = {name: partial(network, plan) for name, plan in PLANS.items()}




def _torchvision_v2() -> Published:
    names = {"stem_conv": "features.0.0", "stem_bn": "features.0.1"}
    for place, block in enumerate(PLANS["mobilenet_v2"].blocks, start=1):
        theirs = torchvision_layers(block, f"features.{place}.conv")
        last = len(block.layers)  # the last convolution and its BatchNorm are not in a separate list
        theirs |= {f"{block.name}_conv{last}": f"features.{place}.conv.{last - 1}",
                   f"{block.name}_bn{last}": f"features.{place}.conv.{last}"}
        names |= theirs
    names |= {"last_conv": "features.18.0", "last_bn": "features.18.1", "classifier": "classifier.1"}
    return Published(TORCHVISION, names)


def _timm_v2() -> Published:
    names = timm_layers(PLANS["mobilenet_v2"])
    names |= {"last_conv": "conv_head", "last_bn": "bn2", "classifier": "classifier"}
    return Published(TIMM, names, model="mobilenetv2_100")


def _torchvision_v3(name: str) -> Published:
    names = {"stem_conv": "features.0.0", "stem_bn": "features.0.1"}
    blocks = [*PLANS[name].blocks]
    for place, block in enumerate(blocks, start=1):
        names |= torchvision_layers(block, f"features.{place}.block")
    last = f"features.{len(blocks) + 1}"
    names |= {"last_conv": f"{last}.0", "last_bn": f"{last}.1", "hidden": "classifier.0", "classifier": "classifier.3"}
    return Published(TORCHVISION, names)


def _timm_v3(name: str) -> Published:
    names = timm_layers(PLANS[name])
    last = f"blocks.{len(PLANS[name].stages)}.0"
    names |= {"last_conv": f"{last}.conv", "last_bn": f"{last}.bn1", "hidden": "conv_head", "classifier": "classifier"}
    return Published(TIMM, names, num_axes={"hidden_weight": 4})


PUBLISHED = {
    "mobilenet_v2": (_torchvision_v2(), _timm_v2()),
    **{name: (_torchvision_v3(name),) for name in ("mobilenet_v3_large", "mobilenet_v3_small")},
    **{name: (_timm_v3(name),) for name in ("mobilenetv3_large_100", "mobilenetv3_small_100")},
}
