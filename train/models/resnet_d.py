"""ResNet-D: a stem of three 3x3 convolutions, and shortcuts with an average pooling before a 1x1 convolution of stride
1, so that no pixel is skipped.

He et al., 'Bag of Tricks for Image Classification with Convolutional Neural Networks' (arXiv:1812.01187), section 4.2;
channels and names as in timm.
"""

from functools import partial

from common.mxnet_compat import mx
from train.models import resnet
from train.models.blocks import Symbol, batch_norm, conv, relu
from train.models.resnet import BLOCKS_PER_STAGE


def stem(x: Symbol) -> Symbol:
    """The stem, from the images to FIRST_WIDTH channels; the first convolution has stride 2."""
    width = resnet.FIRST_WIDTH
    for number, (filters, stride) in enumerate(((width // 2, 2), (width // 2, 1), (width, 1)), 1):
        x = conv(x, f"stem_conv{number}", filters, kernel=3, stride=stride)
        x = relu(batch_norm(x, f"stem_bn{number}"), f"stem_relu{number}")
    return x


def projection(x: Symbol, name: str, filters: int, stride: int) -> Symbol:
    """A shortcut: with stride 2 first the mean of each 2x2 pixels (fewer at the border of an odd size); then a 1x1
    convolution."""
    if stride > 1:
        x = mx.sym.Pooling(x, kernel=(stride, stride), stride=(stride, stride), pool_type="avg", layout="NHWC",
                           pooling_convention="full", count_include_pad=False, name=f"{name}_pool")
    return resnet.projection(x, name, filters, stride=1)


# In timm a shortcut is an average pooling (or an identity), then the convolution.
TORCH_STEM = {"stem_conv1": "conv1.0", "stem_bn1": "conv1.1", "stem_conv2": "conv1.3", "stem_bn2": "conv1.4",
              "stem_conv3": "conv1.6", "stem_bn3": "bn1"}

MODELS = {f"resnet{depth}d": partial(resnet.resnet, depth, stem=stem, projection=projection)
          for depth in BLOCKS_PER_STAGE}
PUBLISHED = {f"resnet{depth}d": (resnet.torch_names(depth, TORCH_STEM, projection=1),) for depth in BLOCKS_PER_STAGE}
