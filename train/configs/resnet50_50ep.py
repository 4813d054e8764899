"""ResNet-50 on ImageNet in 50 epochs: the recipe of resnet50_90ep, stretched over fewer epochs.

    scripts/dgx1_8gpu.sh -n 8 --config resnet50_50ep --data /path/to/imagenet
    python -m train --config resnet50_50ep --data /path/to/imagenet                   # one GPU

Source: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, with the same constants, which
reports 75.9 % top-1 after 50 epochs.

Hardware: 1 to 8 NVIDIA GPUs. Images/sec: docs/recipes.md. Accuracy: 75.9 % expected, not measured here.
"""

from dataclasses import replace

from train.configs.resnet50_90ep import CONFIG as RESNET50_90EP

CONFIG = replace(RESNET50_90EP, epochs=50)
