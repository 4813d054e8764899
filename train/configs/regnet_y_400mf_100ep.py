"""RegNetY-400MF on ImageNet in 100 epochs at 224 pixels: torchvision's recipe of its first weights.

    scripts/dgx1_8gpu.sh -n 8 --config regnet_y_400mf_100ep --data /path/to/imagenet
    python -m train --config regnet_y_400mf_100ep --data /path/to/imagenet --accumulate 8   # one GPU, the same batch

SGD, learning rate 0.4 for 1,024 images (0.8 for the other small networks: regnet_x_400mf, regnet_x_800mf,
regnet_x_1_6gf, regnet_y_800mf, regnet_y_1_6gf), cosine after 5 epochs of warm-up, weight decay 5e-5; crops and mirror
images alone. Source: https://github.com/pytorch/vision/tree/main/references/classification#regnet, for which
torchvision states 74.046 % top-1. What differs: docs/recipes.md.

Hardware: 8 NVIDIA GPUs, or 1. Images/sec: not measured here. Accuracy: 74.05 % expected, not measured here.
"""

from train.config import Config
from train.options.optimizer import REFERENCE_BATCH

GLOBAL_BATCH = 1024  # images

CONFIG = Config(
    model="regnet_y_400mf",
    zero_init_residual=False,
    label_smoothing=0.0,
    data="data/imagenet",
    image_size=224,
    batch_size=128,
    random_area=(0.08, 1.0),
    epochs=100,
    learning_rate=0.4 * REFERENCE_BATCH / GLOBAL_BATCH,
    schedule="cosine",
    warmup_epochs=5.0,
    momentum=0.9,
    weight_decay=5e-5,
)
