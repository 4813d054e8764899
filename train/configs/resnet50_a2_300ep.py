"""ResNet-50 on ImageNet in 300 epochs: recipe A2 of "ResNet strikes back".

    scripts/dgx1_8gpu.sh -n 8 --config resnet50_a2_300ep --data /path/to/imagenet
    python -m train --config resnet50_a2_300ep --data /path/to/imagenet --accumulate 8    # one GPU, the same batch

As resnet50_a1_600ep, with twice the weight decay, half the mixup and no label smoothing. Source: Wightman, Touvron,
Jégou, arXiv:2110.00476, table 2, which states 79.8 % top-1.

Hardware: 8 NVIDIA GPUs, or 1. Images/sec: docs/recipes.md. Accuracy: 79.8 % expected, not measured here.
"""

from dataclasses import replace

from train.configs.resnet50_a1_600ep import CONFIG as RESNET50_A1

CONFIG = replace(RESNET50_A1, epochs=300, weight_decay=0.02, mixup=0.1, label_smoothing=0.0)
