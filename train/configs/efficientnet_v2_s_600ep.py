"""EfficientNetV2-S on ImageNet in 600 epochs at 300 pixels, validation at 384: torchvision's recipe of its weights.

    scripts/dgx1_8gpu.sh -n 8 --config efficientnet_v2_s_600ep --data /path/to/imagenet
    python -m train --config efficientnet_v2_s_600ep --data /path/to/imagenet --accumulate 8   # one GPU, the same batch

SGD, learning rate 0.5 for 1,024 images, cosine after 5 epochs of warm-up, weight decay 2e-5; TrivialAugment, random
erasing, mixup and CutMix, label smoothing, repeated augmentation, stochastic depth, dropout, a moving average of the
weights. Source: https://github.com/pytorch/vision/tree/main/references/classification#efficientnet-v2, for which
torchvision states 84.228 % top-1. What differs: docs/recipes.md.

Hardware: 8 NVIDIA GPUs, or 1. Images/sec: not measured here. Accuracy: 84.23 % expected, not measured here.
"""

from dataclasses import replace

from train.configs.resnet50_torchvision_v2 import CONFIG as RESNET50_TORCHVISION_V2

CONFIG = replace(
    RESNET50_TORCHVISION_V2,
    model="efficientnet_v2_s",
    image_size=300,
    val_image_size=384,
    val_crop_fraction=1.0,
    stochastic_depth=0.2,
    dropout=0.2,
)
