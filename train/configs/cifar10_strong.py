"""ResNet-18 on CIFAR-10 at 128 pixels with today's ingredients: a longer training than cifar10_resnet18's.

    python -m train --config cifar10_strong --data /path/to/cifar10

Source: our own; each ingredient with the value that resnet50_torchvision_v2 has it with, where it is in that one.

Hardware: one NVIDIA GPU. Images/sec: not measured here. Accuracy: not measured here.
"""

from dataclasses import replace

from train.configs.cifar10_resnet18 import CONFIG as CIFAR10_RESNET18

CONFIG = replace(
    CIFAR10_RESNET18,
    cutout=0.0,
    auto_augment="trivialaugment",
    random_erasing=0.1,
    mixup=0.2,
    cutmix=1.0,
    repeated_augmentation=2,
    clip_norm=2.0,
    epochs=100,
    ema_decay=0.998,
)
