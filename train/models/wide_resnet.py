"""Wide ResNet: twice the channels in the 3x3 convolutions of the bottlenecks.

Zagoruyko and Komodakis, 'Wide Residual Networks' (arXiv:1605.07146), section 3.4; as torchvision has them.
"""

from functools import partial

from train.models.resnet import FIRST_WIDTH, resnet, torch_names

MODELS = {
    "wide_resnet50_2": partial(resnet, 50, group_width=2 * FIRST_WIDTH),
    "wide_resnet101_2": partial(resnet, 101, group_width=2 * FIRST_WIDTH),
}
PUBLISHED = {"wide_resnet50_2": (torch_names(50),), "wide_resnet101_2": (torch_names(101),)}
