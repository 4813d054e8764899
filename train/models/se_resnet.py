"""SE-ResNet: ResNet v1.5 with squeeze-and-excitation at the end of each branch; and ResNet-RS.

Hu et al., 'Squeeze-and-Excitation Networks' (arXiv:1709.01507), and Bello et al., 'Revisiting ResNets'
(arXiv:2103.07579), which has ResNet-D's stem and shortcuts, and a convolution in place of the max pooling. The networks
are timm's.
"""

from __future__ import annotations

from functools import partial

from train.models import resnet, resnet_d
from train.models.blocks import Layer, SqueezeExcitation, Symbol, conv_bn
from train.models.resnet import torch_names

RS_DEPTHS = (50, 101, 152)


def squeeze_16(channels: int) -> SqueezeExcitation:
    """SE-ResNet's squeeze-and-excitation: a sixteenth of the channels, at least 8 (timm/layers/squeeze_excite.py)."""
    return SqueezeExcitation(max(8, channels // 16))


def squeeze_4(channels: int) -> SqueezeExcitation:
    """ResNet-RS's squeeze-and-excitation: a quarter of the channels."""
    return SqueezeExcitation(channels // 4)


def pool(x: Symbol, name: str) -> Symbol:
    """ResNet-RS's replacement for the max pooling: a 3x3 convolution of stride 2."""
    return conv_bn(x, name, "", Layer(resnet.FIRST_WIDTH, 3, 2), act="relu")


RS_STEM = {**resnet_d.TORCH_STEM, "stem_pool_conv": "maxpool.0", "stem_pool_bn": "maxpool.1"}

MODELS = {
    **{f"seresnet{depth}": partial(resnet.resnet, depth, squeeze=squeeze_16) for depth in resnet.BLOCKS_PER_STAGE},
    **{f"resnetrs{depth}": partial(resnet.resnet, depth, squeeze=squeeze_4, stem=resnet_d.stem, pool=pool,
                                   projection=resnet_d.projection) for depth in RS_DEPTHS},
}
PUBLISHED = {
    **{f"seresnet{depth}": (torch_names(depth, squeezes=True),) for depth in resnet.BLOCKS_PER_STAGE},
    **{f"resnetrs{depth}": (torch_names(depth, RS_STEM, projection=1, squeezes=True),) for depth in RS_DEPTHS},
}
