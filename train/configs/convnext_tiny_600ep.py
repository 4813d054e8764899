"""ConvNeXt-T on ImageNet in 600 epochs at 176 pixels, validation at 224: torchvision's recipe of its weights.

    scripts/dgx1_8gpu.sh -n 8 --config convnext_tiny_600ep --data /path/to/imagenet
    python -m train --config convnext_tiny_600ep --data /path/to/imagenet --accumulate 8   # one GPU, the same batch

AdamW, learning rate 1e-3 for 1,024 images, cosine after 5 epochs of warm-up, weight decay 0.05; TrivialAugment, random
erasing, mixup and CutMix, label smoothing, repeated augmentation, stochastic depth, a moving average of the weights.
Source: https://github.com/pytorch/vision/tree/main/references/classification#convnext, and for the validation crop of
224 from 236 pixels https://github.com/pytorch/vision/pull/5197, which states 82.520 % top-1. What differs:
docs/recipes.md.

Hardware: 8 NVIDIA GPUs, or 1. Images/sec: not measured here. Accuracy: 82.52 % expected, not measured here.
"""

from dataclasses import replace

from train.configs.resnet50_torchvision_v2 import CONFIG as RESNET50_TORCHVISION_V2
from train.configs.resnet50_torchvision_v2 import GLOBAL_BATCH
from train.options.optimizer import REFERENCE_BATCH

CONFIG = replace(
    RESNET50_TORCHVISION_V2,
    model="convnext_tiny",
    val_crop_fraction=224 / 236,
    optimizer="adamw",
    learning_rate=1e-3 * REFERENCE_BATCH / GLOBAL_BATCH,
    weight_decay=0.05,
    stochastic_depth=0.1,
)
