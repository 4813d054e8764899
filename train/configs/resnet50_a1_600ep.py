"""ResNet-50 on ImageNet in 600 epochs: recipe A1 of "ResNet strikes back".

    scripts/dgx1_8gpu.sh -n 8 --config resnet50_a1_600ep --data /path/to/imagenet
    python -m train --config resnet50_a1_600ep --data /path/to/imagenet --accumulate 8    # one GPU, the same batch

LAMB, learning rate 5e-3 for 2,048 images, cosine after 5 epochs of warm-up; binary cross entropy, mixup and CutMix,
timm's RandAugment, stochastic depth, repeated augmentation. Source: Wightman, Touvron, Jégou, arXiv:2110.00476, table
2, which states 80.4 % top-1. Settings missing from that table are timm's: gradients clipped to a norm of 1 (the default
of its LAMB), three copies of an image, bicubic resizing. Differences: docs/recipes.md.

Hardware: 8 NVIDIA GPUs, or 1. Images/sec: docs/recipes.md. Accuracy: 80.4 % expected, not measured here.
"""

from train.config import Config
from train.options.optimizer import REFERENCE_BATCH

GLOBAL_BATCH = 2048  # images

CONFIG = Config(
    model="resnet50",
    stochastic_depth=0.05,
    loss="bce",
    bce_threshold=0.2,  # a class counts as present in a mixed image if the class's share of the image is above this
    label_smoothing=0.1,
    data="data/imagenet",
    image_size=224,
    val_crop_fraction=0.95,
    interpolation="bicubic",
    train_interpolation="random",
    batch_size=256,
    random_area=(0.08, 1.0),
    auto_augment="randaugment-timm",
    randaugment_operations=2,
    randaugment_magnitude=7.0,
    randaugment_magnitude_std=0.5,
    mixup=0.2,
    cutmix=1.0,
    repeated_augmentation=3,
    epochs=600,
    optimizer="lamb",
    learning_rate=5e-3 * REFERENCE_BATCH / GLOBAL_BATCH,
    schedule="cosine",
    warmup_epochs=5.0,
    epsilon=1e-6,
    weight_decay=0.01,
    clip_norm=1.0,
)
