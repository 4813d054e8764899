"""ResNeXt: the 3x3 convolution of each bottleneck is grouped, and has more channels in return.

Xie et al., 'Aggregated Residual Transformations for Deep Neural Networks' (arXiv:1611.05431). 32x4d means 32 groups of
4 channels in the first stage. The networks are torchvision's.
"""

from functools import partial

from train.models.resnet import resnet, torch_names

MODELS = {
    "resnext50_32x4d": partial(resnet, 50, groups=32, group_width=4),
    "resnext101_32x8d": partial(resnet, 101, groups=32, group_width=8),
    "resnext101_64x4d": partial(resnet, 101, groups=64, group_width=4),
}
PUBLISHED = {
    "resnext50_32x4d": (torch_names(50),),
    "resnext101_32x8d": (torch_names(101),),
    "resnext101_64x4d": (torch_names(101),),
}
