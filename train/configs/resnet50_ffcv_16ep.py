"""ResNet-50 on ImageNet in 16 epochs with progressive resizing: the recipe of resnet50_ffcv_88ep, shortened.

    scripts/dgx1_8gpu.sh -n 8 --config resnet50_ffcv_16ep --data /path/to/imagenet
    python -m train --config resnet50_ffcv_16ep --data /path/to/imagenet                # one GPU

Source: libffcv/ffcv-imagenet, rn50_configs/rn50_16_epochs.yaml, which states 73.8 % top-1, with the two things that are
missing here.

Hardware: 1 to 8 NVIDIA GPUs. Images/sec: docs/recipes.md. Accuracy: up to 73.8 % expected, not measured here.
"""

from dataclasses import replace

from train.configs.resnet50_ffcv_88ep import CONFIG as RESNET50_FFCV_88EP

CONFIG = replace(RESNET50_FFCV_88EP, epochs=16, resize_epochs=(11.0, 13.0))
