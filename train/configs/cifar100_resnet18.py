"""ResNet-18 on CIFAR-100, upscaled to 128 pixels: the recipe of cifar10_resnet18.

    python -m train --config cifar100_resnet18 --data /path/to/cifar-100-python

The data may be CIFAR-100's own files (--labels coarse: the 20 superclasses), RecordIO or folders. `make compare-resnets
DATA=...` trains resnet18 to resnet152 with it, each in full and in mixed precision.

Hardware: one NVIDIA GPU. Images/sec: not measured here. Accuracy: not measured here.
"""

from dataclasses import replace

from train.configs.cifar10_resnet18 import CONFIG as CIFAR10_RESNET18

CONFIG = replace(CIFAR10_RESNET18, data="data/cifar100")
