"""ResNet-18 on CIFAR-10 with today's ingredients, upscaled to 96 pixels: TrivialAugment, random erasing, mixup or
CutMix, label smoothing, stochastic depth, repeated augmentation, clipping, moving average.

    python -m train --config cifar10_strong --data /path/to/cifar10

benchmarks/cifar10_recipe.py trains it beside PyTorch, and with one ingredient left out at a time (docs/recipes.md).

Hardware: one NVIDIA GPU. Images/sec: not measured here. Accuracy: not measured here.
"""

from dataclasses import replace

from train.configs.cifar10_resnet18 import CONFIG as CIFAR10_RESNET18

CONFIG = replace(
    CIFAR10_RESNET18,
    epochs=100,
    warmup_epochs=7.5,
    image_size=96,
    cutout=0.0,
    auto_augment="trivialaugment",
    random_erasing=0.1,
    mixup=0.2,
    cutmix=1.0,
    repeated_augmentation=2,
    stochastic_depth=0.05,
    clip_norm=1.0,
    validate_every=5,
)
