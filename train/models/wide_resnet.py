"""Wide ResNet: twice the channels in the 3x3 convolutions of the bottlenecks.

Zagoruyko and Komodakis, 'Wide Residual Networks' (arXiv:1605.07146), section 3.4; as in torchvision.
"""

from functools import partial

from train.models import resnet
from train.models.blocks import Symbol
from train.models.resnet import torch_names


def wide_resnet(depth: int, num_classes: int = 1000, label_smoothing: float = 0.0) -> Symbol:
    """The training Symbol; the arguments are those of `resnet`."""
    return resnet.resnet(depth, num_classes, label_smoothing, group_width=2 * resnet.FIRST_WIDTH)


MODELS = {"wide_resnet50_2": partial(wide_resnet, 50), "wide_resnet101_2": partial(wide_resnet, 101)}
PUBLISHED = {"wide_resnet50_2": (torch_names(50),), "wide_resnet101_2": (torch_names(101),)}
