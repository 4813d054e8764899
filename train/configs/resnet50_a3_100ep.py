"""ResNet-50 on ImageNet in 100 epochs at 160 pixels, validation at 224: recipe A3 of "ResNet strikes back".

    scripts/dgx1_8gpu.sh -n 8 --config resnet50_a3_100ep --data /path/to/imagenet
    python -m train --config resnet50_a3_100ep --data /path/to/imagenet --accumulate 8    # one GPU, the same batch

As resnet50_a2_300ep, with a higher learning rate, milder RandAugment, and neither stochastic depth nor repeated
augmentation. Source: Wightman, Touvron, Jégou, arXiv:2110.00476, table 2, which states 78.1 % top-1.

Hardware: 8 NVIDIA GPUs, or 1. Images/sec: docs/recipes.md. Accuracy: 78.1 % expected, not measured here.
"""

from dataclasses import replace

from train.configs.resnet50_a1_600ep import GLOBAL_BATCH
from train.configs.resnet50_a2_300ep import CONFIG as RESNET50_A2
from train.options.optimizer import REFERENCE_BATCH

CONFIG = replace(
    RESNET50_A2,
    image_size=160,
    val_image_size=224,
    epochs=100,
    learning_rate=8e-3 * REFERENCE_BATCH / GLOBAL_BATCH,
    randaugment_magnitude=6.0,
    repeated_augmentation=0,
    stochastic_depth=0.0,
)
