"""ResNet-18 on CIFAR-10 with today's ingredients, upscaled to 96 pixels: TrivialAugment, random erasing, mixup or
CutMix, label smoothing, stochastic depth, repeated augmentation, clipping, moving average.

    python -m train --config cifar10_strong --data /path/to/cifar10

benchmarks/cifar10_recipe.py trains it beside PyTorch, and with one ingredient left out at a time (docs/recipes.md).

Hardware: one NVIDIA GPU. Images/sec: not measured here. Accuracy: not measured here.
"""

from train.config import Config

CONFIG = Config(
    model="resnet18",
    data="data/cifar10",
    image_size=96,
    val_crop_fraction=1.0,
    batch_size=512,
    crop_padding=4,
    auto_augment="trivialaugment",
    random_erasing=0.1,
    mixup=0.2,
    cutmix=1.0,
    repeated_augmentation=2,
    label_smoothing=0.1,
    stochastic_depth=0.05,
    epochs=40,
    learning_rate=0.2,
    warmup_epochs=3.0,
    momentum=0.9,
    nesterov=True,
    weight_decay=5e-4,
    clip_norm=1.0,
    ema_decay=0.99,
    zero_init_residual=False,  # blocks that begin as their shortcuts learn late: docs/recipes.md
    validate_every=5,
)
