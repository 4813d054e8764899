"""ResNet-50 on CIFAR-10, upscaled to 128 pixels: the recipe of cifar10_resnet18.

    python -m train --config cifar10_resnet50 --data /path/to/cifar10

Hardware: one NVIDIA GPU. Images/sec: not measured here. Accuracy: not measured here.
"""

from dataclasses import replace

from train.configs.cifar10_resnet18 import CONFIG as CIFAR10_RESNET18

CONFIG = replace(CIFAR10_RESNET18, model="resnet50")
